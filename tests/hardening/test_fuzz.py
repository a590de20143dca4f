"""Random patterns, shapes, dtypes, layouts, masks, budgets and dropout on every CPU backend, against the dense oracle."""

from __future__ import annotations

import os

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import answer, error
from strategies import LAYOUTS, laid_out, problems

from dilated_attention_pytorch import attention_with_lse, make_plan
from dilated_attention_pytorch.kernels.dropout import fresh_seed, kept
from dilated_attention_pytorch.kernels.native import library_path

EXAMPLES = int(os.environ.get("DAP_FUZZ_EXAMPLES", "60"))
"""Continuous integration tries some dozen; a night has time for thousands."""
BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_call_on_any_backend_is_that_of_the_oracle(data):
    pattern, n, heads = data.draw(problems(longest=100, heads=(1, 2, 4)))
    try:
        make_plan(pattern, n, heads)
    except ValueError as refusal:
        # Branches dealt out to fewer heads than there are branches: refused, as it should be.
        assert "must have a head for each" in str(refusal)
        assume(False)
    groups = data.draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    dtype, backend = data.draw(st.sampled_from(list(ROUNDING))), data.draw(st.sampled_from(BACKENDS))
    batch, d, e = (data.draw(st.sampled_from(sizes)) for sizes in ([1, 2], [1, 8, 19], [1, 8, 24]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    shapes = [(batch, heads, n, d), (batch, groups, n, d), (batch, groups, n, e), (batch, heads, n, e)]
    rows = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    *leaves, grad = (laid_out(x, data.draw(LAYOUTS)) for x in rows)
    leaves = [x.detach().requires_grad_() for x in leaves]
    padding = torch.rand(batch, n, generator=generator) < 0.3 if data.draw(st.booleans()) else None
    options = {"scale": data.draw(st.sampled_from([None, 0.0, -0.3, 1.5])), "key_padding_mask": padding}
    asked = {"dropout_p": data.draw(st.sampled_from([0.0, 0.0, 0.4])), "enable_gqa": True, "backend": backend}
    if data.draw(st.booleans()):
        asked["memory_budget"] = 2**30
    torch.manual_seed(7)
    output, lse = attention_with_lse(*leaves, pattern, **options, **asked)
    if asked["dropout_p"]:
        torch.manual_seed(7)
        stream, position = torch.arange(batch * heads).view(batch, heads, 1, 1), torch.arange(n)
        keep = kept(fresh_seed(torch.device("cpu")), stream, position[:, None], position, asked["dropout_p"])
        options |= {"kept": keep, "dropout_p": asked["dropout_p"]}
    wanted = answer(*rows[:3], pattern, grad_output=rows[3], **options)
    assert error(output, wanted.output) <= ROUNDING[dtype]
    assert error(lse, wanted.lse) <= min(ROUNDING[dtype], 4e-6)
    found = torch.autograd.grad(output, leaves, grad)
    for got, want in zip(found, wanted[2:], strict=True):
        # A key that a hundred rows see alone has a gradient of 0, found as a sum of a hundred roundings.
        assert error(got, want) <= 16 * ROUNDING[dtype]

"""Random patterns, shapes, dtypes, layouts, masks, budgets and dropout, against the dense oracle.

On every CPU backend, and on the Triton kernels in their interpreter, which a process must be started with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracle import answer, error
from strategies import LAYOUTS, laid_out, problems

from dilated_attention_pytorch import BackendUnsupported, attention_with_lse, make_plan
from dilated_attention_pytorch.kernels.dropout import fresh_seed, kept
from dilated_attention_pytorch.kernels.native import library_path

EXAMPLES = int(os.environ.get("DAP_FUZZ_EXAMPLES", "60"))
"""Continuous integration tries some dozen; a night has time for thousands."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ["triton"] if INTERPRETED else ["reference", "cpu", *(["native"] if library_path().exists() else [])]
ROUNDING = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
DTYPES = [torch.float32, torch.float16] if INTERPRETED else list(ROUNDING)
LONGEST = 48 if INTERPRETED else 100


@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_any_call_on_any_backend_is_that_of_the_oracle(data):
    pattern, n, heads = data.draw(problems(longest=LONGEST, heads=(1, 2) if INTERPRETED else (1, 2, 4)))
    try:
        make_plan(pattern, n, heads)
    except ValueError as refusal:
        # Branches dealt out to fewer heads than there are branches: refused, as it should be.
        assert "must have a head for each" in str(refusal)
        assume(False)
    groups = data.draw(st.sampled_from([g for g in (1, 2, 4) if heads % g == 0]))
    dtype, backend = data.draw(st.sampled_from(DTYPES)), data.draw(st.sampled_from(BACKENDS))
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
    try:
        output, lse = attention_with_lse(*leaves, pattern, **options, **asked)
    except BackendUnsupported as refusal:
        # Tiles of a pattern's own that are no power of two.
        assert INTERPRETED and "block size" in str(refusal)
        assume(False)
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


@pytest.mark.slow
def test_the_triton_kernels_take_any_call_too():
    pytest.importorskip("triton")
    examples = {"DAP_FUZZ_EXAMPLES": os.environ.get("DAP_FUZZ_EXAMPLES", "8")}
    # A smaller example takes longer to find than a test may take.
    environment = os.environ | examples | {"TRITON_INTERPRET": "1", "HYPOTHESIS_PROFILE": "planted"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
    # The interpreter computes with numpy, which warns where a GPU gives inf.
    command += ["-W", "ignore::RuntimeWarning"]
    chosen = f"{__file__}::test_any_call_on_any_backend_is_that_of_the_oracle"
    folder = Path(__file__).parents[2]
    done = subprocess.run(
        [*command, chosen], cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]

"""Dropout depends on the tokens of rows: rows in another order drop the same weights."""

from __future__ import annotations

import pytest
import torch
from oracle import error

from dilated_attention_pytorch import Full, make_plan
from dilated_attention_pytorch.kernels.call import AttentionCall
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.kernels.dropout import keep_mask, shifted
from dilated_attention_pytorch.kernels.registry import backend_named

N, HEADS = 75, 4


@pytest.mark.parametrize("backend", ["reference", "cpu", "native"])
def test_rows_in_another_order_drop_the_same_weights(backend):
    if backend == "native" and not library_path().exists():
        pytest.skip("C++ kernel not built")
    generator = torch.Generator().manual_seed(0)
    query, grad = (torch.randn(2, HEADS, N, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(2, 2, N, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    plan, seed = make_plan(Full(), N, HEADS, 16), torch.tensor([1234567890123456789])
    rows, columns = (torch.randperm(N, generator=generator) for _ in range(2))
    positions = torch.stack([rows, columns])[:, None].expand(2, HEADS, N).contiguous()
    module = backend_named(backend)
    plain = AttentionCall(query, key, value, plan, 0.3, None, 0.4, seed, Full())
    moved = AttentionCall(
        query[:, :, rows], key[:, :, columns], value[:, :, columns], plan, 0.3, None, 0.4, seed, Full(), positions
    )
    wanted, found = module.forward(plain), module.forward(moved)
    assert error(found.output, wanted.output[:, :, rows]) <= 1e-12
    assert error(found.lse, wanted.lse[:, :, rows]) <= 1e-12
    before = module.backward(plain, *wanted, grad, None)
    after = module.backward(moved, *found, grad[:, :, rows].contiguous(), None)
    for got, want, order in zip(after, before, (rows, columns, columns), strict=True):
        assert error(got, want[:, :, order]) <= 1e-12


def test_a_shifted_seed_skips_streams():
    seed, place = torch.tensor([-(2**40) + 12345]), torch.arange(30)
    stream = torch.arange(5)[:, None, None]
    wanted = keep_mask(seed, stream + 7, place[:, None], place, 0.5)
    assert keep_mask(shifted(seed, 7), stream, place[:, None], place, 0.5).equal(wanted)
    assert not keep_mask(seed, stream, place[:, None], place, 0.5).equal(wanted)

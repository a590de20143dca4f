"""ALiBi by distance: the same error at any position, on every backend and in every dtype."""

from __future__ import annotations

import pytest
import torch
from oracle import error
from torch import Tensor

from dilated_attention_pytorch import attention, attention_step
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.nn.positional import Alibi

N = 200
LAST = 2**24 - N
BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-8, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""In half precision the slope is rounded, and so is the output."""


def rows(heads: int, key_heads: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(heads)
    shapes = (1, heads, N, d), (1, key_heads, N, d), (1, key_heads, N, 8), (1, heads, N, 8)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def biased(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense float64 attention with the bias of ALiBi, as it is defined."""
    heads = query.shape[1]
    key, value = (x.double().repeat_interleave(heads // key.shape[1], 1) for x in (key, value))
    slope = 2.0 ** (-8.0 * torch.arange(1, heads + 1, dtype=torch.float64) / heads)
    if query.dtype.itemsize == 2:
        scale = query.shape[-1] ** -0.5
        slope = (slope / scale).to(query.dtype).double() * scale
    at = torch.arange(N)
    scores = query.shape[-1] ** -0.5 * query.double() @ key.mT + slope[:, None, None] * (at - at[:, None])
    return scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("begin", [0, 100_000, 2**16 - N // 2, LAST])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("heads", "key_heads", "d"), [(4, 4, 64), (6, 3, 48)])
def test_alibi_far_from_the_start_matches_oracle(heads, key_heads, d, backend, dtype, begin):
    *three, grad = rows(heads, key_heads, d, dtype)
    exact = [x.double().requires_grad_() for x in three]
    wanted = biased(*exact) if dtype.itemsize > 2 else biased(*three)
    leaves = [x.requires_grad_() for x in three]
    query, key = Alibi().apply(*leaves[:2], torch.arange(begin, begin + N)[None], d**-0.5)
    output = attention(query, key, leaves[2], "causal", scale=d**-0.5, enable_gqa=True, backend=backend)
    assert error(output, wanted.detach()) < TOLERANCE[dtype]
    if dtype.itemsize > 2:
        grads = torch.autograd.grad(output, leaves, grad)
        for got, want in zip(grads, torch.autograd.grad(wanted, exact, grad.double()), strict=True):
            assert error(got, want) < TOLERANCE[dtype]


@pytest.mark.parametrize("begin", [0, LAST])
def test_alibi_of_a_decoded_row_matches_oracle(begin):
    query, key, value, _ = rows(4, 4, 64, torch.float32)
    own, seen = Alibi().apply(query, key, torch.arange(begin, begin + N)[None], 0.125)
    found = attention_step(own[:, :, -1:], seen, value, "causal", N - 1, scale=0.125)
    assert error(found, biased(query, key, value)[:, :, -1:]) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("begin", [0, LAST])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_alibi_on_a_gpu_matches_oracle(dtype, begin):
    query, key, value, _ = (x.cuda() for x in rows(8, 2, 64, dtype))
    own, seen = Alibi().apply(query, key, torch.arange(begin, begin + N, device="cuda")[None], 0.125)
    found = attention(own, seen, value, "causal", scale=0.125, enable_gqa=True)
    assert error(found, biased(query.cpu(), key.cpu(), value.cpu())) < TOLERANCE[dtype]

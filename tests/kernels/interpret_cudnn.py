"""Run dilated problems through the piecewise backend, its dense calls in float64 and its Triton kernels interpreted.

A program of its own: Triton decides when it is imported whether to interpret, and the test session must not.
"""

import json
import os
import sys
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
from cases import Problem
from conftest import ALLOCATORS, poisoned
from oracle import answer, error

from dilated_attention_pytorch.kernels import cudnn
from dilated_attention_pytorch.kernels.registry import AttentionCall
from dilated_attention_pytorch.plan import make_plan


class Trial(NamedTuple):
    text: str
    n: int
    heads: int = 4
    key_heads: int | None = None
    batch: int = 1
    tokens_first: bool = False
    """(B, N, H, D) memory, with room between the rows"""
    lse_gradient: bool = False
    other_gradient_order: bool = False
    """a gradient that does not lie in memory as the output does"""


LADDER = "dilated:16x1,32x2,64x4"
TRIALS = {
    "whole sequence": Trial("full", 40),
    "whole sequence, causal, batch": Trial("causal", 37, batch=2),
    "one part covers every row": Trial(LADDER, 128),
    "ragged ends": Trial(LADDER, 150),
    "ragged ends, causal": Trial(f"{LADDER} & causal", 141),
    "segments of one token": Trial("dilated:16x1,32x8", 65),
    "residues that do not divide the segment": Trial("dilated:24x1,50x3,90x7", 131, heads=3),
    "residues of heads in blocks": Trial("dilated:16x1,64x4;offset=block", 100, heads=6),
    "rows without a key": Trial("dilated:32x8", 64, heads=2),
    "heads that sit out a part": Trial("dilated:16x1,32x2;heads=split", 80, heads=3),
    "residues as segments": Trial("strided:7 & causal", 70, heads=2),
    "documents": Trial("documents:30,30,1,45,20 & causal", 126, heads=2),
    "grouped key heads": Trial(f"{LADDER} & causal", 100, heads=8, key_heads=2),
    "grouped key heads, blocks": Trial("dilated:16x1,64x4;offset=block", 100, heads=6, key_heads=3),
    "batch, heads outside": Trial(LADDER, 128, batch=3),
    "batch, heads outside, ragged": Trial("dilated:16x1,32x2,48x3 & causal", 110, heads=6, batch=2),
    "batch, tokens outside": Trial(f"{LADDER} & causal", 128, batch=2, tokens_first=True),
    "batch, tokens outside, ragged": Trial(LADDER, 101, batch=2, tokens_first=True),
    "gradient of the LSE": Trial(LADDER, 72, lse_gradient=True),
    "gradient in another memory order": Trial(LADDER, 128, other_gradient_order=True),
}


def attend(query, key, value, causal, scale):
    """Dense attention as the backend asks for it, exactly."""
    output, lse = exact(query, key, value, causal, scale)
    # As torch does it: dense, in the memory order of the query.
    return torch.empty_like(query).copy_(output), lse.float()


def attend_backward(query, key, value, output, grad, lse, causal, scale):
    dense = torch.empty_like(query).stride()
    for tensor in (output, grad):
        wrong = [a != b for a, b, edge in zip(tensor.stride(), dense, tensor.shape, strict=True) if edge > 1]
        if any(wrong):
            raise RuntimeError(f"strides must be {dense}, got {tensor.stride()}")
    if not lse.is_contiguous():
        raise RuntimeError(f"lse must be contiguous, got strides {lse.stride()}")
    q, k, v, o, g = (t.double() for t in (query, key, value, output, grad))
    weights = torch.exp(scores(q, k, causal, scale) - lse.double()[..., None])
    slope = scale * weights * (g @ v.transpose(-1, -2) - (g * o).sum(-1, keepdim=True))
    grads = slope @ k, slope.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ g
    return tuple(torch.empty_like(x).copy_(y) for x, y in zip((query, key, value), grads, strict=True))


def scores(query, key, causal, scale):
    products = scale * query.double() @ key.double().transpose(-1, -2)
    future = torch.ones(products.shape[-2:], dtype=torch.bool).triu(1) if causal else torch.zeros(1, dtype=torch.bool)
    return products.masked_fill(future, float("-inf"))


def exact(query, key, value, causal, scale):
    weights = scores(query, key, causal, scale)
    return weights.softmax(-1) @ value.double(), weights.logsumexp(-1)


def errors(trial: Trial) -> dict[str, float]:
    key_heads = trial.key_heads or trial.heads
    problem = Problem(
        name="", text=trial.text, n=trial.n, heads=trial.heads, key_heads=key_heads, batch=trial.batch, d=8, e=8
    )
    drawn = problem.inputs(torch.float32)
    *rows, grad_lse = (apart(x) for x in drawn) if trial.tokens_first else drawn
    query, key, value, grad_output = rows
    if trial.other_gradient_order:
        grad_output = grad_output.transpose(1, 2).contiguous().transpose(1, 2)
    plan = make_plan(problem.pattern, problem.n, problem.heads, problem.block_size)
    call = AttentionCall(query, key, value, plan, problem.d**-0.5)
    output, lse = cudnn.forward(call)
    slope = grad_lse if trial.lse_gradient else None
    gradients = cudnn.backward(call, output, lse, grad_output, slope)
    wanted = answer(query, key, value, problem.pattern, grad_output=grad_output, grad_lse=slope)
    named = zip(wanted._fields, (output, lse, *gradients), wanted, strict=True)
    return {name: error(got, want) for name, got, want in named}


def apart(rows: torch.Tensor) -> torch.Tensor:
    if rows.dim() != 4:
        return rows
    batch, heads, n, width = rows.shape
    wider = torch.full((batch, n, heads, width + 8), float("nan"), dtype=rows.dtype)
    return wider[..., :width].transpose(1, 2).copy_(rows)


if __name__ == "__main__":
    cudnn.attend, cudnn.attend_backward = attend, attend_backward
    for owner, name in ALLOCATORS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    for name in sys.argv[1:] or TRIALS:
        print(json.dumps({"trial": name} | errors(TRIALS[name])), flush=True)

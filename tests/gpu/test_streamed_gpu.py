"""Streamed attention on a GPU: sources and sinks on either side of the bus, copies beside the computation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import Problem
from oracle import answer, error

from dilated_attention_pytorch.ops.streaming.sinks import TensorSink
from dilated_attention_pytorch.ops.streaming.sources import TensorSource, open_tensor
from dilated_attention_pytorch.ops.streaming.stream import streamed_attention, streamed_gradients

pytestmark = pytest.mark.gpu

LADDER = "dilated:128x1,512x4,2048x16"
PATTERNS = (LADDER, f"{LADDER} & causal", "window:200 & causal", "random:0.3")


def problem(text: str) -> Problem:
    return Problem(name=text, text=text, n=1800, heads=4, key_heads=4, d=64, e=64)


@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize("source", ["cpu", "cuda"])
@pytest.mark.parametrize("sink", ["cpu", "cuda"])
def test_rows_cross_the_bus_unharmed(text: str, source: str, sink: str):
    inputs = problem(text).inputs(torch.bfloat16)
    wanted = answer(inputs.query, inputs.key, inputs.value, problem(text).pattern)
    given = tuple(t.to(source) for t in inputs[:3])
    output = torch.full(inputs.query.shape, torch.nan, dtype=torch.bfloat16, device=sink)
    lse = torch.full(wanted.lse.shape, torch.nan, device=sink)
    for chunk in (512, 700):
        streamed_attention(given, text, TensorSink(output, lse), chunk=chunk, device="cuda")
        assert error(output, wanted.output) < 1e-2 and error(lse, wanted.lse) < 1e-3


@pytest.mark.parametrize("text", PATTERNS)
def test_gradients_are_those_of_the_whole(text: str):
    inputs = problem(text).inputs(torch.bfloat16)
    wanted = answer(inputs.query, inputs.key, inputs.value, problem(text).pattern, grad_output=inputs.grad_output)
    source = TensorSource(*inputs[:3], gradients=True)
    grad_output = inputs.grad_output.cuda()
    streamed_gradients(
        source,
        text,
        lambda begin, found, _: grad_output[:, :, begin : begin + found.shape[2]],
        chunk=512,
        device="cuda",
    )
    assert source.grads is not None
    for got, grad in zip(source.grads, wanted[2:], strict=True):
        assert error(got, grad) < 2e-2


def test_a_file_is_read_and_written_while_the_gpu_computes(tmp_path: Path):
    inputs = problem(LADDER).inputs(torch.float16)
    streamed_attention(tuple(inputs[:3]), LADDER, tmp_path / "rows.npy", chunk=512, device="cuda")
    wanted = answer(inputs.query, inputs.key, inputs.value, problem(LADDER).pattern).output
    assert error(open_tensor(tmp_path / "rows.npy"), wanted) < 3e-3

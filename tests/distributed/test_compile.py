"""The exchange and context-parallel attention inside one compiled graph."""

from __future__ import annotations

import pytest
import torch
from oracle import error
from processes import all_pass

from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention, shard_sequence
from dilated_attention_pytorch.distributed.exchange import exchange, plan_exchange, request_for
from dilated_attention_pytorch.distributed.schedule import rank_plan
from dilated_attention_pytorch.distributed.transport import GroupTransport
from dilated_attention_pytorch.patterns import parse

pytestmark = pytest.mark.compile
CHECKS = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")


def one_graph(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(48, world)
    torch.manual_seed(0)
    whole = [torch.randn(1, 2, 48, 8, dtype=torch.float64) for _ in range(3)]
    leaves = [shard_sequence(x, layout, rank).clone().requires_grad_() for x in whole]
    leaves.append(torch.randn(2, 21, dtype=torch.float64, requires_grad=True))

    def attend(q, k, v, table):
        terms = {"softcap": 3.0, "bias": table}
        return context_parallel_attention(q * 2, k, v, "dilated:8x1,32x4", layout, is_causal=True, **terms) * 3

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        wanted, found = attend(*leaves), compiled(*leaves)
        assert error(found, wanted.detach()) <= 1e-14
        grads = [torch.autograd.grad(x.sin().sum(), leaves) for x in (found, wanted)]
        for got, want in zip(*grads, strict=True):
            assert error(got, want) <= 1e-14


def operators_pass_opcheck(rank: int, world: int) -> None:
    layout = SequenceLayout.contiguous(40, world)
    request = request_for(rank_plan(parse("window:5"), layout, rank, 2, 2).far_codes, layout, rank, 2)
    (plan,) = plan_exchange([request], layout, 2, GroupTransport(None, rank))
    rows = torch.randn(plan.local_rows, 3, dtype=torch.float64, requires_grad=True)
    counts = list(plan.send_counts), list(plan.request.counts)
    name = torch.distributed.group.WORLD.group_name
    operators = torch.ops.dilated_attention
    torch.library.opcheck(operators.exchange.default, (rows, plan.send, *counts, name), test_utils=CHECKS)
    back = torch.randn(len(plan.request.codes), 3, dtype=torch.float64, requires_grad=True)
    arguments = (back, plan.send, *counts, plan.local_rows, name)
    torch.library.opcheck(operators.exchange_transposed.default, arguments, test_utils=CHECKS)

    def through(x):
        return (exchange(x * 2, plan, None) ** 2).sum()

    compiled = torch.compile(through, fullgraph=True, backend="aot_eager")
    wanted, found = (torch.autograd.grad(f(rows), rows)[0] for f in (through, compiled))
    assert error(found, wanted) <= 1e-14


def both(rank: int, world: int) -> None:
    one_graph(rank, world)
    operators_pass_opcheck(rank, world)


@pytest.mark.timeout(200)
def test_two_processes_compile_it_as_one_graph():
    all_pass(both, 2, seconds=180)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch, about its own tracing
def test_one_rank_compiles_it_as_one_graph():
    one_graph(0, 1)

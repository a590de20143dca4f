"""Eight ranks on one GPU: threads with real collectives, CUDA kernels, forward and backward, against one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from worlds import run_threads

from dilated_attention_pytorch import attention_with_lse
from dilated_attention_pytorch.distributed import (
    SequenceLayout,
    context_parallel_attention,
    context_parallel_attention_with_lse,
    shard_sequence,
    virtual_attention,
)
from dilated_attention_pytorch.distributed.transport import wire_device

pytestmark = pytest.mark.gpu
WORLD, N = 8, 4096


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", ["none", "local"])
@pytest.mark.parametrize("text", ["dilated:256x1,1024x4,4096x16 & causal", "window:300 | global:8"])
def test_eight_ranks_compute_what_one_device_does(text, overlap):
    torch.manual_seed(0)
    inputs = [torch.randn(1, 4, N, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    layout = SequenceLayout.contiguous(N, WORLD)

    def results(attend, tensors, grad):
        leaves = [x.clone().requires_grad_() for x in tensors]
        output, lse = attend(*leaves)
        # On a GPU, autograd runs backward on one thread for all ranks, where each would wait for the next.
        with torch.autograd.set_multithreading_enabled(False):
            return output.detach(), lse.detach(), *torch.autograd.grad((output * grad).sum(), leaves)

    wanted = results(lambda *x: attention_with_lse(*x, text), inputs[:3], inputs[3])
    exact = results(lambda *x: attention_with_lse(*x, text), [x.float() for x in inputs[:3]], inputs[3].float())
    allowed = [2 * (a.float() - b).abs().max().item() + 1e-3 for a, b in zip(wanted, exact, strict=True)]

    def check(rank: int, _: int) -> None:
        torch.cuda.set_device(0)
        own = [shard_sequence(x, layout, rank) for x in inputs]
        found = results(
            lambda *x: context_parallel_attention_with_lse(*x, text, layout, overlap=overlap), own[:3], own[3]
        )
        for got, want, most in zip(found, exact, allowed, strict=True):
            assert (got.float() - shard_sequence(want, layout, rank)).abs().max().item() <= most

    run_threads(check, WORLD, seconds=240)


@pytest.mark.parametrize("options", [{}, {"overlap": "local"}, {"exchange": "ring"}], ids=["fetch", "overlap", "ring"])
def test_virtual_ranks_on_cuda_with_dropout_and_padding(options):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 700, 32, device="cuda") for _ in range(3))
    padding = torch.rand(2, 700, device="cuda") < 0.2
    same = {"key_padding_mask": padding, "dropout_p": 0.2, "backend": "triton"}
    torch.manual_seed(1)
    wanted = attention_with_lse(query, key, value, "dilated:128x1,512x4", **same).output
    torch.manual_seed(1)
    layout = SequenceLayout.contiguous(700, 3)
    found = virtual_attention(query, key, value, "dilated:128x1,512x4", layout, **same, **options).output
    assert (found - wanted).abs().max().item() <= 1e-4


def test_one_rank_on_nccl_is_the_single_device_call():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        layout, x = SequenceLayout.contiguous(512, 1), torch.randn(1, 2, 512, 64, device="cuda")
        assert wire_device(dist.group.WORLD) == x.device
        output = context_parallel_attention(x, x, x, "window:50", layout, dist.group.WORLD)
        assert output.equal(attention_with_lse(x, x, x, "window:50").output)
    finally:
        dist.destroy_process_group()

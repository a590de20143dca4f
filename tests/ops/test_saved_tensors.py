"""Gradients under saved-tensor hooks, which return equal tensors with other strides."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME
from oracle import answer, error
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dilated_attention_pytorch import attention_with_lse
from dilated_attention_pytorch.distributed import SequenceLayout
from dilated_attention_pytorch.distributed.attention import context_parallel_attention_with_lse
from dilated_attention_pytorch.kernels.cpu.native import library_path

BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]


def turned(x: Tensor) -> Tensor:
    """The tensor with its last dimension outside."""
    return x.mT.contiguous().mT if x.dim() > 1 else x


def tokens_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() > 2 else x


def spread(x: Tensor) -> Tensor:
    """The tensor with a gap after each element."""
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0] if x.is_floating_point() else x


HOOKS = {
    "save_on_cpu": save_on_cpu,
    **{
        unpack.__name__: lambda unpack=unpack: saved_tensors_hooks(lambda x: x.detach(), unpack)
        for unpack in (turned, tokens_first, spread)
    },
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("backend", [*BACKENDS, "ranks"])
@pytest.mark.parametrize("name", ["window-causal", "dilated-ladder", "gqa"])
def test_gradients_do_not_depend_on_saved_strides(name: str, backend: str, hooks: str):
    problem = BY_NAME[name]
    inputs = problem.inputs()
    leaves = [tokens_first(x).requires_grad_() for x in inputs[:3]]
    wanted = answer(*inputs[:3], problem.pattern, grad_output=inputs.grad_output, grad_lse=inputs.grad_lse)
    with HOOKS[hooks]():
        if backend == "ranks":
            layout = SequenceLayout.contiguous(problem.n, 1)
            found = context_parallel_attention_with_lse(*leaves, problem.text, layout, enable_gqa=True)
        else:
            found = attention_with_lse(*leaves, problem.text, enable_gqa=True, backend=backend)
    grads = torch.autograd.grad(found, leaves, (inputs.grad_output, inputs.grad_lse))
    for got, want in zip(grads, wanted[2:], strict=True):
        assert error(got, want) < 1e-10


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpointing_match_oracle(reentrant: bool):
    problem = BY_NAME["dilated-ladder"]
    inputs = problem.inputs()
    leaves = [x.requires_grad_() for x in inputs[:3]]

    def run(*tensors: Tensor) -> Tensor:
        return attention_with_lse(*tensors, problem.text).output

    checkpoint(run, *leaves, use_reentrant=reentrant).backward(inputs.grad_output)
    wanted = answer(*(x.detach() for x in leaves), problem.pattern, grad_output=inputs.grad_output)
    for leaf, want in zip(leaves, wanted[2:], strict=True):
        assert error(leaf.grad, want) < 1e-10

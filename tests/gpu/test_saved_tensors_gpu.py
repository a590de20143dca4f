"""Gradients of the GPU kernels under saved-tensor hooks, whose tensors have other strides than the forward had."""

from __future__ import annotations

import pytest
import torch
from oracle import answer, error
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from dilated_attention_pytorch import BackendUnsupported, attention
from dilated_attention_pytorch.kernels.call import reproducible_gradients
from dilated_attention_pytorch.patterns import parse

pytestmark = pytest.mark.gpu

PATTERNS = ["full", "window:100 & causal", "dilated:256x1,512x2,1024x4", "global:128;queries=1 | window:100"]


def off_the_grid(x):
    """The tensor one element past a 16-byte boundary."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) if x.is_floating_point() else x


HOOKS = {
    "pinned": lambda: save_on_cpu(pin_memory=True),
    "pageable": save_on_cpu,
    "width outside": lambda: saved_tensors_hooks(lambda x: x, lambda x: x.mT.contiguous().mT if x.dim() > 1 else x),
    "off the grid": lambda: saved_tensors_hooks(lambda x: x, off_the_grid),
}


@pytest.fixture(params=[True, False], ids=["reproducible", "fused"])
def reproducible(request):
    before = reproducible_gradients()
    reproducible_gradients(request.param)
    yield request.param
    reproducible_gradients(before)


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_gradients_do_not_depend_on_saved_strides(backend, pattern, hooks, reproducible):
    n, heads = 1100, 4
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(2, n, heads, 64, generator=generator).bfloat16() for _ in range(4)]
    # As modules pass them, heads inside tokens: `save_on_cpu` returns them with tokens inside heads.
    *three, grad = (x.transpose(1, 2) for x in rows)
    wanted = answer(*three, parse(pattern), grad_output=grad)

    def gradients(context):
        leaves = [x.transpose(1, 2).cuda().transpose(1, 2).detach().requires_grad_() for x in three]
        with context:
            output = attention(*leaves, pattern, backend=backend)
        return torch.autograd.grad(output, leaves, grad.cuda())

    try:
        # Twice: the second call takes launches that the first one prepared.
        plain = [gradients(torch.enable_grad()) for _ in range(2)][1]
    except BackendUnsupported as refusal:
        pytest.skip(str(refusal))
    for _ in range(3):
        hooked = gradients(HOOKS[hooks]())
        for got, without, want in zip(hooked, plain, wanted[2:], strict=True):
            assert error(got, want) <= 2 * error(without, want) + 1e-3

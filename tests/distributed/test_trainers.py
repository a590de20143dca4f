"""`LongNetLM` under DDP and FSDP2 on two gloo processes: losses and gradients of one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from oracle import error
from processes import all_pass
from torch import nn

from dilated_attention_pytorch import LongNetLM

SMALL = {
    "num_tokens": 40,
    "d_model": 32,
    "nhead": 4,
    "num_decoder_layers": 2,
    "dim_feedforward": 48,
    "segment_lengths": (8, 32),
    "dilation_rates": (1, 2),
    "sink": True,
}


def trained(rank: int, world: int, wrap: str, tied: bool, checkpointing: bool) -> None:
    torch.manual_seed(0)
    plain, model = (
        LongNetLM(**SMALL, tie_embeddings=tied, gradient_checkpointing=checkpointing, dtype=torch.float64)
        for _ in range(2)
    )
    model.load_state_dict(plain.state_dict())
    tokens = torch.randint(40, (world, 31))
    loss = plain.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    if wrap == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        mesh = init_device_mesh("cpu", (world,))
        for layer in model.long_net.decoder.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
        if wrap == "fsdp method":
            register_fsdp_forward_method(wrapped, "loss")
    own = tokens[rank : rank + 1]
    call = wrapped.loss if wrap == "fsdp method" else wrapped
    found = call(own[:, :-1], targets=own[:, 1:])
    found.backward()
    mean = found.detach() / world
    dist.all_reduce(mean)
    assert error(mean, loss.detach()) < 1e-12
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        assert error(grad, other.grad) < 1e-10, name


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("wrap", ["ddp", "fsdp", "fsdp method"])
def test_loss_and_gradients_match_one_process(wrap, tied):
    all_pass(trained, 2, wrap, tied, False)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_checkpointed_layers_match_one_process(wrap):
    all_pass(trained, 2, wrap, True, True)

"""Sharded parameters (FSDP2), sequences spread over the same ranks, and sharded checkpoints, with torch alone.

python examples/fsdp_context_parallel.py --ranks 2     # starts torchrun; NCCL where there are GPUs, gloo elsewhere
"""

import argparse
import os
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import distributed as spread
from dilated_attention_pytorch import nn


def build(mesh: dist.DeviceMesh, device: torch.device) -> tuple[dap.LongNetLM, torch.optim.Optimizer]:
    model = dap.LongNetLM("tiny", num_decoder_layers=2, device=device)
    nn.set_process_group(model, mesh)
    for module in (*model.long_net.decoder.layers, model):
        fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def train(model, optimizer, layout: spread.SequenceLayout, steps: range, device: torch.device) -> list[float]:
    rank, losses = dist.get_rank(), []
    for step in steps:
        whole = torch.randint(256, (1, layout.n), generator=torch.Generator().manual_seed(step)).cumsum(1) % 256
        tokens = spread.shard_sequence(whole, layout, rank, dim=1).to(device)
        targets = spread.next_token_labels(whole, layout, rank).to(device)
        # FSDP averages gradients over the ranks: the mean of all tokens is the mean of these sums.
        loss = model(tokens, targets=targets, reduction="sum") * layout.world / (layout.n - 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / layout.world)
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--ranks", 2), ("--tokens", 2000), ("--steps", 10)):
        parser.add_argument(name, type=int, default=default)
    told = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ["CHECKPOINT"] = tempfile.mkdtemp()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={told.ranks}"]
        raise SystemExit(subprocess.run([*launch, *sys.argv], check=False).returncode)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    layout = spread.SequenceLayout.zigzag(told.tokens, dist.get_world_size())
    torch.manual_seed(0)
    model, optimizer = build(mesh, device)
    losses = train(model, optimizer, layout, range(told.steps), device)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=os.environ["CHECKPOINT"])
    more = range(told.steps, told.steps + 2)
    later = train(model, optimizer, layout, more, device)
    weights, moments = get_state_dict(*(resumed := build(mesh, device)))
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=os.environ["CHECKPOINT"])
    set_state_dict(*resumed, model_state_dict=weights, optim_state_dict=moments)
    assert train(*resumed, layout, more, device) == later
    if dist.get_rank() == 0:
        print(f"{layout.world} ranks: loss {losses[0]:.4f} to {later[-1]:.4f}; a resumed run gives the same losses")
    dist.barrier()  # no rank ends while another one still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

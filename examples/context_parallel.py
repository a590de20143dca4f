"""Train on sequences spread over processes, and compare with one process.

python examples/context_parallel.py --ranks 4     # starts torchrun; NCCL where there are GPUs, gloo elsewhere
"""

import argparse
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

import dilated_attention_pytorch as dap
from dilated_attention_pytorch import distributed as spread

WORDS, WIDTH, LADDER = 64, 64, ([32, 128, 512], [1, 4, 16])


class Model(nn.Module):
    def __init__(self, **ranks: object) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attention = dap.RingMultiheadDilatedAttention(WIDTH, 4, *LADDER, position="rotary", **ranks)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head((x := self.words(tokens)) + self.attention(x, is_causal=True)[0])


def train(model: Model, layout: spread.SequenceLayout, rank: int, steps: int, device: torch.device) -> list[float]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(steps):
        whole = torch.randint(WORDS, (1, layout.n), generator=torch.Generator().manual_seed(step)).cumsum(1) % WORDS
        tokens = spread.shard_sequence(whole, layout, rank, dim=1).to(device)
        labels = spread.next_token_labels(whole, layout, rank).to(device)
        loss_of = nn.functional.cross_entropy if layout.world == 1 else spread.context_parallel_loss
        loss = loss_of(model(tokens).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        if layout.world > 1:
            spread.GradientBuckets(model.parameters()).synchronize()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("--ranks", 2), ("--tokens", 1000), ("--steps", 20)):
        parser.add_argument(name, type=int, default=default)
    told = parser.parse_args()
    if "RANK" not in os.environ:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={told.ranks}"]
        raise SystemExit(subprocess.run([*launch, *sys.argv], check=False).returncode)
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # NCCL binds every rank to its current GPU
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, layout = dist.get_rank(), spread.SequenceLayout.contiguous(told.tokens, dist.get_world_size())
    model = Model(process_group=dist.group.WORLD).to(device, torch.float64)
    losses = train(model, layout, rank, told.steps, device)
    if rank == 0:
        alone = Model(ring_size=1).to(device, torch.float64)
        wanted = train(alone, spread.SequenceLayout.contiguous(told.tokens, 1), 0, told.steps, device)
        apart = max((a - b).abs().max().item() for a, b in zip(model.parameters(), alone.parameters(), strict=True))
        worst = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        print(f"{layout.world} ranks with {layout.lengths} tokens: loss {losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"one process: losses within {worst:.1e}, parameters within {apart:.1e} after {told.steps} steps")
        assert max(apart, worst) < 1e-9
    dist.barrier()  # no rank ends while another one still communicates
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

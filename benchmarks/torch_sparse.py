"""Block-sparse attention by torch.sparse against ours: `python benchmarks/torch_sparse.py --out FILE`.

What torch has on a CPU are element-wise sparse products in CSR: the scores of chosen pairs (`sampled_addmm`) and a
sparse matrix times a dense one. The softmax between them runs over the stored values by hand, since none is offered for
CSR. Both sides compute the same blocks in one process, turn about, after their outputs have been found equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import warnings
from pathlib import Path

import torch
from torch import Tensor

from dilated_attention_pytorch import BlockSparseRingDilatedAttention, Plan
from dilated_attention_pytorch.tools.bench.measure import clock, facts


def csr(plan: Plan) -> Tensor:
    """The plan's pairs as a CSR matrix of zeros; every head has the same."""
    return plan.to_dense()[0].float().to_sparse_csr().mul(0.0)


def by_torch_sparse(query: Tensor, key: Tensor, value: Tensor, pairs: Tensor) -> Tensor:
    """Attention over the stored pairs, head after head; (H, N, D) each."""
    first, column = pairs.crow_indices(), pairs.col_indices()
    row = torch.arange(len(first) - 1).repeat_interleave(first.diff())
    scale = query.shape[-1] ** -0.5
    found = []
    for q, k, v in zip(query, key, value, strict=True):
        scores = torch.sparse.sampled_addmm(pairs, q, k.T, alpha=scale).values()
        top = torch.full((len(q),), -torch.inf).scatter_reduce_(0, row, scores, "amax")
        weights = (scores - top[row]).exp_()
        total = torch.zeros(len(q)).index_add_(0, row, weights)
        weights = torch.sparse_csr_tensor(first, column, weights / total[row], pairs.shape, check_invariants=False)
        found.append(weights @ v)
    return torch.stack(found)


def measure(n: int, ratio: float, heads: int, d: int, rounds: int) -> dict[str, object]:
    """One line of results."""
    module = BlockSparseRingDilatedAttention([2048], [1], sparsity_ratio=ratio)
    plan = module.plan(n, heads)
    query, key, value = torch.randn(3, 1, n, heads, d).unbind()
    turned = [tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value)]
    pairs = csr(plan)
    subjects = {
        "torch_sparse": lambda: by_torch_sparse(*turned, pairs),
        "ours": lambda: module(query, key, value)[0].transpose(0, 1),
    }
    error = float((subjects["torch_sparse"]() - subjects["ours"]()).abs().max())
    if not error < 1e-4:
        raise SystemExit(f"the two disagree by {error}")
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(rounds):
        for name, run in subjects.items():
            seconds[name].append(clock(run))
    median = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "case": f"block-sparse forward, {n} tokens, {heads} heads of {d}, blocks of 128, float32",
        "density": plan.density,
        "seconds": median,
        "times_as_long": median["torch_sparse"] / median["ours"],
        "error": error,
        **facts("cpu"),
    }


@torch.no_grad()
def main() -> None:
    """Measure and write one line a density."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="at most 8192")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/torch_sparse.jsonl"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # CSR announces itself as beta in every process that uses it.
    warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
    lines = []
    for ratio in (0.1, 0.05):
        lines.append(measure(arguments.tokens, ratio, 8, 64, arguments.rounds))
        print(f"density {lines[-1]['density']:.3f}: torch.sparse takes {lines[-1]['times_as_long']:.1f} times as long")
    arguments.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

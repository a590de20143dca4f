"""Longest sequences of `dap bench --suite extreme` beside FlexAttention's, on a GPU with all or a part of its memory.

python benchmarks/longest.py --out FILE [--cap GIB] [--most-seconds S]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dilated_attention_pytorch import Random
from dilated_attention_pytorch.kernels.external import flex
from dilated_attention_pytorch.kernels.external.block_lists import Lists, lists_of_pairs
from dilated_attention_pytorch.tools.bench import extreme
from dilated_attention_pytorch.tools.bench.results import DIRECTIONS, append
from dilated_attention_pytorch.tools.console import Parser, device_of, leave, one_of, positive, tokens


def subjects() -> dict[str, extreme.ExtremeSubject]:
    """Subjects of the suite, then the peer that is compiled on the way: it may break the device."""
    peer = extreme.ExtremeSubject("flex 1 %", 2, _flex, _flex, extreme.block_keys)
    return {**extreme.subjects(), peer.name: peer}


def _flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    n = query.shape[2]
    pattern = Random(extreme.DENSITY).resolve(n, extreme.HEADS)
    assert isinstance(pattern, Random)
    row = torch.arange(pattern.blocks, device=query.device)[:, None]
    met = pattern.drawn(row, torch.arange(pattern.kept, device=query.device)).int()
    by_query = Lists(torch.full_like(row[:, 0], pattern.kept).int(), met)
    options = {"BLOCK_SIZE": extreme.BLOCK, "seq_lengths": (n, n), "compute_q_blocks": False}
    mask = BlockMask.from_kv_blocks(*_sides(by_query), **options)
    if query.requires_grad:
        # Torch would go through a table of all blocks, and takes the width of the lists for the number of its columns.
        by_key = lists_of_pairs(met.flatten().long(), row.expand_as(met).flatten(), pattern.blocks)
        mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices = _sides(by_key)
    return _compiled_flex()(query, key, value, block_mask=mask)


def _sides(whole: Lists) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Counts and indices of partial blocks, here none, and of whole ones; a kernel may read both by one stride."""
    counts, indices = whole.counts[None, None], whole.indices[None, None]
    return torch.zeros_like(counts), torch.zeros_like(indices), counts, indices


def _compiled_flex() -> Callable[..., Tensor]:
    # One kernel for all lengths: the bisection would otherwise spend its time compiling.
    return flex.compiled(dynamic=True)


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 if a result was wrong or a subject failed."""
    parser = Parser("python benchmarks/longest.py", __doc__ or "")
    parser.out("JSONL file to add results to")
    parser.device()
    for name, known in (("subjects", list(subjects())), ("directions", list(DIRECTIONS))):
        text = f"{name} to try"
        parser.option(f"--{name}", read=one_of(known), nargs="+", default=known, metavar="NAME", help=text)
    parser.option("--cap", read=positive, metavar="GIB", help="GPU memory of this process")
    parser.option("--first", read=tokens, default=2**18, help="first length")
    parser.option("--most-seconds", read=positive, default=4.0, help="longest call")
    options = parser.read(arguments)
    if options.out is None:
        parser.error("-o must be given: a JSONL file to add results to")
    device = device_of(options.device)
    if options.cap is not None and device == "cuda":
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(options.cap * 2**30 / whole)
    began, failed = time.monotonic(), False
    chosen = [subjects()[name] for name in options.subjects]
    limits = options.first, options.most_seconds, options.cap
    for line in extreme.measure(device, chosen, options.directions, *limits):
        append(options.out, line)
        print(f"{extreme.describe(line)}  [{time.monotonic() - began:.0f} s]", flush=True)
        failed |= "skipped" in line
    return int(failed)


if __name__ == "__main__":
    leave(main)

"""Exchange of K and V on gloo: the rows a LongNet ladder needs against a dense ring of whole shards, in one run.

    python benchmarks/context_parallel.py --out benchmarks/results/context_parallel.jsonl

Every world size starts its own processes on this machine. Both exchanges move the same tensors, float32, 8 heads of 64,
16,384 tokens a rank, and are timed from the slowest rank. The ring passes whole shards of K and V to the next rank,
P - 1 times, packed before the clock starts; the sparse exchange is timed with the picking of its rows. What it brought
is checked against the rows themselves before anything is timed. A last line each plans, at 16,384 tokens a rank, what
one rank receives of a fixed ladder from 64K tokens to 4M.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dilated_attention_pytorch import Dilated
from dilated_attention_pytorch.distributed import SequenceLayout, dilated_request
from dilated_attention_pytorch.distributed.exchange import RowSource, fetch, plan_exchange
from dilated_attention_pytorch.distributed.transport import GroupTransport
from dilated_attention_pytorch.tools.bench.measure import facts
from dilated_attention_pytorch.tools.bench.results import append

HEADS, WIDTH, OWN = 8, 64, 16_384
BARS = {2: 5.0, 4: 8.0, 8: 10.0}


def ladder(n: int, first: int = 2048) -> Dilated:
    """Segments double from 2048 to the whole sequence, rates with them."""
    levels = (n // first).bit_length()
    return Dilated([first * 2**i for i in range(levels)], [2**i for i in range(levels)])


def numbers(tokens: torch.Tensor, shift: int) -> torch.Tensor:
    """K or V of some tokens, (1, heads, tokens, width): different for every token, head and tensor."""
    head = torch.arange(HEADS)[:, None, None]
    return ((tokens[None, :, None] * 64 + head * 8 + shift) % 65_521).expand(HEADS, -1, WIDTH)[None].float()


def member(rank: int, world: int, port: int, repeats: int, results: multiprocessing.SimpleQueue) -> None:
    """One rank: check, then time both exchanges."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    layout = SequenceLayout.contiguous(OWN * world, world)
    transport = GroupTransport(None, rank)
    pattern = ladder(layout.n)
    (plan,) = plan_exchange([dilated_request(pattern, layout, rank, HEADS)], layout, HEADS, transport)
    tokens = layout.positions(rank)
    key, value = (numbers(tokens, shift).contiguous() for shift in (0, 1))
    rows = fetch([RowSource(key, value)], [plan], transport).wait()[0]
    token, head = plan.request.codes % layout.n, plan.request.codes // layout.n
    wanted = torch.cat([numbers(token, shift)[0, head, torch.arange(len(token))] for shift in (0, 1)], 1)
    assert rows.equal(wanted), "the exchange must bring the rows asked for"

    def sparse() -> None:
        fetch([RowSource(key, value)], [plan], transport).wait()

    whole = torch.cat([key, value], -1).flatten(0, 2)
    following, before = (rank + 1) % world, (rank - 1) % world

    def ring() -> None:
        held = whole
        for _ in range(world - 1):
            held = transport.swap([{following: held}], [{before: len(held)}]).wait()[0][before]

    times = {"sparse": [], "ring": []}
    for _ in range(repeats):
        for name, move in (("sparse", sparse), ("ring", ring)):
            dist.barrier()
            began = time.perf_counter()
            move()
            slowest = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name].append(float(slowest))
    told = plan.report(key.element_size() * 2 * WIDTH)
    most = torch.tensor([told.bytes_received])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        results.put({"times": times, "bytes": int(most), "ring_bytes": told.ring_bytes})
    dist.destroy_process_group()


def measure(world: int, repeats: int) -> dict[str, object]:
    """One line of results."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(member, (world, port, repeats, results), nprocs=world)
    found = results.get()
    median = {name: statistics.median(taken) for name, taken in found["times"].items()}
    return {
        "suite": "context_parallel",
        "world": world,
        "tokens_a_rank": OWN,
        "heads": HEADS,
        "head_dim": WIDTH,
        "dtype": "float32",
        "pattern": ladder(OWN * world).describe(),
        "sparse_ms": round(median["sparse"] * 1e3, 3),
        "ring_ms": round(median["ring"] * 1e3, 3),
        "times_faster": round(median["ring"] / median["sparse"], 2),
        "bar": BARS.get(world),
        "sparse_bytes": found["bytes"],
        "ring_bytes": found["ring_bytes"],
        "repeats": repeats,
    }


def receive_lines() -> list[dict[str, object]]:
    """What a rank receives of one ladder, planned, while the sequence grows at a fixed number of tokens a rank."""
    pattern = Dilated([2048 * 2**i for i in range(6)], [2**i for i in range(6)])
    lines = []
    for n in (2**16, 2**18, 2**20, 2**22):
        layout = SequenceLayout.contiguous(n, n // OWN)
        rows = max(len(dilated_request(pattern, layout, rank, HEADS).codes) for rank in range(layout.world))
        lines.append(
            {
                "suite": "context_parallel_receive",
                "tokens": n,
                "world": layout.world,
                "tokens_a_rank": OWN,
                "pattern": pattern.describe(),
                "received_bytes": rows * 2 * WIDTH * 4,
            }
        )
    return lines


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    measured = (measure(world, options.repeats) for world in options.worlds)
    # Every rank runs on one thread.
    known = facts("cpu") | {"threads": 1}
    for line in chain(measured, receive_lines()):
        print(json.dumps(line | known), flush=True)
        if options.out is not None:
            append(options.out, line | known)


if __name__ == "__main__":
    main()

"""`dap simulate`: predicted traffic, memory and time of a sequence spread over many ranks.

Bytes, messages and memory are counted from plans, of every rank or of a sample. Times are a model: bytes over a
bandwidth, messages times a latency, operations over a speed, each an option.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..errors import must
from .console import (
    MOST_HEADS,
    Parser,
    dtype_name,
    leave,
    new_path,
    positive,
    print_json,
    print_table,
    print_title,
    tokens,
    whole,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ..distributed import Machine
    from ..patterns import Pattern

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
LADDER = "longnet"
"""A pattern by name: segments double from `--first` tokens to the whole sequence, rates with them."""


@dataclass(frozen=True, slots=True)
class World:
    """One number of ranks. Bytes, messages and memory of a forward pass of one layer; seconds are a model."""

    ranks: int
    tokens_a_rank: int
    looked_at: int
    """Ranks planned: all, or a sample."""
    bytes_received: int
    """Maximum over ranks."""
    bytes_received_mean: float
    messages: int
    """Maximum over ranks for a direct exchange."""
    butterfly_messages: int | None
    """Maximum over ranks for a butterfly, if the pattern has one."""
    memory_bytes: int
    """Own K and V, and the rows received."""
    balance: float
    """Work of the busiest rank over the mean."""
    ring_bytes: int
    all_gather_memory_bytes: int
    compute_seconds: float
    exchange_seconds: float
    ring_seconds: float
    note: str | None


def simulate(
    pattern: str,
    n: int,
    worlds: list[int],
    *,
    heads: int = 8,
    key_heads: int | None = None,
    head_dim: int = 128,
    dtype: str = "bfloat16",
    batch: int = 1,
    is_causal: bool = False,
    first: int = 2048,
    sample: int = 8,
    machine: Machine | None = None,
) -> list[World]:
    """Plan some or all ranks of each world.

    Args:
        pattern: text for `parse`, or "longnet".
        n: tokens in the sequence.
        worlds: numbers of ranks.
        heads: query heads.
        key_heads: key heads; as many as `heads` if None.
        head_dim: width of a query, key and value.
        dtype: of K and V.
        batch: sequences.
        is_causal: also require the key not to come after the query.
        first: shortest segment of "longnet".
        sample: ranks to plan in each world, spread evenly; 0 for all.
        machine: what the times assume.
    """
    from ..distributed import Machine, SequenceLayout, forecast_rank
    from ..distributed.butterfly import messages, why_no_butterfly
    from ..patterns import Causal

    dtype = dtype_name(dtype)
    if dtype not in DTYPES:
        raise must(f"dtype must be one of {', '.join(DTYPES)}", repr(dtype))
    whole = pattern_of(pattern, n, first)
    whole = (whole & Causal() if is_causal else whole).resolve(n, heads)
    row_bytes = 2 * batch * head_dim * DTYPES[dtype]
    key_heads, machine = key_heads or heads, machine or Machine()

    def planned(world: int) -> World:
        if world > n:
            raise must(f"there must be at most {n} ranks, one per token", world)
        layout = SequenceLayout.contiguous(n, world)
        step = max(1, (world - 1) // max(sample - 1, 1)) if sample else 1
        looked_at = range(0, world, step)[: sample or world]
        forecasts = [forecast_rank(whole, layout, rank, heads, key_heads) for rank in looked_at]
        received = [one.rows * row_bytes for one in forecasts]
        own = max(layout.lengths)
        local = own * key_heads * row_bytes
        ring = (n - min(layout.lengths)) * key_heads * row_bytes
        work = [one.flops for one in forecasts]
        rounds = messages(whole, layout) if why_no_butterfly(whole, layout) is None else None
        peers = max(one.peers for one in forecasts)
        is_past = max(received) > local
        return World(
            ranks=world,
            tokens_a_rank=own,
            looked_at=len(forecasts),
            bytes_received=max(received),
            bytes_received_mean=sum(received) / len(received),
            messages=peers,
            butterfly_messages=rounds,
            memory_bytes=local + max(received),
            balance=max(work) / (sum(work) / len(work)) if any(work) else 1.0,
            ring_bytes=ring,
            all_gather_memory_bytes=n * key_heads * row_bytes,
            compute_seconds=batch * max(work) * head_dim / machine.flops,
            exchange_seconds=machine.transfer(max(received), peers if rounds is None else min(peers, rounds)),
            ring_seconds=machine.transfer(ring, world - 1),
            note="a rank fetches more than it holds: past the useful limit, use fewer ranks" if is_past else None,
        )

    return [planned(world) for world in worlds]


def pattern_of(text: str, n: int, first: int) -> Pattern:
    """Pattern of a command line."""
    from ..patterns import Dilated, parse

    if text != LADDER:
        return parse(text)
    levels = max(1, (n // first).bit_length())
    return Dilated(tuple(first * 2**i for i in range(levels)), tuple(2**i for i in range(levels)))


def execute(pattern: Pattern, n: int, world: int, heads: int, head_dim: int, rows: int = 64) -> dict[str, Any]:
    """Run every rank in this process, one after another, in float32, and check rows against float64.

    `error` is the largest error over its rounding bound; at most 1 is right. A rank reads its shard and the rows of its
    exchange only.
    """
    import time

    import torch

    from ..distributed import SequenceLayout, virtual_attention
    from .bench.gate import Computed, error_ratio, sample

    if world > 256 or n > 2**22:
        raise must("execution must have at most 256 ranks and 4M tokens", f"{world} ranks and {n} tokens")
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, n, head_dim, generator=generator) for _ in range(3))
    began = time.perf_counter()
    with torch.no_grad():
        output, lse = virtual_attention(query, key, value, pattern, SequenceLayout.contiguous(n, world))
    seconds = time.perf_counter() - began
    checked = sample(n, rows)
    error = error_ratio(Computed(query, key, value, output, lse), pattern, checked, [0, heads - 1])
    return {"ranks": world, "tokens": n, "rows": len(checked), "error": error, "seconds": seconds}


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when a computed row is wrong."""
    about = "Bytes, messages, memory and balance of a sequence sharded over ranks; times come from a model."
    parser = Parser("dap simulate", about, "[PATTERN]")
    parser.pattern(LADDER, f', or "{LADDER}"')
    parser.tokens(default=2**30)
    parser.option("--ranks", default="64,1024,16384,262144", help="numbers of ranks")
    parser.heads()
    parser.option("--key-heads", read=whole(0, MOST_HEADS), default=0, help="key heads; 0: as many as query heads")
    parser.option("--head-dim", read=whole(1), default=128, help="width of a head")
    parser.dtype(*DTYPES, default="bfloat16")
    parser.option("--batch", read=whole(1), default=1, help="sequences")
    parser.option("--causal", action="store_true", help="also require the key not to come after the query")
    parser.option("--first", read=tokens, default=2048, metavar="COUNT", help=f"shortest segment of {LADDER}")
    parser.option("--sample", read=whole(0), default=8, help="ranks to plan for each number; 0 for all")
    parser.option("--bandwidth", read=positive, default=25.0, help="assumed GB per second into a rank")
    parser.option("--latency", read=positive, default=20.0, help="assumed microseconds per message")
    parser.option("--tflops", read=positive, default=200.0, help="assumed TFLOP/s of a rank in attention")
    parser.option("--run", read=tokens, metavar="COUNT", help="also compute this many tokens and check rows")
    parser.option("--plot", read=new_path, metavar="PATH", help="draw bytes over ranks into this file (matplotlib)")
    parser.json()
    options = parser.read(arguments)
    try:
        worlds = [tokens(word) for word in options.ranks.split(",")]
    except ValueError:
        raise must("ranks must be whole numbers like 8,64,1024", repr(options.ranks)) from None
    from ..distributed import Machine

    machine = Machine(options.latency * 1e-6, options.bandwidth * 1e9, options.tflops * 1e12)
    results = simulate(
        options.pattern,
        options.tokens,
        worlds,
        heads=options.heads,
        key_heads=options.key_heads or None,
        head_dim=options.head_dim,
        dtype=options.dtype,
        batch=options.batch,
        is_causal=options.causal,
        first=options.first,
        sample=options.sample,
        machine=machine,
    )
    executed = None
    if options.run:
        from ..patterns import Causal

        run = options.run
        pattern = pattern_of(options.pattern, run, min(options.first, max(16, run // 8)))
        pattern = pattern & Causal() if options.causal else pattern
        executed = execute(pattern, run, min(256, max(worlds), run), options.heads, min(options.head_dim, 64))
    if options.plot:
        _plot(results, options.plot)
    if options.json:
        report = {"tokens": options.tokens, "pattern": options.pattern, "worlds": [asdict(w) for w in results]}
        print_json({**report, "executed": executed, "seconds_are_a_model": str(machine)})
    else:
        _show(results, options.tokens, options.pattern, machine, executed)
    return int(executed is not None and executed["error"] > 1.0)


def _show(worlds: list[World], n: int, pattern: str, machine: Machine, executed: dict[str, Any] | None) -> None:
    from .html_page import readable_bytes, seconds_text

    print_title(f"{n:,} tokens, {pattern}: one layer, forward, the rank with most")
    header = (
        "ranks",
        "tokens per rank",
        "receives",
        "messages",
        "K/V memory",
        "balance",
        "ring receives",
        "all-gather holds",
    )
    print_table(
        header,
        [
            (
                f"{w.ranks:,}",
                f"{w.tokens_a_rank:,}",
                readable_bytes(w.bytes_received),
                str(w.messages) if w.butterfly_messages is None else f"{w.messages} or {w.butterfly_messages}",
                readable_bytes(w.memory_bytes),
                f"{w.balance:.2f}",
                readable_bytes(w.ring_bytes),
                readable_bytes(w.all_gather_memory_bytes),
            )
            for w in worlds
        ],
        right=range(8),
    )
    print_title(f"A model, not a measurement: {machine}")
    print_table(
        ("ranks", "compute", "exchange", "ring exchange"),
        [(f"{w.ranks:,}", *map(seconds_text, (w.compute_seconds, w.exchange_seconds, w.ring_seconds))) for w in worlds],
        right=range(4),
    )
    for w in worlds:
        if w.looked_at < w.ranks:
            print(f"{w.ranks:,} ranks: a sample of {w.looked_at} was planned.")
        if w.note:
            print(f"{w.ranks:,} ranks: {w.note}.")
    if executed is not None:
        print(
            f"Computed on this CPU: {executed['tokens']:,} tokens on {executed['ranks']} ranks in "
            f"{executed['seconds']:.1f} s; {executed['rows']} rows checked, "
            f"largest error {executed['error']:.2f} of its rounding bound."
        )


def _plot(worlds: list[World], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ranks = [w.ranks for w in worlds]
    for label, values in (
        ("this library", [w.bytes_received for w in worlds]),
        ("ring or all-gather", [w.ring_bytes for w in worlds]),
        ("held already", [w.memory_bytes - w.bytes_received for w in worlds]),
    ):
        axes.loglog(ranks, [max(value, 1) for value in values], marker="o", label=label)
    axes.set_xlabel("ranks")
    axes.set_ylabel("bytes of K and V a rank, one layer")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    leave(main)

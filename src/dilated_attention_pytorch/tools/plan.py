"""`dap plan`: cost of a pattern before it runs, and the longest sequence that fits."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..errors import must
from .console import (
    MOST_HEADS,
    Parser,
    device_of,
    dtype_name,
    leave,
    positive,
    print_json,
    print_pairs,
    print_table,
    print_title,
    usual_dtype,
    whole,
)

if TYPE_CHECKING:
    import torch

    from ..patterns import Pattern
    from .peak_memory import Shape

COUNTED_TOKENS = 2**18
"""Up to this length the rows that every rank receives are counted."""
SAMPLED_TILES = 2**20
"""Up to this many tiles per rank, three ranks are counted; beyond, a bound is used."""
PROBE_ELEMENTS, PROBE_TOKENS = 2**27, 2**14
"""Elements and tokens of the call at which a backend is chosen; more tokens than the reference backend runs."""
MOST_WIDTH = 65_536
FIRST_PROBE, PROBE_STEP = 4096, 8
"""Length of the first plan that a size is estimated from, and the factor from one to the next."""
PROBE_BYTES = 2**22
BUILDING = 64
"""Memory of building a plan over the bytes of the plan, at most."""
MOST_PLAN_BYTES = 2**29


def forecast(
    text: str, n: int, heads: int, key_heads: int, d: int, dtype: str, batch: int, ranks: int, device: str, free: int
) -> dict[str, Any]:
    """The forecast, as plain data."""
    import torch

    from .. import make_plan, parse
    from ..nn.calibration import stored_model
    from .peak_memory import Shape, is_joined, longest_that_fits, peaks, plan_growth

    dtype = dtype_name(dtype)
    if heads % key_heads:
        raise must("heads must be a multiple of key heads", f"{heads} and {key_heads}")
    pattern = parse(text)
    check_size(pattern, n, heads)
    plan = make_plan(pattern, n, heads)
    kind = getattr(torch, dtype)
    shape = Shape(
        n=n,
        heads=heads,
        key_heads=key_heads,
        d=d,
        dtype=kind,
        batch=batch,
        backend=backend_for(text, n, heads, key_heads, d, kind, device),
        joined=is_joined(plan),
    )
    forward, training = peaks(shape, plan.nbytes)
    rank = None if ranks == 1 else rank_share(text, shape, ranks, plan.nbytes, plan.blocks)
    needed = {"forward": forward, "training": training} if rank is None else rank["peak_bytes"]
    growth = plan_growth(pattern, plan)
    most = (None, None) if growth is None else longest_that_fits(shape, growth, free)
    cost = plan.cost(d, key_heads=key_heads, dtype=kind, batch=batch)
    model = stored_model(device)
    width = batch * d / 64
    return {
        "pattern": pattern.describe(),
        "shape": {**_plain(shape), "dtype": dtype, "device": device, "ranks": ranks},
        "tiles": plan.blocks,
        "block_size": plan.block_size,
        "density": plan.density,
        "flops": {"forward": cost.flops_forward, "training": cost.flops_forward + cost.flops_backward},
        "plan_bytes": plan.nbytes,
        "peak_bytes": {"forward": forward, "training": training},
        "free_bytes": free,
        "fits": {way: peak <= free for way, peak in needed.items()},
        "longest": {"forward": most[0], "training": most[1]},
        "seconds": None
        if model is None
        else {"forward": model.sparse(plan) * width, "training": 3.5 * model.sparse(plan) * width},
        "dense": {
            "flops_forward": 4 * batch * heads * n**2 * d,
            "scores_bytes": batch * heads * n**2 * kind.itemsize,
            "seconds_forward": None if model is None else model.dense(plan) * width,
        },
        "rank": rank,
    }


def check_size(pattern: Pattern, n: int, heads: int) -> None:
    """Refuse a length whose plan would not fit, by the growth of plans of shorter sequences."""
    from .. import make_plan
    from .bench.measure import memory_of
    from .html_page import readable_bytes

    limit = min(memory_of("cpu")[0] // BUILDING, MOST_PLAN_BYTES)
    length, before = FIRST_PROBE, None
    while length < n:
        try:
            size = make_plan(pattern, length, heads).nbytes
        except ValueError:
            # A pattern that exists at one length only, like a list of documents: its text bounds its plan.
            return
        # Every row has an entry, so that a plan grows with the length at least.
        power = 2.0 if before is None else min(max(math.log(size / before, PROBE_STEP), 1.0), 2.0)
        expected, following = (size * (end / length) ** power for end in (n, min(n, PROBE_STEP * length)))
        if expected <= limit:
            return
        if before is not None and following > PROBE_BYTES:
            what = f"a plan must take at most {readable_bytes(limit)}"
            estimate = f"about {readable_bytes(expected)} for {n:,} tokens (by the growth up to {length:,})"
            raise must(what, estimate, "Plan a shorter sequence, or `dap simulate` one that is spread over ranks.")
        length, before = PROBE_STEP * length, size


def backend_for(text: str, n: int, heads: int, key_heads: int, d: int, kind: torch.dtype, device: str) -> str:
    """Backend of a pattern, chosen at a short length that takes little memory."""
    import torch

    from ..kernels.registry import choose
    from ..ops.attention import CallSettings, call_of

    def probe(length: int) -> str:
        query = torch.empty(1, heads, length, d, device=device, dtype=kind)
        key = query[:, :key_heads]
        return choose(call_of(query, key, key, CallSettings(pattern=text, scale=1.0)))[0]

    try:
        return probe(min(n, PROBE_TOKENS, max(1, PROBE_ELEMENTS // (heads * d))))
    except ValueError:
        # A pattern that exists at one length only, like a list of documents.
        return probe(n)


def rank_share(text: str, shape: Shape, ranks: int, plan_bytes: int, tiles: int) -> dict[str, Any]:
    """Tokens, received rows and memory of the rank that receives most, in contiguous shards."""
    from .. import parse
    from ..distributed import SequenceLayout, forecast_rank, traffic
    from .peak_memory import peaks

    own = -(-shape.n // ranks)
    row_bytes = 2 * shape.d * shape.dtype.itemsize
    layout = SequenceLayout.contiguous(shape.n, ranks)
    if shape.n <= COUNTED_TOKENS:
        traffic_by_rank = traffic(text, layout, shape.heads, shape.key_heads, row_bytes=row_bytes)
        most, how = max(rank.bytes_received for rank in traffic_by_rank), "counted"
    elif tiles <= ranks * SAMPLED_TILES:
        pattern = parse(text).resolve(shape.n, shape.heads)
        sampled = (
            forecast_rank(pattern, layout, rank, shape.heads, shape.key_heads) for rank in {0, ranks // 2, ranks - 1}
        )
        most, how = max(rank.rows for rank in sampled) * row_bytes, "the most of three ranks"
    else:
        most, how = shape.key_heads * (shape.n - own) * row_bytes, "at most"
    received = shape.batch * most
    forward, training = peaks(replace(shape, n=own), plan_bytes // ranks)
    return {
        "tokens": own,
        "received_bytes": received,
        "received_is": how,
        "peak_bytes": {"forward": forward + received, "training": training + 2 * received},
    }


def suggestions(report: dict[str, Any]) -> list[str]:
    """Advice for a forecast that does not fit."""
    advice = []
    free, shape = report["free_bytes"], report["shape"]
    if not report["fits"]["training"]:
        if report["fits"]["forward"]:
            advice.append("A forward under torch.no_grad() fits; training does not.")
        most = report["longest"]["training"]
        if most:
            advice.append(f"Training fits up to about {most:,} tokens{' on one device' * (shape['ranks'] > 1)}.")
        if shape["dtype"] in ("float32", "float64") and shape["device"] == "cuda":
            advice.append("--dtype bf16 halves q, k, v, the output and their gradients.")
        if shape["key_heads"] == shape["heads"] > 1:
            advice.append("Fewer key heads (--key-heads) shrink k, v and their gradients.")
        ranks = max(-(-report["peak_bytes"]["training"] // max(free, 1)), shape["ranks"] + 1)
        advice.append(f"From {ranks} devices like this one on, each rank's own share fits (--ranks {ranks}).")
    if report["density"] > 0.5:
        advice.append(f"Density {report['density']:.0%}: dense attention costs about the same; see `dap tune`.")
    if report["seconds"] is None:
        advice.append("No time is predicted before `dap tune` has measured this machine.")
    return advice


def show(report: dict[str, Any]) -> None:
    """Print a forecast."""
    from .html_page import readable_bytes, seconds_text, tokens_text

    shape, dense = report["shape"], report["dense"]
    heads = shape["heads"] if shape["heads"] == shape["key_heads"] else f"{shape['heads']}:{shape['key_heads']}"
    print_title(report["pattern"])
    print(
        f"{shape['n']:,} tokens, {heads} heads of {shape['d']}, {shape['dtype']}, batch {shape['batch']}, "
        f"{shape['device']} ({shape['backend']})"
    )
    peak, seconds = report["peak_bytes"], report["seconds"]
    measured = usual_dtype(shape["device"])
    predicted = "predicted time" if shape["dtype"] == measured else f"predicted time, as if {measured}"
    whose = "" if report["rank"] is None else "each rank "
    rows = [
        ("floating-point operations", *(f"{report['flops'][way]:.3g}" for way in ("forward", "training"))),
        ("peak memory", *(readable_bytes(peak[way]) for way in ("forward", "training"))),
        (f"{whose}fits into {readable_bytes(report['free_bytes'])}", *(_yes(fits) for fits in report["fits"].values())),
        (
            f"longest sequence that fits{' one device' * bool(whose)}",
            *("-" if most is None else f"{most:,}" for most in report["longest"].values()),
        ),
        (predicted, *("-" if seconds is None else seconds_text(seconds[w]) for w in ("forward", "training"))),
    ]
    print_table(("", "forward", "forward + backward"), rows, right=(1, 2))
    took = "" if dense["seconds_forward"] is None else f", {seconds_text(dense['seconds_forward'])}"
    facts = [
        ("density", f"{report['density']:.4%} of the tiles: {report['tiles']:,} of size {report['block_size']}"),
        ("plan", readable_bytes(report["plan_bytes"])),
        (
            "dense would need",
            f"{dense['flops_forward']:.3g} operations forward{took}; its scores written out take "
            f"{readable_bytes(dense['scores_bytes'])}",
        ),
    ]
    if report["rank"] is not None:
        rank = report["rank"]
        facts.append(
            (
                f"each of {shape['ranks']} ranks",
                f"{tokens_text(rank['tokens'])} tokens, receives {readable_bytes(rank['received_bytes'])} "
                f"({rank['received_is']}), peak {readable_bytes(rank['peak_bytes']['forward'])} "
                f"forward, {readable_bytes(rank['peak_bytes']['training'])} in training",
            )
        )
    print_pairs(facts)
    for line in suggestions(report):
        print(f"> {line}")


def _plain(shape: Shape) -> dict[str, Any]:
    return {name: value for name, value in asdict(shape).items() if name not in ("dtype", "joined")}


def _yes(fits: bool) -> str:
    return "yes" if fits else "no"


def main(arguments: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when a forward does not fit."""
    parser = Parser("dap plan", "Cost of a pattern: tiles, memory, time, the longest sequence that fits.", "PATTERN")
    parser.pattern()
    parser.tokens()
    parser.heads()
    parser.option("--key-heads", read=whole(0, MOST_HEADS), default=0, help="key heads; 0: as many as query heads")
    parser.option("--head-dim", read=whole(1, MOST_WIDTH), default=64, help="width of a head")
    parser.dtype()
    parser.option("--batch", read=whole(1, 2**31), default=1, help="sequences")
    parser.option("--ranks", read=whole(1, 2**20), default=1, help="devices that share the sequence")
    parser.option("--memory", read=positive, metavar="GIB", help="available memory; free memory by default")
    parser.device()
    parser.json()
    options = parser.read(arguments)
    for name, value in (("a pattern", options.pattern), ("--tokens", options.tokens)):
        if value is None:
            parser.error(f'{name} must be given, as in: dap plan "window:256 & causal" -n 64K')
    from .bench.measure import memory_of

    where = device_of(options.device)
    free = int((options.memory or 0) * 2**30) or memory_of(where)[0]
    report = forecast(
        options.pattern,
        options.tokens,
        options.heads,
        options.key_heads or options.heads,
        options.head_dim,
        options.dtype or usual_dtype(where),
        options.batch,
        options.ranks,
        where,
        free,
    )
    print_json({**report, "suggestions": suggestions(report)}) if options.json else show(report)
    return 0 if report["fits"]["forward"] else 1


if __name__ == "__main__":
    leave(main)

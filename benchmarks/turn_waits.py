"""Model of the waiting of the Hopper backward if additions to dQ have a fixed order. Needs no GPU.

    PYTHONPATH=src python benchmarks/turn_waits.py --heads 8 --hop 0.6

Programs claim items when they have none; a step takes 1 +- 10 %, starting and ending an item together 1.5 steps. An
addition is visible to the next item `--hop` steps later. Printed per part: steps of an even share, time of sums in any
order, and the times of other orders divided by that: `turns.in_turns`; its items with entries in the order of the walk;
the items of sums in any order. A row-wise dQ takes about 7 / 5 = 1.4, the ratio of the products.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections.abc import Iterable

from dilated_attention_pytorch.kernels.hopper.lowering import LoweredPart, lower
from dilated_attention_pytorch.kernels.hopper.turns import in_turns
from dilated_attention_pytorch.patterns import parse
from dilated_attention_pytorch.plan import make_plan

N = 65536
CASES = {
    "local 10 %": "window:3276",
    "random 10 %": "random:0.1;block=128;seed=0",
    "random 1 %": "random:0.01;block=128;seed=0",
    "causal window": "window:6553 & causal",
    "ladder": "dilated:2048x1,4096x2,8192x4,16384x8,32768x16",
}
SUB_TILES = 2
"""Steps of a tile of 128 queries at width 128."""
ITEM_STEPS = 1.5
JITTER = 0.1
AHEAD = 2
"""Steps by which an item is claimed before the last one of its program ends."""
Item = tuple[int, list[int]]
"""Head, and the query tiles in the order in which they are met."""


def lists_of(lowered: LoweredPart) -> tuple[list[Item], list[Item]]:
    """Items in turns, and in the order of sums in any order."""
    work, tiles = lowered.backward_items(1, by_key=True), lowered.part.keys.tiles
    (ordered,) = in_turns((work,), (tiles,), lowered.part.queries.tiles, lowered.block_size, 1)
    entries = ordered.partial[:, 0].tolist()
    turned = [(record[0], entries[record[-1] : record[-1] + record[2]]) for record in ordered.items.tolist()]
    rows, tile, _ = lowered.part.by_key.entries()
    walk: dict[int, list[int]] = {}
    for row, met in zip(rows.tolist(), tile.tolist(), strict=True):
        walk.setdefault(row, []).append(met)
    own = lowered.part.head_class.tolist()
    column = 4 if lowered.strided else 1
    return turned, [(r[0], walk.get(own[r[0]] * tiles + r[column], [])) for r in work.items.tolist()]


def duration(items: Iterable[Item], programs: int, hop: float | None) -> float:
    """Time of all items; each adds to a tile after all earlier ones, `hop` steps later, or at once if that is None."""
    jitter = random.Random(0)
    free = [(0.0, 0.0) for _ in range(programs)]
    visible: dict[tuple[int, int, int], float] = {}
    end = 0.0
    for head, tiles in items:
        _, now = heapq.heappop(free)
        now += ITEM_STEPS / 2
        for tile in tiles:
            for sub_tile in range(SUB_TILES):
                now += 1.0 + JITTER * (2 * jitter.random() - 1)
                if hop is not None:
                    now = max(now, visible.get((head, tile, sub_tile), 0.0))
                    visible[head, tile, sub_tile] = now + hop
        now += ITEM_STEPS / 2
        heapq.heappush(free, (now - AHEAD, now))
        end = max(end, now)
    return end


def main() -> None:
    """Print a line per part of every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--hop", type=float, default=0.6, help="steps until an addition is visible to the next item")
    parser.add_argument("--programs", type=int, default=132)
    given = parser.parse_args()
    for name, text in CASES.items():
        for number, lowered in enumerate(lower(make_plan(parse(text), N, given.heads))):
            turned, launched = lists_of(lowered)
            walked = [(head, sorted(tiles)) for head, tiles in turned]
            ideal = SUB_TILES * sum(len(tiles) for _, tiles in launched) / given.programs
            free = duration(launched, given.programs, None)
            orders = [duration(items, given.programs, given.hop) / free for items in (turned, walked, launched)]
            print(f"{name}, part {number}: share {ideal:.0f}, any order {free:.0f}; in turns {orders[0]:.2f}, "
                  f"ascending entries {orders[1]:.2f}, items as launched {orders[2]:.2f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()

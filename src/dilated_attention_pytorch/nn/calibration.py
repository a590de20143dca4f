"""Cost model of dense and sparse attention on this machine, measured once and cached on disk."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..atomic_write import cache_folder, write_whole
from ..ops import attention, plan_cache
from ..patterns import BlockDilated, Full, Pattern
from ..plan import Plan

TILE = 128
HEADS = 4
WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds for a forward pass at head width 64: so much a call, and so much a tile of 128 x 128."""

    dense_call: float
    dense_tile: float
    sparse_call: float
    sparse_tile: float
    measured: bool = True
    """False for the default figures used if measuring is disabled."""

    def dense(self, plan: Plan) -> float:
        """Estimate for dense attention at the length and heads of a plan."""
        return self.dense_call + self.dense_tile * plan.heads * (plan.n / TILE) ** 2

    def sparse(self, plan: Plan) -> float:
        """Estimate for a plan."""
        return self.sparse_call + self.sparse_tile * plan.blocks * (plan.block_size / TILE) ** 2


# One core of a current server runs a 128 x 128 x 64 tile in about 0.1 ms, and a call has a few hundred tiles' worth of
# bookkeeping on a GPU; only the ratios decide, and they put the crossover near half of the blocks.
UNMEASURED = CostModel(dense_call=1e-4, dense_tile=1e-4, sparse_call=3e-4, sparse_tile=1.5e-4, measured=False)


def cost_model(device: torch.device | str = "cpu") -> CostModel:
    """The figures of this machine: read from the cache, else measured (seconds) and written there.

    `DAP_CALIBRATE=0` switches measuring off; `XDG_CACHE_HOME` moves the cache.
    """
    device = torch.device(device)
    stored = stored_models()
    if _key(device) in stored:
        return stored[_key(device)]
    if os.environ.get("DAP_CALIBRATE", "1") == "0" or device.type == "meta":
        return UNMEASURED
    return calibrate(device)


def calibrate(device: torch.device | str = "cpu") -> CostModel:
    """Measure this machine, whatever is in the cache, and write it there."""
    device = torch.device(device)
    model = measure(device)
    _write({**stored_models(), _key(device): model})
    return model


def stored_model(device: torch.device | str = "cpu") -> CostModel | None:
    """The figures of this machine if they are in the cache; nothing is measured."""
    return stored_models().get(_key(torch.device(device)))


def _key(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} x {torch.get_num_threads()}"
    return f"{name}, torch {torch.__version__}"


def cache_path() -> Path:
    """Path of the cache file."""
    return cache_folder() / "costs.json"


def measure(device: torch.device) -> CostModel:
    """Two lengths of dense and two densities of sparse attention; a line through each pair."""
    n = 8192 if device.type == "cuda" else 1024
    ladder = BlockDilated((n,), (1,), 0.25, block=TILE), BlockDilated((n,), (1,), 0.75, block=TILE)
    with torch.no_grad():
        dense = [_point(Full(), length, device) for length in (n // 2, n)]
        sparse = [_point(pattern, n, device) for pattern in ladder]
    dense_call, dense_tile = _line(*dense)
    sparse_call, sparse_tile = _line(*sparse)
    return CostModel(dense_call=dense_call, dense_tile=dense_tile, sparse_call=sparse_call, sparse_tile=sparse_tile)


def _point(pattern: Pattern, n: int, device: torch.device) -> tuple[float, float]:
    """Tiles and seconds."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # A generator of its own: the numbers a program draws do not depend on whether costs were cached.
    generator = torch.Generator(device).manual_seed(0)
    shape = (3, 1, HEADS, n, WIDTH)
    query, key, value = torch.randn(shape, device=device, dtype=dtype, generator=generator).unbind()
    plan = plan_cache.get(pattern.resolve(n, HEADS), n, HEADS, TILE)
    return float(plan.blocks), _best(lambda: attention(query, key, value, pattern), device)


def _line(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    """Seconds a call and seconds a tile of the line through two points, neither below nothing."""
    slope = max((second[1] - first[1]) / (second[0] - first[0]), second[1] / second[0] / 10)
    return max(first[1] - slope * first[0], 0.0), slope


def _best(call: Callable[[], object], device: torch.device) -> float:
    """Shortest of at least three runs after a first, in half a second at most."""
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 0.5 and len(times) < 20):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def stored_models() -> dict[str, CostModel]:
    """Cost models in the cache file, by machine and torch release."""
    try:
        entries = json.loads(cache_path().read_text(encoding="utf-8"))
        models = {key: CostModel(**figures) for key, figures in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, RuntimeError):
        # Missing, damaged, or no home to look in: measured anew, and written over.
        return {}
    return {key: model for key, model in models.items() if _is_sane(model)}


def _is_sane(model: CostModel) -> bool:
    figures = model.dense_call, model.dense_tile, model.sparse_call, model.sparse_tile
    return all(isinstance(figure, int | float) and 0 <= figure < math.inf for figure in figures)


def _write(models: dict[str, CostModel]) -> None:
    figures = json.dumps({key: asdict(model) for key, model in models.items()}, indent=1)
    try:
        write_whole(cache_path(), lambda temporary: Path(temporary).write_text(figures, encoding="utf-8"))
    except (OSError, RuntimeError):
        # A read-only home, or none, costs the measurement each time, not the answer.
        return

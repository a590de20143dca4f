"""Bounds of a predicate over rectangles of positions, by interval arithmetic on the predicate itself.

`trace` calls the predicate once with tensors that carry the lowest and highest value over each rectangle instead of
values. Integer arithmetic, comparisons, logic, `where` and lookups in captured tables yield bounds again; any other
operation yields a value without bounds. A predicate that reads a value, its shape or its truth has no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

EXACT = 2.0**53
"""Integers below are exact in float64, the dtype of bounds. A value that may be larger has infinite bounds."""
INF = float("inf")
MOST_ENTRIES = 2**26
"""Most entries of a captured table that is summarized; `Summary` takes up to four times its memory."""
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
IN_PLACE = {"__setitem__", "__ilshift__", "__irshift__"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "div", "floordiv", "truediv", "mod", "pow", "and", "or", "xor")
}


class Bounds(NamedTuple):
    """Lowest and highest value in each rectangle, float64 [T] or [1]; both infinite where a value may wrap around."""

    low: Tensor
    high: Tensor
    drift: int | None = None
    """Change of the value when query and key move on by one token together; None where that is not constant."""


class Traced(NamedTuple):
    """Bounds of a predicate over each rectangle, float64 [T]."""

    low: Tensor
    high: Tensor
    is_shift_invariant: bool
    """Whether all pairs of the rectangles at one distance have one value."""


def interval(like: Tensor, bounds: Bounds) -> Tensor:
    """Bounds in the place of a tensor, which has a dtype and a device but no elements that code could read.

    A plain tensor: a predicate that tests `type(q) is torch.Tensor` must take the branch that it takes for values.
    """
    value = like.detach()
    setattr(value, _BOUNDS, bounds)
    return value


def is_interval(value: object) -> bool:
    """Whether a value stands for bounds."""
    return isinstance(value, Tensor) and hasattr(value, _BOUNDS)


_BOUNDS = "_interval_bounds"


def trace(
    predicate: Callable[..., Any], tiles: tuple[Tensor, Tensor, Tensor, Tensor], head: int | None
) -> Traced | None:
    """Bounds of `predicate(q, k, head)` over rectangles; None where it has no trace.

    Args:
        predicate: function of two int64 tensors and a head, as it is evaluated on pairs.
        tiles: first and last query, first and last key of each rectangle, int64 [T].
        head: the head, or None for any head: a predicate that uses the head then has no trace.
    """
    device = tiles[0].device
    like = torch.empty(0, 1, 1, dtype=torch.int64, device=device)
    q, k = (interval(like, Bounds(low.double(), high.double(), 1)) for low, high in (tiles[:2], tiles[2:]))
    mode, any_head = _Tracer(device), torch.empty((), dtype=torch.int64, device="meta")
    try:
        with mode:
            value = predicate(q, k, any_head if head is None else head)
    except Exception:
        # Pairs are then evaluated one by one, which raises where the predicate is at fault.
        return None
    if mode.has_refused or not isinstance(value, Tensor) or value.is_meta:
        return None
    bounds = mode.bounds(value)
    low, high = (bound.expand(tiles[0].shape) for bound in bounds[:2])
    return Traced(low, high, bounds.drift == 0)


class _Tracer(TorchFunctionMode):
    """Bounds from each torch function that has an interval among its arguments."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.summaries: dict[object, tuple[Tensor, Summary]] = {}
        self.unknown = Bounds(self._one(-INF), self._one(INF))
        self.has_refused = False
        """Whether a function raised, which a predicate may have caught: it may not catch it where values exist."""

    def _one(self, value: float) -> Tensor:
        return torch.full((1,), value, dtype=torch.float64, device=self.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._call(func, args, kwargs or {})
        except Exception:
            self.has_refused = True
            raise

    def _call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")) or kwargs.get("out") is not None:
            raise NotImplementedError(name)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(tensor.is_meta for tensor in tensors):
            raise NotImplementedError("a function of the head")
        # A tensor without elements came from an interval by a way around this mode.
        if not any(is_interval(tensor) or not tensor.numel() for tensor in tensors):
            return func(*args, **kwargs)
        if name in ("zeros_like", "ones_like", "full_like"):
            one = torch.empty((1,) * args[0].ndim, dtype=args[0].dtype, device=self.device)
            return func(one, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if isinstance(result, torch.dtype | torch.device) or name.startswith("new_"):
            return result
        if not isinstance(result, Tensor) or isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            raise NotImplementedError(name)
        # The method `where` has another order of arguments, and a function outside torch may have any meaning.
        is_known = func in (getattr(torch, name, None), None if name == "where" else getattr(Tensor, name, None))
        bounds = self._result(name, result.dtype, args, kwargs) if is_known else None
        return interval(result, self._fitted(bounds or self.unknown, result.dtype))

    def _result(self, name: str, kind: torch.dtype, args: Any, kwargs: dict[str, Any]) -> Bounds | None:
        """Bounds of a result; None for a function without a rule."""
        if name in CASTS:
            return self.bounds(args[0], kind)
        if name == "__getitem__":
            return self._lookup(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        if name == "where" and len(args) == 3:
            return _where(self.bounds(args[0], torch.bool), *self._pair(*args[1:]))
        if name in ("clamp", "clamp_min", "clamp_max"):
            edges = dict(zip(("max",) if name == "clamp_max" else ("min", "max"), args[1:], strict=False)) | kwargs
            value = self.bounds(args[0])
            for edge, of in (("min", _maximum), ("max", _minimum)):
                if edges.get(edge) is not None:
                    value = of(value, self._pair(args[0], edges[edge])[1])
            return value
        if name == "div" and kwargs.get("rounding_mode") == "floor":
            name, kwargs = "floor_divide", {}
        if kwargs:
            return None
        if name in SWAPPED:
            name, args = SWAPPED[name], args[::-1]
        if name == "pow" and isinstance(args[1], int) and args[1] == 2:
            name, args = "square", args[:1]
        name = name.strip("_")
        if name in UNARY and len(args) == 1:
            return UNARY[name](self.bounds(args[0]))
        if name in BINARY and len(args) == 2:
            return BINARY[name](*self._pair(*args))
        logic = name.removeprefix("logical_").removeprefix("bitwise_")
        if logic in LOGIC and (name.startswith("logical_") or kind == torch.bool):
            return LOGIC[logic](*(self.bounds(x, torch.bool) for x in args))
        return None

    def bounds(self, value: Any, kind: torch.dtype | None = None) -> Bounds:
        """Bounds of an operand, converted to the dtype in which a function computes."""
        if is_interval(value):
            found = getattr(value, _BOUNDS)
        elif isinstance(value, int) or (isinstance(value, Tensor) and value.numel() == 1):
            number = value.item() if isinstance(value, Tensor) else value
            if not isinstance(number, int):
                return self.unknown
            one = self._one(float(max(-(2**60), min(2**60, number))))
            found = Bounds(one, one, 0)
        else:
            # A larger tensor combines with positions by their places in a batch, which bounds do not have.
            return self.unknown
        kind = kind or (value.dtype if isinstance(value, Tensor) else torch.int64)
        return _truth(found) if kind == torch.bool else self._fitted(found, kind)

    def _pair(self, a: Any, b: Any) -> tuple[Bounds, Bounds]:
        """Bounds of two operands in their common dtype."""
        kind = torch.result_type(a, b)
        return self.bounds(a, kind), self.bounds(b, kind)

    def _fitted(self, bounds: Bounds, kind: torch.dtype) -> Bounds:
        """Bounds of a result, infinite where it may wrap around; a sum of bools saturates."""
        low, high, drift = bounds
        if kind == torch.bool:
            return Bounds(low.clamp(0, 1), high.clamp(0, 1), drift)
        if kind not in INTEGERS:
            return self.unknown
        info = torch.iinfo(kind)
        fits = (low >= info.min) & (high <= info.max) & (low > -EXACT) & (high < EXACT)
        if drift and not bool(fits.all()):
            drift = None
        return Bounds(torch.where(fits, low, -INF), torch.where(fits, high, INF), drift)

    def _lookup(self, table: Tensor, places: tuple[Any, ...]) -> Bounds | None:
        """Bounds of entries of a captured tensor."""
        if is_interval(table) or len(places) != table.ndim or not 0 < table.numel() <= MOST_ENTRIES:
            return None
        if table.dtype not in INTEGERS | {torch.bool}:
            return None
        ranges, chosen, key = [], table, [id(table)]
        for dim, place in reversed(list(enumerate(places))):
            if isinstance(place, Tensor) and place.dtype not in INTEGERS:
                return None
            if is_interval(place):
                ranges.insert(0, (getattr(place, _BOUNDS), table.shape[dim]))
            elif isinstance(place, int | Tensor) and not isinstance(place, bool):
                key += [dim, int(place)]
                chosen = chosen.select(dim, int(place))
            else:
                return None
        # Negative places count from the end. The table is stored beside its identity, which stays its own.
        edges = torch.broadcast_tensors(*(edge for place, _ in ranges for edge in place[:2]))
        inside = torch.stack([(edge >= 0) & (edge < ranges[i // 2][1]) for i, edge in enumerate(edges)]).all(0)
        if tuple(key) not in self.summaries:
            self.summaries[tuple(key)] = table, Summary(chosen.to(self.device))
        ends = [torch.where(inside, edge, 0.0).long() for edge in edges]
        low, high = self.summaries[tuple(key)][1].over(ends[::2], ends[1::2])
        drift = 0 if all(place.drift == 0 for place, _ in ranges) else None
        return Bounds(torch.where(inside, low, -INF), torch.where(inside, high, INF), drift)


class Summary:
    """Minima and maxima of a table over blocks of 1, 2, 4, ... entries a side."""

    def __init__(self, table: Tensor) -> None:
        low = high = table.to(torch.int8) if table.dtype == torch.bool else table
        levels = [(low, high)]
        while max(low.shape) > 1:
            for dim, size in enumerate(low.shape):
                even = torch.arange(0, size, 2, device=low.device)
                odd = (even + 1).clamp(max=size - 1)
                low = torch.minimum(low.index_select(dim, even), low.index_select(dim, odd))
                high = torch.maximum(high.index_select(dim, even), high.index_select(dim, odd))
            levels.append((low, high))
        self.low, self.high = (torch.cat([level[end].flatten() for level in levels]) for end in (0, 1))
        self.shapes = torch.tensor([low.shape for low, _ in levels], device=low.device)
        counts = self.shapes.prod(1)
        self.starts = counts.cumsum(0) - counts

    def over(self, first: list[Tensor], last: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Bounds of the entries from `first` to `last` of every dimension, and of some around them."""
        extent = torch.stack(last).sub(torch.stack(first)).amax(0)
        # Up to five blocks a side then cover a range and at most a quarter of its length at either end.
        level = (torch.log2(extent + 1.0).ceil().long() - 2).clamp(0, len(self.starts) - 1)
        slots = []
        for steps in product(range(5), repeat=len(first)):
            slot = torch.zeros_like(level)
            for dim, step in enumerate(steps):
                block = torch.minimum((first[dim] >> level) + step, last[dim] >> level)
                slot = slot * self.shapes[level, dim] + block
            slots.append(self.starts[level] + slot)
        slot = torch.stack(slots)
        return self.low[slot].amin(0).double(), self.high[slot].amax(0).double()


def _constant(*operands: Bounds) -> int | None:
    return 0 if all(x.drift == 0 for x in operands) else None


def _common(x: Bounds, y: Bounds) -> int | None:
    return x.drift if x.drift == y.drift else None


def _truth(x: Bounds) -> Bounds:
    return Bounds(((x.low > 0) | (x.high < 0)).double(), ((x.low != 0) | (x.high != 0)).double(), _constant(x))


def _corners(of: Callable[[Tensor, Tensor], Tensor], x: Bounds, y: Bounds, drift: int | None) -> Bounds:
    """Bounds of a function that is monotone in either operand."""
    ends = torch.stack(torch.broadcast_tensors(*(of(a, b) for a in x[:2] for b in y[:2])))
    # An undefined corner, such as 0 times infinity, leaves no bounds.
    known = ~ends.isnan().any(0)
    return Bounds(torch.where(known, ends.amin(0), -INF), torch.where(known, ends.amax(0), INF), drift)


def _sum(x: Bounds, y: Bounds) -> Bounds:
    return _corners(torch.add, x, y, None if x.drift is None or y.drift is None else x.drift + y.drift)


def _negative(x: Bounds) -> Bounds:
    return Bounds(-x.high, -x.low, None if x.drift is None else -x.drift)


def _quotient(x: Bounds, y: Bounds) -> Bounds:
    divisor = torch.where((y.low > 0) | (y.high < 0), y.low, torch.nan)
    floor = lambda a, b: torch.div(a, b, rounding_mode="floor")  # noqa: E731
    return _corners(floor, x, Bounds(divisor, y.high), _constant(x, y))


def _remainder(x: Bounds, y: Bounds) -> Bounds:
    times, last = (torch.div(end, y.low, rounding_mode="floor") for end in x[:2])
    # Not a number where an end is infinite, and so never equal.
    once, positive = (y.low == y.high) & (times == last), y.low > 0
    low = torch.where(once, x.low - times * y.low, 0.0)
    high = torch.where(once, x.high - times * y.low, y.high - 1)
    return Bounds(torch.where(positive, low, -INF), torch.where(positive, high, INF), _constant(x, y))


def _magnitude(x: Bounds) -> Bounds:
    return Bounds(torch.maximum(x.low, -x.high).clamp(min=0), torch.maximum(-x.low, x.high), _constant(x))


def _minimum(x: Bounds, y: Bounds) -> Bounds:
    return Bounds(torch.minimum(x.low, y.low), torch.minimum(x.high, y.high), _common(x, y))


def _maximum(x: Bounds, y: Bounds) -> Bounds:
    return Bounds(torch.maximum(x.low, y.low), torch.maximum(x.high, y.high), _common(x, y))


def _where(c: Bounds, x: Bounds, y: Bounds) -> Bounds:
    low = torch.where(c.low > 0, x.low, torch.where(c.high > 0, torch.minimum(x.low, y.low), y.low))
    high = torch.where(c.low > 0, x.high, torch.where(c.high > 0, torch.maximum(x.high, y.high), y.high))
    return Bounds(low, high, _common(x, y) if c.drift == 0 else None)


def _compared(x: Bounds, y: Bounds, always: Tensor, never: Tensor) -> Bounds:
    return Bounds(always.double(), 1 - never.double(), None if _common(x, y) is None else 0)


def _less(x: Bounds, y: Bounds) -> Bounds:
    return _compared(x, y, x.high < y.low, x.low >= y.high)


def _equal(x: Bounds, y: Bounds) -> Bounds:
    return _compared(x, y, (x.low == y.high) & (x.high == y.low), (x.high < y.low) | (y.high < x.low))


def _not(x: Bounds) -> Bounds:
    return Bounds(1 - x.high, 1 - x.low, _constant(x))


CASTS = {"to", "type", "bool", "byte", "char", "short", "int", "long"}
SWAPPED = {"__rsub__": "sub", "__rfloordiv__": "floordiv", "__rmod__": "remainder", "gt": "lt", "le": "ge"}
UNARY: dict[str, Callable[[Bounds], Bounds]] = {
    "neg": _negative,
    "abs": _magnitude,
    "square": lambda x: _corners(torch.mul, _magnitude(x), _magnitude(x), _constant(x)),
}
BINARY: dict[str, Callable[[Bounds, Bounds], Bounds]] = {
    "add": _sum,
    "sub": lambda x, y: _sum(x, _negative(y)),
    "mul": lambda x, y: _corners(torch.mul, x, y, _constant(x, y)),
    "floordiv": _quotient,
    "floor_divide": _quotient,
    "remainder": _remainder,
    "minimum": _minimum,
    "min": _minimum,
    "maximum": _maximum,
    "max": _maximum,
    "lt": _less,
    "ge": lambda x, y: _not(_less(x, y)),
    "eq": _equal,
    "ne": lambda x, y: _not(_equal(x, y)),
}
LOGIC: dict[str, Callable[..., Bounds]] = {
    "and": lambda x, y: Bounds(x.low * y.low, x.high * y.high, _constant(x, y)),
    "or": lambda x, y: Bounds(torch.maximum(x.low, y.low), torch.maximum(x.high, y.high), _constant(x, y)),
    "xor": lambda x, y: _not(_equal(x, y)),
    "not": _not,
    "invert": _not,
}

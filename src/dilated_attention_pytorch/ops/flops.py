"""Floating-point operations of the operators, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from ..plan import Plan

COUNTER = "torch.utils.flop_counter"


def kept_pairs(plan: Plan) -> int:
    """Pairs of tokens in the tiles of a plan, over all heads; masked pairs of a tile count, padding of a tile does not.

    A tile of the sequence's end is as long as the sequence is there, so that full attention has heads * n * n pairs.
    """
    if "kept_pairs" not in plan.memo:
        total = 0
        for part in plan.parts:
            tiles, by_offset = part.queries.tiles, dict[tuple[int, ...], int]()
            own, offsets = part.head_class.tolist(), torch.stack([part.queries.offset, part.keys.offset], 1).tolist()
            for head, kind in enumerate(own):
                shape_key = kind, *offsets[head]
                if kind >= 0 and shape_key not in by_offset:
                    queries, keys = (axis.tokens(plan.block_size, head)[1].sum(1) for axis in (part.queries, part.keys))
                    met = part.by_query.sums(keys)[kind * tiles : (kind + 1) * tiles]
                    by_offset[shape_key] = int((queries * met).sum())
                total += by_offset.get(shape_key, 0)
        plan.memo["kept_pairs"] = total
    return plan.memo["kept_pairs"]


class FlopFormulas:
    """Formulas of a forward and a backward operator, which take query, key and value first.

    They are registered once `torch.utils.flop_counter` is imported, never by importing it: it imports Triton.
    """

    formulas: ClassVar[dict[Any, Callable[..., int]]] = {}
    """Formulas of the operators of every instance."""
    registered: ClassVar[set[Any]] = set()

    def __init__(self, forward: Any, backward: Any, pairs: Callable[..., int]) -> None:
        """Take the operators and `pairs(query, key, value, *settings)`, the pairs of tokens that a call computes."""
        self.pairs = pairs
        self.formulas.update({forward: self.forward, backward: self.backward})
        self.register()

    @classmethod
    def register(cls) -> bool:
        """Register the formulas, also in modes that are active already; True, for use inside a condition."""
        counter = sys.modules.get(COUNTER)
        if counter is None:
            return True
        for operator in cls.formulas.keys() - cls.registered:
            counter.register_flop_formula(operator, get_raw=True)(cls.formulas[operator])
            cls.registered.add(operator)
        for mode in _get_current_dispatch_mode_stack():
            active = getattr(mode, "counter", None)
            if isinstance(active, counter.FlopCounterMode):
                active.flop_registry.update(cls.formulas)
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *settings: Any, out_val: Any = None) -> int:
        """Two products a pair."""
        return 2 * self._pairs(query, key, value, settings) * (query.shape[3] + value.shape[3])

    def backward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
        """Five products a pair: the scores again, and one for each gradient."""
        return 2 * self._pairs(query, key, value, rest[4:]) * (3 * query.shape[3] + 2 * value.shape[3])

    def _pairs(self, query: Tensor, key: Tensor, value: Tensor, settings: tuple[Any, ...]) -> int:
        with _disable_current_modes():
            return self.pairs(query, key, value, *settings)

"""Floating-point operations of the operators, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

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
            row, tile, _ = part.by_query.entries()
            for head, own in enumerate(part.head_class.tolist()):
                mine = row // part.queries.tiles == own
                queries, keys = (axis.tokens(plan.block_size, head)[1].sum(1) for axis in (part.queries, part.keys))
                total += int((queries[row[mine] % part.queries.tiles] * keys[tile[mine]]).sum())
        plan.memo["kept_pairs"] = total
    return plan.memo["kept_pairs"]


class FlopFormulas:
    """Formulas of the operators `forward` and `backward`, counted on the kept tiles of a call's plan.

    They are registered once `torch.utils.flop_counter` is imported, never by importing it: it imports Triton.
    """

    def __init__(self, plan_of: Callable[..., Plan]) -> None:
        """Take `plan_of(query, key, value, *settings)`, the plan of an operator's arguments on the CPU."""
        self.plan_of = plan_of
        self.registered = False
        self.register()

    def register(self) -> bool:
        """Register the formulas, also in modes that are active already; True, for use inside a condition."""
        counter = sys.modules.get(COUNTER)
        if counter is None:
            return True
        formulas = {
            torch.ops.dilated_attention.forward: self.forward,
            torch.ops.dilated_attention.backward: self.backward,
        }
        if not self.registered:
            for operator, formula in formulas.items():
                counter.register_flop_formula(operator, get_raw=True)(formula)
            self.registered = True
        for mode in _get_current_dispatch_mode_stack():
            active = getattr(mode, "counter", None)
            if isinstance(active, counter.FlopCounterMode):
                active.flop_registry.update(formulas)
        return True

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *settings: Any, out_val: Any = None) -> int:
        """Two products a pair."""
        return 2 * self._pairs(query, key, value, settings) * (query.shape[3] + value.shape[3])

    def backward(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, out_val: Any = None) -> int:
        """Five products a pair: the scores again, and one for each gradient."""
        return 2 * self._pairs(query, key, value, rest[4:]) * (3 * query.shape[3] + 2 * value.shape[3])

    def _pairs(self, query: Tensor, key: Tensor, value: Tensor, settings: tuple[Any, ...]) -> int:
        with _disable_current_modes():
            return query.shape[0] * kept_pairs(self.plan_of(query, key, value, *settings))

"""Plans: the tiles of a pattern."""

from .builder import make_plan, own_block
from .cache import CacheInfo, PlanCache, PlanKey
from .cost import Cost
from .plan import Axis, Masks, Part, Plan, Walk
from .row_plan import plan_rows

__all__ = [
    "Axis",
    "CacheInfo",
    "Cost",
    "Masks",
    "Part",
    "Plan",
    "PlanCache",
    "PlanKey",
    "Walk",
    "make_plan",
    "own_block",
    "plan_rows",
]

"""Which tiles follow from a pattern."""

from .plan import Axis, Masks, Part, Plan, Walk
from .planner import make_plan

__all__ = ["Axis", "Masks", "Part", "Plan", "Walk", "make_plan"]

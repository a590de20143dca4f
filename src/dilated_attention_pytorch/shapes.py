"""Names for the shapes that cross the public boundary.

Letters: b batch, h query heads, g key heads, n tokens, d width of a query or key, e width of a value.

The names are plain `Tensor` unless jaxtyping has been imported before this package, as its pytest plugin does: so they
cost nothing at run time, and tests can check every call against them.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" not in sys.modules:
    Query = Key = Value = Output = Lse = KeyPadding = CuSeqlens = Sink = Bias = Tensor
else:
    from jaxtyping import Bool, Float, Int

    Query = Float[Tensor, "b h n d"]
    Key = Float[Tensor, "b g n d"]
    Value = Float[Tensor, "b g n e"]
    Output = Float[Tensor, "b h n e"]
    Lse = Float[Tensor, "b h n"]
    KeyPadding = Bool[Tensor, "b n"]
    CuSeqlens = Int[Tensor, " documents_and_one"]
    Sink = Float[Tensor, " h"]
    Bias = Float[Tensor, "h *widths"]

__all__ = ["Bias", "CuSeqlens", "Key", "KeyPadding", "Lse", "Output", "Query", "Sink", "Value"]

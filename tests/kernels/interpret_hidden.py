"""Run `hidden_kernel` in Triton's interpreter, in tiles of every size, and print what its scores are off by.

A program of its own, as `interpret_selection` is.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
from conftest import ALLOCATORS, poisoned
from kernels.no_waiting import GpuRules
from oracle import dense_scores, error

from dilated_attention_pytorch.kernels import triton_selection
from dilated_attention_pytorch.ops.selection import Factors


class Scores(NamedTuple):
    """Scores of some rows with the first blocks, by drawn factors without any match."""

    side: int
    t: int
    begin: int
    many: int
    width: int
    hidden: int = 8
    size: int = 1
    is_causal: bool = False
    keep: bool = False
    listed: bool = False
    together: bool = False
    """factors unit by unit, as `factor_kernel` leaves them, with nothing known behind the last block"""

    def errors(self) -> dict[str, float]:
        """Against plain torch in float64; one column is not a number, one row and one column are endless."""
        torch.manual_seed(0)
        lead, t, m = (2, 2), self.t, self.hidden
        rows, columns, keep = (torch.randn(*lead, t, m) for _ in range(3))
        columns[0, 0, 3], columns[1, 0, 5], columns[0, 1, 2], rows[1, 1, -1] = (
            torch.nan,
            torch.inf,
            -torch.inf,
            torch.inf,
        )
        none = torch.zeros(*lead, t, 1, 0)
        factors = Factors(
            *(rows, columns, torch.randn(2, m), torch.randn(2), none, torch.zeros(2, 0, 0), none),
            *(torch.tensor([-0.5, 0.3]), 0.9, keep if self.keep else None),
        )
        drawn = torch.randint(t * self.size, (self.many,))
        ids = drawn if self.listed else torch.arange(self.begin, self.begin + self.many)
        blocks = ids // self.size
        wanted = dense_scores(factors._replace(rows=rows.double(), columns=columns.double()), blocks)[..., : self.width]
        if self.together:
            apart = triton_selection.held(t)
            for x in (rows, columns):
                room = torch.full((*lead, m, apart), torch.nan)
                room[..., :t] = x.mT
                x.set_(room[..., :t].mT)
        triton_selection._hidden_side = lambda *_: self.side
        with GpuRules():
            run = triton_selection.hidden_scoring(factors, self.size, self.is_causal)
            found = run(drawn if self.listed else range(self.begin, self.begin + self.many), self.width)
        # Of a row's own block and later ones nothing is asked.
        asked = torch.arange(self.width) < blocks[:, None] if self.is_causal else torch.tensor(True)
        return {"scores": error(*(torch.where(asked, x, 0.0) for x in (found, wanted)))}


TRIALS = {
    "32 by 32, ragged": Scores(32, 70, 8, 50, 66),
    "32 by 32, of one tile": Scores(32, 9, 3, 5, 9, hidden=5),
    "32 by 32, any rows": Scores(32, 70, 0, 40, 70, listed=True, together=True),
    "32 by 32, tokens, factors on units": Scores(32, 40, 33, 70, 40, size=4, is_causal=True, keep=True),
    "64 by 64, causal": Scores(64, 150, 64, 80, 144, hidden=4, is_causal=True, together=True),
    "64 by 64, odd rows up to the last": Scores(64, 128, 61, 67, 128, hidden=6, together=True),
    "64 by 64, any rows, factors on units": Scores(64, 100, 0, 70, 100, keep=True, listed=True),
    "128 by 128": Scores(128, 200, 4, 180, 200, hidden=16, together=True),
    "128 by 128, causal, up to the last": Scores(128, 256, 132, 124, 256, is_causal=True, together=True),
}


if __name__ == "__main__":
    for owner, name in ALLOCATORS:
        setattr(owner, name, poisoned(getattr(owner, name)))
    for trial in sys.argv[1:] or TRIALS:
        print(json.dumps({"trial": trial} | TRIALS[trial].errors()), flush=True)

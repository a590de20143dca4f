"""Run the kernels that score blocks in Triton's interpreter, and print their errors: block summaries, factors,
`hidden_kernel` with tiles of every size, and noise.

A separate program like `interpret_selection`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from kernels.interpreter import start_interpreting
from kernels.no_waiting import GpuRules
from oracle import dense_scores, error

from dilated_attention_pytorch.kernels.triton.primitives import dropout_rows
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import backend
from dilated_attention_pytorch.selection.kernels import block_scores as triton_selection
from dilated_attention_pytorch.selection.kernels import summaries as triton_summaries
from dilated_attention_pytorch.selection.kernels.topk_kernels import add_noise
from dilated_attention_pytorch.selection.rank import gumbel
from dilated_attention_pytorch.selection.types import Factors


class Summaries(NamedTuple):
    """Block summaries of a sequence."""

    n: int
    own_unit: int
    unit: int
    before: bool = False
    padded: bool = False
    width: int = 12
    rows: int = 8
    asked: int = 8

    def errors(self) -> dict[str, float]:
        """Errors against plain torch; the sixth block is not finite."""
        torch.manual_seed(0)
        triton_summaries.ROWS, triton_summaries.ASKED = self.rows, self.asked
        query, key = (torch.randn(2, self.n, heads, self.width).transpose(1, 2) for heads in (2, 1))
        query[0, 1, 80] = key[0, 0, 82] = torch.inf
        query[1, 0, 81] = key[1, 0, 83] = torch.nan
        padding = torch.arange(self.n) >= torch.tensor([self.n - 3, 20])[:, None] if self.padded else None
        if padding is not None:
            # Padding may hold any values.
            query, key = (x.masked_fill(padding[:, None, :, None], torch.nan) for x in (query, key))
        given = query, key, 16, self.own_unit, self.unit, padding, self.before
        wanted = backend.Torch.summarise(*given)
        with GpuRules():
            found = backend.Triton.summarise(*given)
        errors = {}
        for side, got, want in zip(("queries", "keys"), found, wanted, strict=True):
            assert not bool(want.unit_there.all())
            pairs = zip(got._fields, got, want, strict=True)
            errors |= {f"{name} of {side}": error(a, b) for name, a, b in pairs}
        return errors


class Parts(NamedTuple):
    """Factors of scores, from block summaries."""

    is_causal: bool
    share: bool = False
    key_heads: int = 2
    heads: int = 2
    group: int = 1
    n: int = 600
    granularity: str = "block"
    dtype: torch.dtype = torch.float32

    def errors(self) -> dict[str, float]:
        """Errors against plain torch; blocks, units and channels do not fill their tiles.

        Groups also compare the query side of the match. A non-finite query counts as 0 if tokens select, and otherwise
        empties its block.
        """
        torch.manual_seed(0)
        options = {"hidden_dim": 35, "match_rank": 5, "score_unit": 4, "granularity": self.granularity}
        options |= {"select": "group", "group_size": self.group} if self.group > 1 else {}
        config = AdaptiveConfig(0.5, share_across_heads=self.share, **options)
        layer = BlockSparseAdaptive([self.n], [1], self.heads, 12, config, block_size=16, num_kv_heads=self.key_heads)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        query, key = (torch.randn(2, heads, self.n, 12).to(self.dtype) for heads in (self.heads, self.key_heads))
        names = ["rows", "columns", "right"]
        if self.group > 1:
            # Heads of a token are adjacent.
            query = query.transpose(1, 2).contiguous().transpose(1, 2)
            query[0, 1, 33, 5] = key[1, -1, 70, 3] = torch.inf
            names += ["own", "right_there"]
        with torch.no_grad():
            scores = layer.score_blocks(query, key, self.is_causal)
            with GpuRules():
                made = layer.score_blocks(query, key, self.is_causal)
                found = made.factors
        assert self.group == 1 or made.left is found.own
        errors = {name: error(getattr(found, name), getattr(scores.factors, name)) for name in names}
        return errors | {"visible": error(made.visible, scores.visible)}


class Hidden(NamedTuple):
    """Scores of some rows with the first blocks, from random factors without a match."""

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
    """Factors stored by hidden unit, as `factor_kernel` writes them, undefined past the last block"""

    def errors(self) -> dict[str, float]:
        """Errors against plain torch in float64; one column is NaN, one row and one column are infinite."""
        torch.manual_seed(0)
        lead, t, m = (2, 2), self.t, self.hidden
        rows, columns, keep = (torch.randn(*lead, t, m) for _ in range(3))
        columns[0, 0, 3], columns[1, 0, 5], columns[0, 1, 2], rows[1, 1, -1] = (
            torch.nan,
            torch.inf,
            -torch.inf,
            torch.inf,
        )
        own, right = torch.zeros(*lead, t, 0), torch.zeros(*lead, t, 1, 0)
        factors = Factors(
            *(rows, columns, torch.randn(2, m), torch.randn(2), own, torch.zeros(2, 0, 0), right),
            *(torch.tensor([-0.5, 0.3]), 0.9, keep if self.keep else None),
        )
        drawn = torch.randint(t * self.size, (self.many,))
        ids = drawn if self.listed else torch.arange(self.begin, self.begin + self.many)
        blocks = ids // self.size
        wanted = dense_scores(factors._replace(rows=rows.double(), columns=columns.double()), blocks)[..., : self.width]
        if self.together:
            apart = triton_selection.padded_width(t)
            for x in (rows, columns):
                room = torch.full((*lead, m, apart), torch.nan)
                room[..., :t] = x.mT
                x.set_(room[..., :t].mT)
        triton_selection._hidden_side = lambda *_: self.side
        with GpuRules():
            run = triton_selection.hidden_scoring(factors, self.size, self.is_causal)
            found = run(drawn if self.listed else range(self.begin, self.begin + self.many), self.width)
        # Scores with a row's own block and later ones are undefined.
        asked = torch.arange(self.width) < blocks[:, None] if self.is_causal else torch.tensor(True)
        return {"scores": error(*(torch.where(asked, x, 0.0) for x in (found, wanted)))}


@triton.jit
def noise_kernel(p_seed, p_noise, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    stream, o_i, o_j = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    b_noise = tl.zeros([ROWS, COLUMNS], tl.float32)
    b_noise = add_noise(b_noise, dropout_rows(p_seed, stream, o_i)[:, None], o_j[None, :])
    tl.store(p_noise + (stream * ROWS + o_i[:, None]) * COLUMNS + o_j[None, :], b_noise)


class Noise(NamedTuple):
    """Noise of scores in training, for all values of its bits."""

    seed: int

    def errors(self) -> dict[str, float]:
        """Of the uniform numbers that it is made of, against torch."""
        seed, found = torch.tensor([self.seed]), torch.empty(2, 2, 64, 128)
        noise_kernel[(4,)](seed, found, ROWS=64, COLUMNS=128)
        wanted = gumbel(seed, torch.arange(64), torch.arange(128), found)
        return {"uniform": error((-found).exp().neg().exp2(), (-wanted).exp().neg().exp())}


TRIALS = {
    "noise": Noise(2**40 + 12345),
    "summaries of whole blocks, two units at a time": Summaries(96, 8, 4, width=100, rows=2, asked=2),
    "summaries of ragged blocks, padded samples": Summaries(90, 16, 8, padded=True),
    "means of the blocks before, in pieces": Summaries(90, 16, 16, before=True, width=100, rows=2, asked=4),
    "means of tokens of a ragged block": Summaries(90, 1, 2, before=True, width=16, rows=64, asked=1),
    "parts of scores": Parts(False),
    "parts of causal scores of grouped heads, one scorer": Parts(True, share=True, key_heads=1),
    "parts of lists of two heads, two key heads each": Parts(False, heads=4, key_heads=4, group=2),
    "parts of lists of three of six heads of a key head": Parts(
        True, heads=6, key_heads=1, group=3, n=200, granularity="token", dtype=torch.bfloat16
    ),
    "parts of one list for all heads, causal": Parts(True, heads=4, key_heads=2, group=4, n=196),
    "32 by 32, ragged": Hidden(32, 70, 8, 50, 66),
    "32 by 32, of one tile": Hidden(32, 9, 3, 5, 9, hidden=5),
    "32 by 32, any rows": Hidden(32, 70, 0, 40, 70, listed=True, together=True),
    "32 by 32, tokens, factors on units": Hidden(32, 40, 33, 70, 40, size=4, is_causal=True, keep=True),
    "64 by 64, causal": Hidden(64, 150, 64, 80, 144, hidden=4, is_causal=True, together=True),
    "64 by 64, odd rows up to the last": Hidden(64, 128, 61, 67, 128, hidden=6, together=True),
    "64 by 64, any rows, factors on units": Hidden(64, 100, 0, 70, 100, keep=True, listed=True),
    "128 by 128": Hidden(128, 200, 4, 180, 200, hidden=16, together=True),
    "128 by 128, causal, up to the last": Hidden(128, 256, 132, 124, 256, is_causal=True, together=True),
}


if __name__ == "__main__":
    start_interpreting()
    for trial in sys.argv[1:] or TRIALS:
        print(json.dumps({"trial": trial} | TRIALS[trial].errors()), flush=True)

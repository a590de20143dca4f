"""Run the kernels of learned selections in Triton's interpreter, as a GPU runs them, and print their errors.

A separate program: Triton decides at import whether to interpret, and the test session must not. The host may not read
back device values, as on a GPU; see `no_waiting`.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "1"

import torch
from index_calls import IndexCall, drawn_call
from kernels.interpreter import start_interpreting
from kernels.no_waiting import GpuRules, Launched, attention_op
from kernels.test_selection import GivenScores, drawn, inputs, seen_pairs
from oracle import dense_attention, dense_scores, error
from strategies import Seeded
from torch.nn.attention.varlen import AuxRequest

from dilated_attention_pytorch import make_selection, varlen_attention
from dilated_attention_pytorch.kernels.dropout import keep_mask
from dilated_attention_pytorch.kernels.hopper import lowering as hopper_lowering
from dilated_attention_pytorch.kernels.triton import lowering as triton_lowering
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.plan.documents import ascending
from dilated_attention_pytorch.selection import attend, attention, distill, rank
from dilated_attention_pytorch.selection import indices as lists
from dilated_attention_pytorch.selection import plan as plans
from dilated_attention_pytorch.selection.attention import selected_attention
from dilated_attention_pytorch.selection.backend import Triton
from dilated_attention_pytorch.selection.kernels import block_mass as triton_mass
from dilated_attention_pytorch.selection.kernels import block_scores as triton_selection
from dilated_attention_pytorch.selection.kernels import choose_blocks as triton_choice
from dilated_attention_pytorch.selection.kernels import gather_index, gathered_attention
from dilated_attention_pytorch.selection.kernels import lowering as listed_schedule
from dilated_attention_pytorch.selection.kernels import score_gradients as triton_row_scores
from dilated_attention_pytorch.selection.kernels import topk_kernels as triton_ranking
from dilated_attention_pytorch.selection.rank import Budget
from dilated_attention_pytorch.selection.types import DistillBatch, Factors, ScoreInputs, SelectionSettings


class Attention(NamedTuple):
    """Attention over a drawn selection."""

    per_token: bool
    is_causal: bool = False
    n: int = 48
    batch: int = 1
    key_heads: int = 2
    size: int = 16
    most: int = 2
    padded: bool = False
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    apart: bool = False
    """tokens of a head at a time, long rows in pieces, and tiles of gathered queries one by one"""

    def errors(self) -> dict[str, float]:
        """Of output, LSE and gradients, and of the scores' gradients of a distillation on all rows."""
        torch.manual_seed(0)
        attend.GATHERED = 1 if self.apart else 2**29
        triton_lowering.SHORTEST_PIECE = 1 if self.apart else 2**18
        triton_lowering.PROGRAMS_PER_PROCESSOR = 12 if self.apart else 4
        gathered_attention.ENOUGH = 2048 if self.apart else 1
        shape = {"batch": self.batch, "heads": 2, "n": self.n, "size": self.size, "most": self.most, "local": 1}
        chosen = drawn(**shape, is_causal=self.is_causal, per_token=self.per_token)
        given = [x.to(self.dtype) for x in inputs(chosen, self.key_heads, 16, 12)]
        # The LSE of a row without a key has no gradient, whether it is -inf or another value.
        slopes = torch.randn(self.batch, 2, self.n, 12), torch.randn(self.batch, 2, self.n)
        padding = torch.arange(self.n) >= torch.tensor([self.n, self.n // 2])[: self.batch, None]
        options = {"key_padding_mask": padding if self.padded else None}
        torch.manual_seed(1)
        seed = torch.randint(2**62, (1,))
        if self.per_token:
            # Shared blocks are planned and scheduled once per shape, like any pattern.
            shared = attend.shared_plan(self.n, 2, self.size, 1, 1, self.is_causal, torch.device("cpu"))
            triton_lowering.schedule(shared, 2 // self.key_heads)
        found = []
        for dtype, backend in ((self.dtype, "triton"), (torch.float64, "cpu")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in given]
            rows = torch.arange(chosen.indices.shape[2])
            visible = torch.ones(self.batch, 2, chosen.blocks, dtype=torch.bool)
            batch = DistillBatch(torch.cat([rows, rows[::2]]), len(rows), visible, 1.0, saliency=True, total=len(rows))
            taught = [
                torch.zeros(shape, dtype=dtype, requires_grad=True)
                for shape in (chosen.indices.shape, (self.batch, 2, len(rows[::2]), chosen.blocks))
            ]
            options |= {"distill": batch, "scores": lambda *_, taught=taught: tuple(taught)}
            options |= {"enable_gqa": True, "return_lse": True}
            options |= {"dropout_p": self.dropout_p, "backend": backend}
            torch.manual_seed(1)
            with GpuRules() if backend == "triton" else torch.enable_grad():
                output, lse = selected_attention(*leaves, chosen, **options)
                slope = torch.where(lse > -torch.inf, slopes[1].to(lse.dtype), 0.0)
                pairs = (output * slopes[0].to(dtype)).sum() + (lse.clamp(min=-1e30) * slope).sum()
                found.append([output, lse, *torch.autograd.grad(pairs, [*leaves, *taught])])
        if self.per_token:
            leaves = [x.detach().double().requires_grad_() for x in given]
            dense = {"key_padding_mask": options["key_padding_mask"]}
            if self.dropout_p:
                stream = torch.arange(2 * self.batch).view(-1, 2, 1, 1)
                token = torch.arange(self.n)
                dense["kept"] = keep_mask(seed, stream, token[:, None], token, self.dropout_p)
                dense["dropout_p"] = self.dropout_p
            output, lse = dense_attention(*leaves, seen_pairs(chosen).double(), **dense)
            finite = torch.where(lse > -torch.inf, lse, 0.0)
            pairs = (output * slopes[0].double()).sum() + (finite * slopes[1].double()).sum()
            found[1][:5] = [output, lse, *torch.autograd.grad(pairs, leaves)]
        names = ("output", "lse", "query", "key", "value", "scores", "dense scores")
        return {name: error(a.detach(), b.detach()) for name, a, b in zip(names, *found, strict=True)}


class Indexed(NamedTuple):
    """Attention on drawn indices, some of them no block, as a GPU runs it."""

    call: IndexCall
    traced: bool = False
    """By the registered operators"""

    def errors(self) -> dict[str, float]:
        """Of output, LSE and every gradient."""
        attend.GATHERED, triton_lowering.SHORTEST_PIECE, triton_lowering.PROGRAMS_PER_PROCESSOR = 2**29, 2**18, 4
        call = self.call._replace(wild=True)
        if call.per_token:
            is_shared = call.is_causal and not call.documents
            near = int(is_shared), 0, is_shared, torch.device("cpu")
            shared = attend.shared_plan(call.n, call.heads, call.size, *near)
            triton_lowering.schedule(shared, call.heads // call.key_heads)
        return call.errors("triton", torch.float32, rules=GpuRules(self.traced), widths=(16, 12))


class Repeated(NamedTuple):
    """Calls with one selection, which caches values that the first call derives from its lists."""

    call: IndexCall
    fewer: int
    """Launches of a first call that later calls omit"""

    def errors(self) -> dict[str, float]:
        """Numbers of output, LSE and gradients that differ between calls, and launches that are not saved."""
        attend.GATHERED, triton_lowering.SHORTEST_PIECE, triton_lowering.PROGRAMS_PER_PROCESSOR = 2**29, 2**18, 4
        call = self.call
        indices, counts, _ = call.lists()
        if call.per_token:
            shared = attend.shared_plan(call.n, call.heads, call.size, 1, 0, True, torch.device("cpu"))
            triton_lowering.schedule(shared, call.heads // call.key_heads)
        torch.manual_seed(0)
        leaves = [torch.randn(call.batch, h, call.n, 16) for h in (call.heads, call.key_heads, call.key_heads)]
        leaves = [x.requires_grad_() for x in leaves]
        shape = {"n": call.n, "heads": call.heads, "granularity": call.size, "is_causal": call.is_causal}
        with GpuRules():
            before, first, other = (make_selection(indices, counts, **shape) for _ in range(3))
        found, launches = [], []
        # An earlier call caches everything that depends on shapes alone.
        for selection in (before, first, first, other, first):
            with GpuRules(), Launched() as launched:
                output, lse = selected_attention(*leaves, selection, enable_gqa=True, return_lse=True, backend="triton")
                loss = output.square().sum() + lse.clamp(min=-9.0).sum()
                found.append([output, lse, *torch.autograd.grad(loss, leaves)])
            launches.append(launched.count)
        names = ("output", "lse", "query", "key", "value")
        different = [sum(float((a != b).sum()) for b in each) for a, *each in zip(*found, strict=True)]
        saved = [launches[1] - x - self.fewer * (at % 2) for at, x in enumerate(launches[1:])]
        return dict(zip(names, different, strict=True)) | {"launches": float(sum(map(abs, saved)))}


class Chunks(NamedTuple):
    """Attention on drawn indices by tokens in chunks, against the same call as a whole."""

    call: IndexCall
    rows: int
    """Tokens of single heads in a chunk"""
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32

    def errors(self) -> dict[str, float]:
        """Errors of output, LSE and gradients; for chunks of whole heads, counts of values of output, LSE and dQ that
        differ.

        In the interpreter, results of a product depend on the position of a row in its tile; on a GPU they do not.
        """
        call = self.call
        indices, counts, _ = call.lists()
        is_shared = call.is_causal and not call.documents
        shared = attend.shared_plan(call.n, call.heads, call.size, int(is_shared), 0, is_shared, torch.device("cpu"))
        triton_lowering.schedule(shared, call.heads // call.key_heads)
        torch.manual_seed(0)
        heads = call.heads, call.key_heads, call.key_heads
        given = [torch.randn(call.batch, h, call.n, d).to(self.dtype) for h, d in zip(heads, (16, 16, 12), strict=True)]
        slopes = torch.randn(call.batch, call.heads, call.n, 12).to(self.dtype), torch.randn(call.batch, call.heads, 1)
        options = {"granularity": call.size, "is_causal": call.is_causal, "enable_gqa": True, "return_lse": True}
        options |= {"cu_seqlens": call.cu_seqlens(), "dropout_p": self.dropout_p, "backend": "triton"}
        limits, found, chunks = gathered_attention.GatheredAttend._most_rows, [], []
        for rows in (2**20, self.rows):
            gathered_attention.GatheredAttend._most_rows = lambda *_, rows=rows: (0 if rows < 2**20 else rows, rows)
            attention._cached.clear()
            leaves = [x.detach().requires_grad_() for x in given]
            torch.manual_seed(1)
            with GpuRules(), Launched() as launched:
                output, lse = selected_attention(*leaves, indices, counts, **options)
                finite = torch.where(lse > -torch.inf, lse, 0.0)
                loss = (output * slopes[0]).sum(dtype=torch.float32) + (finite * slopes[1]).sum()
                found.append([output, lse, *torch.autograd.grad(loss, leaves)])
            chunks.append(launched.count)
        gathered_attention.GatheredAttend._most_rows = limits
        names = ("output", "lse", "query", "key", "value")
        results = {name: error(a.float(), b.float()) for name, a, b in zip(names, *found, strict=True)}
        if self.rows >= call.batch * call.n:
            results |= {
                name: float((a != b).sum()) for name, a, b in zip(names[:3], *(x[:3] for x in found), strict=True)
            }
        return results | {"runs whole": float(chunks[1] <= chunks[0])}


class PackedWindow(NamedTuple):
    """Attention in packed documents with bounds on the device, through `varlen_attention`."""

    pattern: str = "full"
    window: tuple[int, int] = (-1, -1)
    lengths: tuple[int, ...] = (130, 0, 1, 128, 40)
    key_heads: int = 1
    dropout_p: float = 0.0
    dtype: torch.dtype = torch.float32
    traced: bool = False
    """Through the registered operators, whose backward pass receives the bounds only"""
    wrong: tuple[int, ...] = ()
    """Bounds that do not ascend from 0, which are clamped on a GPU; see `documents.ascending`"""
    changed_scores: bool = False
    """With a soft cap and a bias by distance"""

    def errors(self) -> dict[str, float]:
        """Of output, LSE and every gradient."""
        torch.manual_seed(0)
        n, heads = sum(self.lengths), 2
        bounds = torch.tensor([0, *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        bounds = torch.tensor(self.wrong, dtype=torch.int32) if self.wrong else bounds
        shapes = (heads, 16), (self.key_heads, 16), (self.key_heads, 12)
        given = [torch.randn(n, *shape).to(self.dtype) for shape in shapes] + [torch.randn(heads)]
        given += [torch.randn(heads, 21)] if self.changed_scores else []
        slopes = torch.randn(n, heads, 12), torch.randn(n, heads)
        options = {"window_size": self.window, "enable_gqa": True, "return_aux": AuxRequest(lse=True)}
        options |= {"pattern": self.pattern, "dropout_p": self.dropout_p}
        options |= {"softcap": 2.0} if self.changed_scores else {}
        observed, attention_op.is_observed = attention_op.is_observed, lambda *tensors: self.traced
        reads, found = attention_op.lengths_of, []
        for backend in ("triton", "cpu"):
            attention_op.lengths_of = refuse_bits if backend == "triton" else reads
            kind = None if backend == "triton" else torch.float64
            leaves = [x.detach().to(kind or x.dtype).requires_grad_() for x in given]
            torch.manual_seed(1)
            bounds = bounds if backend == "triton" else ascending(bounds, n)
            with GpuRules() if backend == "triton" else torch.enable_grad():
                extra = dict(zip(("sink", "bias"), leaves[3:], strict=False))
                output, lse = varlen_attention(*leaves[:3], bounds, bounds, n, n, backend=backend, **extra, **options)
                loss = (output * slopes[0].to(output.dtype)).sum() + (lse * slopes[1].to(lse.dtype)).sum()
                found.append([output, lse, *torch.autograd.grad(loss, leaves)])
        attention_op.is_observed = observed
        names = ("output", "lse", "query", "key", "value", "sink", "bias")[: len(found[0])]
        return {name: error(got.detach(), want.detach()) for name, got, want in zip(names, *found, strict=True)}


def refuse_bits(*arguments: object) -> torch.Tensor:
    """Replacement of functions that must not run: the search bit by bit, and host reads of bounds."""
    raise AssertionError("trials did not find the last score that is listed, or the host reads bounds")


class Choice(NamedTuple):
    """The best blocks by drawn factors."""

    per_token: bool
    is_causal: bool = False
    n: int = 60
    batch: int = 1
    heads: int = 1
    hidden: int = 5
    rank: int = 3
    units: int = 4
    each: int = 4  # Scored rows of a block that selects.
    kept: float = 0.5
    coverage: float | None = None
    most: int | None = None
    local: int = 1
    sink: int = 1
    noise: bool = False
    holes: bool = False
    keep: bool = False
    tied: bool = False
    wild: bool = False  # Scores of very different magnitude, and infinite ones.
    in_registers: bool = False  # Tokens in one kernel, as with blocks of at least 64.
    plain: bool = False  # Scores of similar magnitude, which need no search bit by bit.
    rounds: bool = False
    projected: bool = False  # The query side of the match is precomputed, as for groups of heads.

    def factors(self) -> Factors:
        t = -(-self.n // 16)
        rows = self.n if self.per_token else t * self.each
        lead, m, d = (self.batch, self.heads), self.hidden, self.rank
        # Of tied scores there are but three.
        draw = (lambda *size: torch.randint(2, size).float()) if self.tied else torch.randn
        right_there = torch.rand(*lead, t, self.units) > 0.3 if self.holes else None
        width, low = (d, False) if self.projected else (5, self.rounds or self.wild)
        return Factors(
            draw(*lead, t, m) * (not self.tied),
            draw(*lead, t, m) * (not self.tied),
            2 * draw(self.heads, m),
            draw(self.heads),
            draw(*lead, rows, width).to(torch.bfloat16 if low else torch.float32),
            None if self.projected else draw(self.heads, 5, d),
            draw(*lead, t, self.units, d),
            torch.rand(self.heads) - 0.5,
            0.9,
            torch.rand(*lead, t, m) if self.keep else None,
            right_there,
            rounds=self.rounds,
        )

    def errors(self) -> dict[str, float]:
        """Number of list entries that differ from the torch implementation, which computes all scores."""
        torch.manual_seed(0)
        # Rows in runs.
        triton_choice.SCORE_BYTES = 1500
        ranks = triton_choice._rank_launch
        if self.in_registers:
            triton_choice.CHOSEN, triton_choice._rank_launch = 16, None
        score_of_key = triton_ranking.score_of_key
        if self.plain:
            triton_ranking.score_of_key = refuse_bits
        factors = self.factors()
        t = factors.right.shape[2]
        visible = torch.rand(self.batch, self.heads, t) > (0.2 if self.holes else -1.0)
        if self.holes:
            factors.columns[..., t // 2, :] = torch.nan
        if self.wild:
            factors.right.mul_(10 ** (12 * torch.rand(t, 1, 1) - 4))
            factors.columns[..., 1:3, :] = torch.inf
            # Non-finite elements of queries count as 0.
            factors.own[:, :, 99:102, 0] = torch.tensor([torch.inf, -torch.inf, torch.nan])
            assert len(factors.weight.sign().unique()) == 2
        size = 16 if self.per_token else self.each
        scores = dense_scores(factors, torch.arange(factors.own.shape[2]) // size)
        present = None if self.per_token or not self.holes else torch.rand(self.batch, factors.own.shape[2]) > 0.3
        seed = torch.tensor([2**40 + 12345]) if self.noise else None
        budget = Budget(self.kept, self.coverage, 2, self.most)
        unit = 1 if self.per_token else 16 // self.each
        settings = SelectionSettings(budget, 16, 16, self.is_causal, self.per_token, unit, self.local, self.sink)
        given = GivenScores(scores, settings, visible, factors, present)
        rows = scores.shape[2] if self.per_token else t
        wanted, wanted_counts = rank.rank(given, torch.arange(rows), seed, host_sync=True)
        with GpuRules():
            listed, counts = Triton.rank(given, seed)
        triton_choice.CHOSEN, triton_choice._rank_launch, triton_ranking.score_of_key = 64, ranks, score_of_key
        width = wanted.shape[-1]
        assert wanted_counts.float().mean() > 0.3
        errors = {
            "counts": float((counts != wanted_counts).sum()),
            "blocks": float((listed[..., :width] != wanted).sum()),
            "past the count": float((listed[..., width:] != t).sum()),
        }
        if self.wild:
            shared = triton_selection.ByBlock(0, triton_selection.hidden_scoring(factors, 1, False)(range(t)))
            made = triton_selection.scoring(factors, 16, False)(range(self.n), t, shared)
            sizes = scores.abs().amax(2, keepdim=True)
            errors["scores"] = error(*(torch.where(scores.isfinite(), x / sizes, x) for x in (made, scores)))
        return errors


class Learned(NamedTuple):
    """Gradients of parameters from gradients of the scores of some rows."""

    per_token: bool
    coldest: float = 0.1
    holes: bool = False
    tied: bool = False
    share: bool = False
    tile: int = 4096
    chunk: int = 0
    """Sub-blocks per product if `best_kernel` computes the best matches first; 0 without it"""
    units: int = 8

    def errors(self) -> dict[str, float]:
        """Errors against torch's gradients. A maximum divides its gradient among ties, of which integers have many.

        A non-finite query counts as 0, and most rows list few blocks.
        """
        torch.manual_seed(0)
        triton_row_scores.TILE = self.tile
        batch, heads, t, units, d, hidden, rank = 2, 2, 7, self.units, 5, 6, 3
        alike = 1 if self.share else heads
        draw = (lambda *size: torch.randint(-1, 2, size).float()) if self.tied else torch.randn
        total, size = (100, 16) if self.per_token else (4 * t, 4)
        means, summary, keys = draw(batch, heads, t, d), draw(batch, heads, t, 3 * d), draw(batch, heads, t, units, d)
        own = draw(batch, heads, total, d)
        shapes = (alike, hidden, 2 * d), (alike, hidden), (alike, hidden), (alike,), (alike, 3 * d, d)
        shapes += (alike, d, rank), (alike, d, rank), (heads,)
        leaves = [draw(*shape).requires_grad_() for shape in shapes]
        first, first_bias, last, bias, mixture, project, match, log = leaves
        there = None
        if self.holes:
            there = torch.rand(batch, heads, t, units) > 0.3
            there[:, 0, 2] = False
        own[0, 1, 23, 2] = torch.inf
        factors = Factors(
            means @ first[..., :d].mT + first_bias[:, None],
            summary @ mixture @ first[..., d:].mT,
            last.expand(heads, hidden),
            bias.expand(heads),
            own,
            project.expand(heads, d, rank),
            (keys.flatten(2, 3) @ match).unflatten(2, (t, units)),
            log,
            self.coldest,
            None,
            there,
        )
        ids = torch.tensor([0, 23, 47, 98, 98]) if self.per_token else torch.tensor([0, 13, 23, 6, 27])
        without = factors._replace(right=factors.right[..., :0], log_temperature=torch.zeros(heads), coldest=1.0)
        scores = dense_scores(without, ids // size)
        left = torch.einsum("bhrd,hdp->bhrp", own[:, :, ids].nan_to_num(0.0, 0.0, 0.0), factors.project)
        pairs = torch.einsum("bhrp,bhtup->bhrtu", left, factors.right)
        if there is not None:
            pairs = pairs.masked_fill(~there[:, :, None], -torch.inf)
        best = pairs.amax(4)
        scores = scores + torch.where(best > -torch.inf, best, 0.0) / rank**0.5
        # The gradient passes by the temperature that is not held above the coldest.
        free = log.exp()
        scores = scores / (free + (free.clamp(min=self.coldest) - free).detach())[:, None, None]
        grad = torch.randn(scores.shape) * (torch.rand(scores.shape) > 0.3)
        wanted = torch.autograd.grad(scores, leaves, grad)
        made = Factors(*(x.detach() if isinstance(x, torch.Tensor) else x for x in factors))
        whole = triton_row_scores.LARGEST_TILE, triton_row_scores.CHUNK
        triton_row_scores.prepared.cache_clear()
        triton_row_scores.RUN = 24
        if self.chunk:
            triton_row_scores.LARGEST_TILE, triton_row_scores.CHUNK = 0, self.chunk
        with GpuRules(), torch.no_grad():
            found = triton_row_scores.parameter_gradients(
                grad, scores.detach(), ids, made, ScoreInputs(means, summary, keys), first, mixture, size
            )
            found[2] = found[2][:, 0]
            found[3] = found[3][:, 0]
        triton_row_scores.LARGEST_TILE, triton_row_scores.CHUNK = whole
        names = "first", "first bias", "last", "bias", "mixture", "project", "match", "temperature"
        sizes = [x.abs().max().clamp(min=1.0) for x in wanted]
        return {name: error(a / s, b / s) for name, a, b, s in zip(names, found, wanted, sizes, strict=True)}


class Lists(NamedTuple):
    """A drawn selection by query blocks as the GPU kernels read it."""

    n: int
    size: int
    batch: int = 1
    is_causal: bool = False
    group: int = 1
    local: int = 1
    few: bool = True

    def errors(self) -> dict[str, float]:
        """Pairs that differ from the plan built in torch, and work lists that differ from those built on the host."""
        torch.manual_seed(0)
        listed_schedule.FEW_ITEMS = hopper_lowering.FEW_ITEMS if self.few else 0
        chosen = drawn(
            self.batch, 2, self.n, self.size, is_causal=self.is_causal, per_token=False, most=2, local=self.local
        )
        with GpuRules():
            listed = listed_schedule.Listed(chosen, on_hopper=True)
            plan = listed.whole_plan
            (made,) = hopper_lowering.attach_parts(plan, (listed_schedule.ListedPart(plan, listed.items),))
            works = [
                made.by_query,
                made.backward_items(self.group, by_key=True),
                made.backward_items(self.group, by_key=False),
            ]
        wanted = plans.block_plan(chosen)
        runs = works[1].items.view(1 if self.few else 2 // self.group, -1, 4)
        assert len({*runs[..., 2].flatten().tolist()}) > 1
        found = {
            "lighter items before heavier": float((runs[..., 2].diff(dim=1) > 0).sum()),
            "heads among others": float((not self.few) * (runs[:, 1:, 0] != runs[:, :-1, 0]).sum()),
            "pairs": float((plan.to_dense() != wanted.to_dense()).sum()),
            "rows of the forward": float((listed.plan.parts[0].by_query.rows != made.part.by_query.rows).sum()),
        }
        looked = hopper_lowering.LoweredPart(plan, made.part, strided=False)
        looks = [
            looked.by_query,
            looked.backward_items(self.group, by_key=True),
            looked.backward_items(self.group, by_key=False),
        ]
        for number, (got, want) in enumerate(zip(works, looks, strict=True)):
            for name in got._fields:
                one, other = getattr(got, name), getattr(want, name)
                if name == "partial" and number == 1:
                    one, other = one[: wanted.blocks], other[: wanted.blocks]
                if name == "items":
                    # The starting order differs.
                    one, other = (torch.tensor(sorted(x.tolist()), dtype=x.dtype) for x in (one, other))
                same = one == other if name == "covers" else torch.equal(one, other) and one.dtype == other.dtype
                found[f"{name} {number}"] = float(not same)
        alive = weakref.ref(plan)
        del plan, listed
        gc.collect()
        return found | {"plans that outlive their call": float(alive() is not None)}


class Turned(NamedTuple):
    """A drawn selection by tokens, turned round."""

    n: int
    batch: int = 1
    is_causal: bool = False
    most: int = 3
    group: int = 1
    window: int = 1024

    def errors(self) -> dict[str, float]:
        """Number of values that differ from an inverted index built by sorting."""
        gather_index.WINDOW, gather_index.TOGETHER = self.window, min(self.window, 64)
        torch.manual_seed(0)
        chosen = drawn(self.batch, 2, self.n, 16, is_causal=self.is_causal, per_token=True, most=self.most)
        with GpuRules():
            found, wanted = (
                gather_index.invert_selection(chosen, self.group),
                plans.invert_selection(chosen, self.group, 0, False),
            )
        # The sources of rows in tiles of filler alone are undefined and never read.
        nowhere = (wanted.tile == self.batch * chosen.blocks).repeat_interleave(chosen.block_size, 1)
        found, wanted = (one._replace(source=one.source.masked_fill(nowhere, -1)) for one in (found, wanted))
        return {name: float((a != b).sum()) for name, a, b in zip(found._fields, found, wanted, strict=True)}


class NormalForm(NamedTuple):
    """Index tensors in their normal form, made by one kernel."""

    calls: int

    def errors(self) -> dict[str, float]:
        """Numbers that differ from those of torch operations, launches besides one a call, and wrong layouts.

        Calls of one shape follow each other: their integers, strides, counts and limits are their own.
        """
        draw, found = Seeded(0), dict.fromkeys(("indices", "counts", "sharing_rows", "layout", "launches"), 0.0)
        for seed in range(self.calls):
            call = drawn_call(draw)._replace(wild=True, counted=True, seed=seed, entries=draw.choice([1, 3, 17, 40]))
            indices, counts, _ = call.lists()
            columns, shared = indices.mT.contiguous().mT, indices[:1].expand_as(indices)
            shape = {"n": call.n, "heads": call.heads, "granularity": call.size}
            for number, given in enumerate((indices, columns, indices.long(), shared, shared.long())):
                near = draw.choice([(0, 0), (1, 0), (2, 0), (1, 2), (3, 1)])
                options = shape | {
                    "local_blocks": near[0],
                    "sink_blocks": near[1],
                    "is_causal": draw.choice([0, 1]) > 0,
                }
                given = given, counts if number % 2 else None
                with GpuRules(), Launched() as launched:
                    made = make_selection(*given, **options)
                found["launches"] += launched.count - 1
                longest, lists.LONGEST_COMPARED = lists.LONGEST_COMPARED, 0
                with GpuRules():
                    wanted = make_selection(*given, **options)
                lists.LONGEST_COMPARED = longest
                for name in ("indices", "counts", "sharing_rows"):
                    own, other = getattr(made, name), getattr(wanted, name)
                    if own is None or other is None:
                        found["layout"] += own is not other
                        continue
                    found["layout"] += own.dtype != other.dtype or own.shape != other.shape or not own.is_contiguous()
                    found[name] += float((own != other).sum())
        return found


class Neighbours(NamedTuple):
    """Calls that differ from an earlier one in a single property, and so must not use what was prepared for it."""

    per_token: bool

    def errors(self) -> dict[str, float]:
        """Numbers of output and LSE that differ from those of a first call, for each property."""
        attend.GATHERED = 2**29
        call, found = IndexCall(self.per_token, True, 20, scope=2, entries=2), {}
        # Plans of shared blocks are made once for a shape.
        for near, group in ((1, 2), (1, 4), (0, 2)):
            shared = attend.shared_plan(call.n, call.heads, call.size, near, 0, near > 0, torch.device("cpu"))
            triton_lowering.schedule(shared, group)
        torch.manual_seed(0)
        shape = call.batch, call.n, 16
        query, key, value = (torch.randn(shape[0], heads, *shape[1:]) for heads in (4, 2, 2))
        indices = call.lists()[0]
        padding = torch.arange(call.n).expand(call.batch, -1) >= torch.tensor([[15], [20]])

        def run(query=query, key=key, value=value, indices=indices, trained=False, **more: Any) -> list[torch.Tensor]:
            torch.manual_seed(2)
            options: dict[str, Any] = {"granularity": call.size, "is_causal": True, "enable_gqa": True} | more
            leaves = [x.detach().requires_grad_(trained) for x in (query, key, value)]
            with GpuRules():
                output, lse = selected_attention(*leaves, indices, return_lse=True, backend="triton", **options)
                grads = torch.autograd.grad(output.square().sum(), leaves) if trained else ()
            return [output.detach(), lse.detach(), *grads]

        one = {"query": query[:1], "key": key[:1], "value": value[:1], "indices": indices[:1]}
        changes: dict[str, dict[str, Any]] = {
            "samples": one,
            "packed": one | {"cu_seqlens": torch.tensor([0, 7, 20])},
            "strides": {"query": query.transpose(1, 2).contiguous().transpose(1, 2)},
            "strides of values": {"value": value.transpose(1, 2).contiguous().transpose(1, 2)},
            "alignment": {"key": torch.cat([key.new_zeros(1), key.flatten()])[1:].view_as(key)},
            "dtype": {"query": query.half(), "key": key.half(), "value": value.half()},
            "width of values": {"value": value[..., :12]},
            "key heads": {"key": key[:, :1], "value": value[:, :1], "indices": indices[:, :1]},
            "lists": {"indices": indices[:, :1]},
            "lists of query heads": {"indices": indices.repeat_interleave(2, 1)},
            "entries": {"indices": indices[..., :1]},
            "strides of lists": {"indices": indices.mT.contiguous().mT},
            "64 bits": {"indices": indices.long()},
            "scale": {"scale": 0.5},
            "negative scale": {"scale": -0.5},
            "sink": {"sink": torch.tensor([0.3, -0.2, 1.0, 0.0])},
            "dropout": {"dropout_p": 0.4},
            "padding": {"key_padding_mask": padding},
            "gradients": {"trained": True},
            "not causal": {"is_causal": False},
        }
        for name, change in changes.items():
            attention._cached.clear()
            wanted = run(**change)
            attention._cached.clear()
            run()
            found[name] = sum(float((a != b).sum()) for a, b in zip(run(**change), wanted, strict=True))
        return found


class Step(NamedTuple):
    """A training step of a whole layer."""

    is_causal: bool
    most: int
    """Launches of a forward pass, of its backward pass, and of a forward pass without distillation."""
    most_backward: int
    most_alone: int
    n: int = 64
    key_heads: int = 2
    batch: int = 1
    share: bool = False
    padded: bool = False
    heads: int = 2
    group: int = 1
    granularity: str = "auto"
    unit: int = 4
    local: int = 2
    sink: int = 1
    pieces: bool = False
    """Whether scores, listed blocks and sums of sub-blocks exceed the sizes at which a call runs whole"""
    few: bool = False
    """Whether so few rows are compared on their listed blocks that they weigh less"""

    def errors(self) -> dict[str, float]:
        """Of gradients and statistics against plain torch, and launches beyond the bound; reading back would raise."""
        triton_choice.SCORE_BYTES = 1500 if self.pieces else 2**29
        attend.GATHERED, attend.OF_TENSORS = (1, 2**40) if self.pieces else (2**29, 10)
        triton_row_scores.RUN = 24 if self.pieces else 2048
        distill.MOST_ROWS = 16 if self.few else 1024
        distill.ENOUGH = 64 if self.few else 1
        # Of tokens, few at a time.
        triton_mass.TILE = triton_row_scores.TILE = 16 if self.is_causal else 4096
        options = {"hidden_dim": 4, "match_rank": 4, "score_unit": self.unit, "granularity": self.granularity}
        options |= {"select": "group", "group_size": self.group} if self.group > 1 else {}
        options |= {"local_blocks": self.local, "sink_blocks": self.sink}
        config = AdaptiveConfig(
            0.5, distill_rows=0.5, share_across_heads=self.share, temperature=0.7, exploration=True, **options
        )
        torch.manual_seed(0)
        layer = BlockSparseAdaptive(
            [self.n], [1], self.heads, 16, config, block_size=16, backend="triton", num_kv_heads=self.key_heads
        )
        # Else every match of a row that has no second block is the same, and so is its gradient.
        torch.nn.init.normal_(layer.scorer.match_key)
        drawn = [torch.randn(self.batch, self.n, heads, 16) for heads in (self.heads, self.key_heads, self.key_heads)]
        slope = torch.randn(self.batch, self.n, self.heads, 16)
        padding = torch.arange(self.n) >= torch.tensor([self.n, self.n // 2])[: self.batch, None]
        told = {"key_padding_mask": padding if self.padded else None}
        if config.per_token(self.is_causal):
            near = config.local_blocks, config.sink_blocks
            shared = attend.shared_plan(self.n, self.heads, 16, *near, self.is_causal, torch.device("cpu"))
            triton_lowering.schedule(shared, self.heads // self.key_heads)
        learning, learned, alone = Launched(), Launched(), Launched()
        found = []
        for backend, rules in (("triton", GpuRules()), ("cpu", nullcontext())):
            layer.backend = backend
            x = [t.clone().requires_grad_() for t in drawn]
            layer.zero_grad()
            torch.manual_seed(1)
            counts = backend == "triton"
            with rules:
                output = layer(*x, self.is_causal, **told)
                with learned if counts else nullcontext():
                    output.backward(slope)
            grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
            grads |= dict(zip("qkv", (t.grad for t in x), strict=True))
            found.append(grads | layer._batch.results())
        layer.backend = "triton"
        with GpuRules():
            with learning:
                layer(*x, self.is_causal, **told)
            with alone, torch.no_grad():
                layer.eval()(*x, self.is_causal, **told)
        counts = {
            "launches": learning.count - self.most,
            "launches backward": learned.count - self.most_backward,
            "launches alone": alone.count - self.most_alone,
        }
        sizes = {name: value.abs().max().clamp(min=1e-6) for name, value in found[1].items()}
        # Without a coverage budget the last bias has no gradient but rounding.
        sizes["scorer.importance.bias_1"] = max(x for name, x in sizes.items() if name.startswith("scorer"))
        errors = {name: error(value / sizes[name], found[1][name] / sizes[name]) for name, value in found[0].items()}
        return errors | {name: float(max(0, value)) for name, value in counts.items()}


LAST_BIAS = ".3.bias"
"""Name of the bias of a scorer's second layer, which moves all scores of a row alike."""


class OptimizerSteps(NamedTuple):
    """Three optimizer steps of a whole layer."""

    is_causal: bool
    optimizer: str
    n: int = 48
    options: dict[str, bool] = {}  # noqa: RUF012
    config: dict[str, str] = {}  # noqa: RUF012

    def errors(self) -> dict[str, float]:
        """Of parameters after three steps against plain torch, and parameters that did not change."""
        triton_choice.SCORE_BYTES = 2**29
        triton_mass.TILE = triton_row_scores.TILE = 16 if self.is_causal else 4096
        widths = {"hidden_dim": 4, "match_rank": 4, "score_unit": 4}
        config = AdaptiveConfig(0.5, distill_rows=0.5, exploration=True, **widths, **self.config)
        torch.manual_seed(0)
        layer = BlockSparseAdaptive([self.n], [1], 2, 16, config, block_size=16, backend="triton")
        torch.nn.init.normal_(layer.scorer.match_key)
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        x = torch.randn(3, 1, self.n, 2, 16).unbind()
        if self.is_causal:
            shared = attend.shared_plan(self.n, 2, 16, 2, 1, True, torch.device("cpu"))
            triton_lowering.schedule(shared, 1)
        found = []
        for backend, rules in (("triton", GpuRules), ("cpu", nullcontext)):
            layer.backend = backend
            layer.load_state_dict(before)
            # A large epsilon, so that rounding of small gradients does not decide the sign of a step.
            floor = {} if self.optimizer == "SGD" else {"eps": 1e-2}
            optimizer = getattr(torch.optim, self.optimizer)(layer.parameters(), 1e-2, **floor, **self.options)
            for step in range(3):
                torch.manual_seed(step)
                optimizer.zero_grad()
                with rules():
                    output = layer(*x, self.is_causal)
                    output.backward(torch.ones_like(output))
                optimizer.step()
            found.append({name: value.clone() for name, value in layer.state_dict().items()})
        names = [name for name in before if not name.endswith(LAST_BIAS)]
        same = sum(torch.equal(found[0][name], before[name]) for name in names)
        return {name: error(value, found[1][name]) for name, value in found[0].items()} | {"unchanged": float(same)}


TRIALS = {
    "blocks": Attention(False),
    "blocks, causal, ragged, padded samples": Attention(False, True, n=40, batch=2, padded=True),
    "blocks of grouped heads, ragged": Attention(False, False, n=40, key_heads=1),
    "blocks, long columns in pieces": Attention(False, True, n=80, most=3, apart=True),
    "tiles smaller than a block": Attention(False, False, n=200, size=64, most=1),
    "blocks in half precision": Attention(False, False, dtype=torch.float16),
    "tokens": Attention(True, True),
    "tokens of grouped heads, ragged, dropout": Attention(True, True, n=40, batch=2, key_heads=1, dropout_p=0.3),
    "tokens, padded samples, heads apart": Attention(True, False, n=40, batch=2, padded=True, apart=True),
    "tokens, tiles smaller than a block": Attention(True, True, n=136, size=64, key_heads=1, padded=True, batch=2),
    "chunks of query heads, ragged": Chunks(IndexCall(True, True, 40, scope=2, counted=True), 80),
    "chunks of tokens, one list, dropout": Chunks(IndexCall(True, True, 72, batch=1), 35, 0.3),
    "chunks of tokens of two samples": Chunks(IndexCall(True, False, 40, scope=4), 20),
    "chunks of packed tokens": Chunks(IndexCall(True, True, 60, batch=1, scope=2, documents=4), 16),
    "chunks of query heads in half precision": Chunks(IndexCall(True, True, 40, scope=2), 80, dtype=torch.float16),
    "tokens in half precision": Attention(True, True, n=40, dtype=torch.float16, most=1),
    "indices by blocks, causal": Indexed(IndexCall(False, True, 40, scope=2, counted=True)),
    "indices by blocks of two samples, padded": Indexed(IndexCall(False, False, 32, scope=4, padded=True)),
    "indices by tokens, causal, padded": Indexed(IndexCall(True, True, 40, scope=2, padded=True)),
    "indices by tokens": Indexed(IndexCall(True, False, 32, batch=1, scope=1, counted=True)),
    "a selection by blocks, repeated": Repeated(IndexCall(False, True, 40, scope=2, counted=True), 11),
    "a selection by tokens, repeated": Repeated(IndexCall(True, True, 40, scope=2), 4),
    "indices by blocks, traced": Indexed(IndexCall(False, False, 40, heads=2, scope=1), traced=True),
    "indices by tokens, causal, traced": Indexed(IndexCall(True, True, 40, batch=1, heads=2), traced=True),
    "packed indices by blocks": Indexed(IndexCall(False, False, 75, batch=1, scope=2, entries=5, documents=5)),
    "packed indices by blocks, one list": Indexed(IndexCall(False, True, 75, batch=1, scope=1, documents=3)),
    "packed indices by blocks, causal, padded, traced": Indexed(
        IndexCall(False, True, 80, batch=1, scope=4, entries=5, padded=True, seed=3, documents=4), traced=True
    ),
    "packed indices by tokens": Indexed(IndexCall(True, False, 60, batch=1, scope=2, entries=4, documents=4)),
    "packed indices by tokens, causal, tiles smaller than a block": Indexed(
        IndexCall(True, True, 100, 64, batch=1, heads=2, scope=1, entries=2, padded=True, seed=2, documents=3)
    ),
    "packed indices by tokens, causal, traced": Indexed(
        IndexCall(True, True, 40, batch=1, heads=2, entries=3, documents=3), traced=True
    ),
    "packed documents": PackedWindow(),
    "packed causal documents, traced": PackedWindow("causal", traced=True),
    "packed windows of grouped heads, dropout": PackedWindow("window:40", (-1, 0), dropout_p=0.3),
    "packed windows ahead in half precision": PackedWindow(
        "window:100,3 & full", key_heads=2, lengths=(300, 17), dtype=torch.float16
    ),
    "packed windows with capped and biased scores": PackedWindow("window:40", (-1, 0), changed_scores=True),
    "packed windows of wrong bounds": PackedWindow("window:50", wrong=(7, 200, -5, 2**31 - 1, 130, 20)),
    "a step, blocks": Step(False, 14, 24, 8),
    "a step, tokens": Step(True, 17, 15, 11),
    "a step, ragged blocks, one scorer": Step(False, 99, 199, 99, n=56, key_heads=1, share=True, batch=2),
    "a step, padded tokens": Step(True, 99, 199, 99, n=40, batch=2, padded=True),
    "a step, one list for heads with a key head": Step(True, 17, 15, 11, key_heads=1, group=2),
    "a step, blocks, one list for all heads": Step(False, 16, 24, 10, group=2),
    "a step, blocks, two of four heads of a key head": Step(
        False, 99, 299, 99, n=56, heads=4, key_heads=1, group=2, unit=1, local=1, sink=0
    ),
    "a step, padded causal blocks, lists of two key heads": Step(
        True, 99, 299, 99, 56, 4, 2, padded=True, heads=4, group=2, granularity="block", local=1, sink=0
    ),
    "a step, tokens both ways, one list for three heads": Step(
        False, 99, 299, 99, n=40, heads=3, key_heads=3, group=3, granularity="token", unit=2, local=1, sink=0
    ),
    "a step, tokens of single units, a list for each of four heads of two key heads": Step(
        True, 19, 16, 13, n=56, heads=4, batch=2, unit=1, few=True
    ),
    "a step, tokens of single units in pieces": Step(True, 999, 999, 999, unit=1, pieces=True),
    "a step, tokens of two units in pieces, two samples": Step(True, 999, 999, 999, unit=2, batch=2, pieces=True),
    "a step, padded tokens of four units in pieces": Step(True, 999, 999, 999, n=56, batch=2, padded=True, pieces=True),
    "three steps of Adam, blocks": OptimizerSteps(False, "Adam"),
    "three steps of SGD, tokens": OptimizerSteps(True, "SGD", options={"foreach": True}),
    "three steps of Adam, one list for all heads": OptimizerSteps(False, "Adam", config={"select": "all"}),
    "lists of whole blocks": Lists(512, 128, 1, False, 2),
    "lists of ragged blocks, causal": Lists(500, 128, 1, True, local=2),
    "lists of large blocks of two samples": Lists(768, 256, 2, True, few=False),
    "normal form of lists": NormalForm(10),
    "calls beside equal calls, blocks": Neighbours(False),
    "calls beside equal calls, tokens": Neighbours(True),
    "tokens turned round": Turned(70, 2),
    "many causal tokens turned round": Turned(500, 1, True, 8, 2),
    "tokens with long lists turned round in windows": Turned(333, 2, True, 70, window=16),
    "choice of blocks": Choice(False, batch=2, heads=2, n=100),
    "choice of blocks by sixteen rows each, absent rows": Choice(
        False, batch=2, heads=2, n=100, each=16, units=2, holes=True
    ),
    "choice of causal blocks by sixteen rows each": Choice(False, True, n=300, each=16, sink=0),
    "choice of causal tokens with noise": Choice(True, True, noise=True, n=300, sink=0, kept=0.3),
    "choice of tokens, noise, holes, both ways": Choice(
        True, holes=True, keep=True, heads=2, batch=2, n=100, noise=True, kept=0.9, local=2
    ),
    "choice of all by causal tokens, eight units, holes": Choice(
        True, True, n=150, units=8, holes=True, kept=1.0, sink=0
    ),
    "choice of tokens by many units, holes": Choice(True, n=100, units=32, holes=True, kept=0.8, sink=0),
    "choice of many causal tokens, rounded": Choice(True, True, n=560, units=2, sink=0, rounds=True, plain=True),
    "choice of blocks by coverage, noise, holes": Choice(
        False, True, n=120, coverage=0.7, noise=True, holes=True, keep=True, hidden=40, sink=0
    ),
    "choice of tokens by coverage, holes": Choice(True, coverage=0.8, holes=True, keep=True, most=3, local=2, sink=0),
    "choice without a match": Choice(False, rank=0, n=300),
    "choice of rounded blocks without hidden units": Choice(False, hidden=0, n=300, sink=0, rounds=True),
    "parameters by blocks": Learned(False),
    "parameters by tokens, too cold, one scorer": Learned(True, 1.5, share=True),
    "parameters by blocks with holes, few at a time": Learned(False, holes=True, tile=1),
    "parameters by blocks among equals": Learned(False, tied=True),
    "parameters by blocks of many units": Learned(False, holes=True, units=64),
    "parameters by tokens, blocks of many units": Learned(True, units=32, share=True),
    "parameters by tokens among equals, holes": Learned(True, tied=True, holes=True),
    "parameters by blocks in chunks, holes": Learned(False, holes=True, chunk=2),
    "parameters by tokens in chunks among equals": Learned(True, tied=True, chunk=4),
    "parameters by blocks in chunks among equals, holes": Learned(False, tied=True, holes=True, chunk=4),
    "choice among equals": Choice(False, tied=True, n=200, heads=2, kept=0.4),
    "choice of causal tokens among equals": Choice(True, True, tied=True, n=130, heads=2, sink=0),
    "choice of tokens by wild scores": Choice(True, True, n=170, heads=2, hidden=1, rank=20, sink=0, wild=True),
    "choice of most tokens by wild scores": Choice(
        True, True, n=170, heads=2, hidden=1, rank=20, sink=0, kept=0.9, wild=True
    ),
    "choice in registers, noise, rounded": Choice(
        True, True, noise=True, n=70, kept=0.9, in_registers=True, rounds=True
    ),
    "choice in registers, many causal tokens": Choice(True, True, n=560, sink=0, in_registers=True, plain=True),
    "choice in registers, holes, both ways": Choice(
        True, holes=True, keep=True, heads=2, batch=2, n=100, noise=True, kept=0.9, sink=0, in_registers=True
    ),
    "choice of causal tokens by projected rows, rounded": Choice(
        True, True, n=130, heads=2, sink=0, rounds=True, projected=True
    ),
    "choice of blocks by projected rows, holes": Choice(False, n=100, heads=2, holes=True, projected=True),
    "choice in registers by projected rows, noise": Choice(
        True, True, noise=True, n=70, batch=2, kept=0.9, in_registers=True, projected=True
    ),
    "choice in registers among equals": Choice(True, True, tied=True, n=200, heads=2, sink=0, in_registers=True),
    "choice in registers by wild scores": Choice(
        True, True, n=170, heads=2, hidden=1, rank=20, sink=0, kept=1.0, wild=True, in_registers=True
    ),
    "choice in registers of most by wild scores": Choice(
        True, True, n=170, heads=2, hidden=1, rank=20, sink=0, kept=0.9, wild=True, in_registers=True
    ),
}


def use_small_tiles() -> None:
    """Several tiles for problems of a size that can be interpreted."""
    triton_selection.MATCHED = 16
    triton_choice.RANKED = 128
    triton_choice.NARROWEST = 64


if __name__ == "__main__":
    start_interpreting()
    use_small_tiles()
    for trial in sys.argv[1:] or TRIALS:
        # Trials have other limits of chunks.
        attention._cached.clear()
        print(json.dumps({"trial": trial} | TRIALS[trial].errors()), flush=True)

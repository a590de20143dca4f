"""Plans made of dense segments, through the dense kernels that ship with torch, on strided views.

The samples of a dilated segment are rows at a constant distance, so a segment is dense attention on a view of the
inputs: nothing is copied to compute it. One call, a piece, takes all segments and heads whose rows lie at constant
distances from each other. Pieces are merged by their LSE; each backward call is given the merged output and LSE, which
makes its result a share of the exact joint gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..plan.plan import Plan
from . import triton_backend
from .registry import AttentionCall, Forward, Gradients, empty_rows
from .segments import Branch, branches_of

WIDEST = 128
MOST_PIECES = 64
"""Each piece is a launch that must fill the GPU by itself; a plan of more is better walked by one kernel."""
SIDES = ("query", "key", "value")

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One dense call. Row (outer, inner, i) is token begin + hop * segment + offset + offset_step * index + rate * i of
    head `head + head_step * index`, where outer counts segments and inner counts that index; the batch is counted by
    whichever of them has a nonzero `batch_outer` or `batch_inner`, in whole rounds of the other."""

    batch: int
    batches: int
    batch_outer: int
    batch_inner: int
    begin: int
    hop: int
    segments: int
    head: int
    head_step: int
    heads: int
    offset: int
    offset_step: int
    rate: int
    length: int
    causal: bool
    key_head: int
    key_head_step: int

    @property
    def outer(self) -> int:
        return self.segments * self.batches if self.batch_outer else self.segments

    @property
    def inner(self) -> int:
        return self.heads * self.batches if self.batch_inner else self.heads

    @property
    def rows(self) -> int:
        return self.outer * self.inner * self.length

    def strides(self, of: Strides, keys: bool) -> Strides:
        """Distances of outer, inner and row in a (B, H, N, ...) tensor with these strides."""
        step = (self.key_head_step if keys else self.head_step) * of[1] + self.offset_step * of[2]
        outer = of[0] if self.batch_outer and self.segments == 1 else self.hop * of[2]
        return outer, of[0] if self.batch_inner and self.heads == 1 else step, self.rate * of[2]

    def start(self, of: Strides, keys: bool) -> int:
        head = self.key_head if keys else self.head
        return self.batch * of[0] + head * of[1] + (self.begin + self.offset) * of[2]

    def place(self, tensor: Tensor, keys: bool) -> tuple[Strides, Strides, int]:
        """Size, strides and start of the piece's rows in a (B, H, N, D) tensor that `folds`."""
        of = tensor.stride()
        size = (self.outer, self.inner, self.length, tensor.shape[3])
        return size, (*self.strides(of, keys), 1), self.start(of, keys)

    def view(self, tensor: Tensor, keys: bool = False) -> Tensor:
        """The piece's rows of such a tensor."""
        size, strides, start = self.place(tensor, keys)
        return tensor.as_strided(size, strides, tensor.storage_offset() + start)

    def folds(self, of: Strides, keys: bool) -> bool:
        """Whether a tensor with these strides has its batches where the piece counts them."""
        outer, inner, _ = self.strides(of, keys)
        along_outer = not self.batch_outer or of[0] == self.segments * outer
        return along_outer and (not self.batch_inner or of[0] == self.heads * inner)

    def flat(self, lse: Tensor) -> Tensor:
        """The piece's rows of a (B, H, N) tensor with any strides, contiguous (outer, inner, L)."""
        of = lse.stride()
        size = (self.batches, self.segments, self.heads, self.length)
        step = self.head_step * of[1] + self.offset_step * of[2]
        stride = (of[0], self.hop * of[2], step, self.rate * of[2])
        rows = lse.as_strided(size, stride, lse.storage_offset() + self.start(of, False))
        rows = rows.transpose(0, 1) if self.batch_inner else rows
        return rows.reshape(self.outer, self.inner, self.length).contiguous()

    def unfolded_lse(self, rows: Tensor, size: tuple[int, ...]) -> Tensor:
        """The LSE (B, H, N), contiguous, from that of a piece that covers it."""
        if self.batch_inner:
            rows = rows.view(self.segments, self.batches, self.heads, self.length).permute(1, 2, 0, 3)
        else:
            rows = rows.view(self.batches, self.segments, self.heads, self.length).transpose(1, 2)
        return rows.reshape(size).contiguous()

    def covers(self, batch: int, heads: int, n: int) -> bool:
        """Whether every row of the sequence is a row of this piece."""
        whole = self.rate == 1 and self.begin == 0 and self.length == self.hop and self.segments * self.hop == n
        return whole and self.heads == heads and self.batches == batch


@dataclass(frozen=True, slots=True)
class Layout:
    """A plan's pieces for one shape and memory order of the inputs."""

    pieces: tuple[Piece, ...]
    """one that covers every row, where there is one, comes first"""
    places: tuple[tuple[tuple[Strides, Strides, int], ...], ...]
    """size, strides and start of each piece's views of query, key and value; kept, for a call takes microseconds"""
    dense: dict[str, tuple[Strides, ...]]
    """strides of each piece's own query, key and value rows: those torch gives a dense result of such a view"""
    in_place: dict[str, bool]
    """whether the first piece's dense result lies in memory as the joined tensor would"""
    table: Tensor
    """int64 [3 * pieces, columns]: the pieces as rows of the query, then of the key, then of the value"""

    def views(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A piece's rows of query, key and value."""
        return tuple(  # pyrefly: ignore[bad-return]
            tensor.as_strided(size, strides, tensor.storage_offset() + start)
            for tensor, (size, strides, start) in zip((query, key, value), self.places[index], strict=True)
        )


_layouts: WeakKeyDictionary[Plan, dict[tuple[object, ...], Layout]] = WeakKeyDictionary()


def why_not(call: AttentionCall) -> str | None:
    """Why the dense kernels cannot run the call, or None when they can."""
    query = call.query
    if not query.is_cuda:
        return f"needs a CUDA tensor, got {query.device.type}"
    if not triton_backend._installed():
        return "needs triton, which is not installed; CUDA builds of torch bring it"
    if engine(query.device) is None:
        return "needs an NVIDIA GPU of compute capability 8.0 or later and torch's cuDNN or flash attention"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    if call.key_padding_mask is not None:
        return "has no key padding; use backend='triton'"
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    if not call.scale > 0:
        return f"scale must be > 0, got {call.scale}"
    d, e = query.shape[3], call.value.shape[3]
    if d != e or d % 8 or d > WIDEST:
        return f"head widths must be equal, a multiple of 8 and <= {WIDEST}, got {d} and {e}"
    for name in SIDES:
        tensor: Tensor = getattr(call, name)
        if tensor.data_ptr() % 16 or any(stride % 8 for stride in tensor.stride()[:3]):
            return f"rows of the {name} must begin at multiples of 16 bytes, got strides {tensor.stride()}"
    if call.plan.device != query.device:
        return f"the plan must be on {query.device}, got {call.plan.device}"
    if branches_of(call.plan) is None:
        return f"every part of the plan must be segments met whole or causally, got {call.plan.name}"
    pieces = len(layout_of(call).pieces)
    if pieces > MOST_PIECES:
        return f"the plan must fall into <= {MOST_PIECES} dense calls, got {pieces}"
    return None


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    from .triton_pieces import merge

    layout = layout_of(call)
    output = lse = None
    if not layout.in_place["query"]:
        output = empty_rows(call.query, call.value.shape[3]).zero_()
        lse = torch.full(call.query.shape[:3], float("-inf"), dtype=torch.float32, device=call.device)
    for index, (piece, strides) in enumerate(zip(layout.pieces, layout.dense["query"], strict=True)):
        rows, rows_lse = attend(*layout.views(index, call.query, call.key, call.value), piece.causal, call.scale)
        rows = _laid_out(rows, strides)
        if output is None or lse is None:
            output, lse = _unfolded(rows, call.query), piece.unfolded_lse(rows_lse, call.query.shape[:3])
        else:
            merge(output, lse, rows, rows_lse, layout.table, index)
    assert output is not None and lse is not None
    return Forward(output, lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value, from those of the output and, where given, of the LSE."""
    if grad_lse is not None:
        # The dense kernels derive their row constant from the output and its gradient alone.
        return triton_backend.backward(call, output, lse, grad_output, grad_lse)
    from .triton_pieces import add, gather

    if grad_output.data_ptr() % 16 or any(stride % 8 for stride in grad_output.stride()[:3]):
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
    layout = layout_of(call)
    sides = call.query, call.key, call.value
    totals = None
    if not all(layout.in_place.values()):
        totals = [empty_rows(tensor, tensor.shape[3]).zero_() for tensor in sides]
    for index, (piece, strides) in enumerate(zip(layout.pieces, layout.dense["query"], strict=True)):
        if all(_dense_as_it_lies(piece, t.stride(), strides) for t in (output, grad_output)):
            own = piece.view(output), piece.view(grad_output), piece.flat(lse)
        else:
            size = (piece.outer, piece.inner, piece.length)
            own = gather(output, grad_output, lse, layout.table, index, size, strides)
        grads = attend_backward(*layout.views(index, *sides), *own, piece.causal, call.scale)
        grads = [_laid_out(grad, layout.dense[name][index]) for name, grad in zip(SIDES, grads, strict=True)]
        if totals is None:
            totals = [_unfolded(grad, tensor) for grad, tensor in zip(grads, sides, strict=True)]
        else:
            add(totals, grads, layout.table, index)
    assert totals is not None
    return Gradients(*totals)


def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Dense attention on (outer, inner, L, D) views: output of that shape, and LSE (outer, inner, L)."""
    if query.shape[2] == 1:
        # cuDNN refuses a single row.
        return value.clone(), scale * (query.float() * key.float()).sum(-1)
    if engine(query.device) == "cudnn":
        output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False, scale=scale
        )
        return output, lse.squeeze(-1)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)[:2]


def attend_backward(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, grad: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attend`, where output and LSE may be those of a softmax over more keys than these.

    Output and its gradient must have the strides torch gives a dense result of the query's view, and the LSE must be
    contiguous: torch keeps compiled cuDNN graphs by the inputs' strides and trusts that these follow.
    """
    length = query.shape[2]
    if length == 1:
        q, k, v, o, g = (t.float() for t in (query, key, value, output, grad))
        weight = torch.exp(scale * (q * k).sum(-1) - lse)[..., None]
        slope = scale * weight * (g * (v - o)).sum(-1, keepdim=True)
        return tuple(t.to(query.dtype) for t in (slope * k, slope * q, weight * g))  # pyrefly: ignore[bad-return]
    seed = _unused_seed(query.device)
    if engine(query.device) == "cudnn":
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, query, key, value, output, lse.unsqueeze(-1), seed, seed, None, None, None, length, length, 0.0,
            causal, scale=scale,
        )  # fmt: skip
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, output, lse, None, None, length, length, 0.0, causal, seed, seed, scale=scale
    )


def engine(device: torch.device) -> str | None:
    """The dense kernel this device runs: "cudnn", "flash" or none."""
    major = _capability(device)
    if major >= 9 and torch.backends.cudnn.is_available() and torch.backends.cuda.cudnn_sdp_enabled():
        return "cudnn"
    return "flash" if major >= 8 and torch.backends.cuda.is_flash_attention_available() else None


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> int:
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


@lru_cache(maxsize=64)
def _unused_seed(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.uint64, device=device)


def layout_of(call: AttentionCall) -> Layout:
    """The pieces of a call, kept with its plan."""
    known = _layouts.setdefault(call.plan, {})
    strides = (getattr(call, name).stride() for name in SIDES)
    key = (call.query.shape[0], call.key.shape[1], call.query.shape[3], *strides)
    layout = known.get(key)
    if layout is None:
        branches = branches_of(call.plan)
        assert branches is not None
        ways = [tuple(_pieces(branches, call, one_residue)) for one_residue in (False, True)]
        layout = known[key] = _laid(min(ways, key=len), call)
    return layout


def _laid(pieces: tuple[Piece, ...], call: AttentionCall) -> Layout:
    batch, heads, n, _ = call.query.shape
    pieces = tuple(sorted(pieces, key=lambda piece: not piece.covers(batch, heads, n)))
    dense, in_place, entries = {}, {}, []
    for name in SIDES:
        tensor: Tensor = getattr(call, name)
        keys = name != "query"
        dense[name] = tuple(_dense_strides(piece, tensor, keys) for piece in pieces)
        whole = bool(pieces) and tensor.shape[1] == heads and pieces[0].covers(batch, heads, n)
        in_place[name] = whole and _dense_as_it_lies(pieces[0], _rows_strides(tensor), dense[name][0])
        for piece, strides in zip(pieces, dense[name], strict=True):
            head, step = (piece.key_head, piece.key_head_step) if keys else (piece.head, piece.head_step)
            # Query heads that share a key head and a residue have the same key rows, whose gradients add up.
            members = piece.heads if step == 0 and piece.offset_step == 0 else 1
            numbers = astuple(replace(piece, head=head, head_step=step))[:14]
            entries.append((*numbers, *strides[:3], members))
    table = torch.tensor(entries, dtype=torch.int64, device=call.device)
    places = tuple(tuple(piece.place(getattr(call, name), name != "query") for name in SIDES) for piece in pieces)
    return Layout(pieces, places, dense, in_place, table)


def _dense_strides(piece: Piece, tensor: Tensor, keys: bool) -> Strides:
    size = (piece.outer, piece.inner, piece.length, tensor.shape[3])
    view = torch.empty_strided(size, (*piece.strides(tensor.stride(), keys), 1), device="meta")
    return torch.empty_like(view).stride()


def _pieces(branches: tuple[Branch, ...], call: AttentionCall, one_residue: bool) -> Iterator[Piece]:
    batch, group = call.query.shape[0], call.query.shape[1] // call.key.shape[1]
    for branch in branches:
        for begin, hop, segments, extent in branch.runs:
            alike: dict[tuple[int, bool], list[tuple[int, int]]] = {}
            for head, offset, causal in branch.heads:
                alike.setdefault((-(-(extent - offset) // branch.rate), causal), []).append((head, offset))
            for (length, causal), heads in alike.items():
                if length <= 0:
                    continue
                for head, step, count, offset, offset_step, key_step in _progressions(heads, group, one_residue):
                    place = begin, hop, segments, head, step, count, offset, offset_step, branch.rate, length, causal
                    alone = Piece(0, 1, 0, 0, *place, head // group, key_step)
                    yield from _over_batches(alone, batch, call)


def _progressions(heads: list[tuple[int, int]], group: int, one_residue: bool) -> Iterator[tuple[int, ...]]:
    """Heads at equal steps, so their residues and key heads: head, step, count, residue, its step, key head's step."""
    left = list(heads)
    while left:
        head, offset = left[0]
        best, step = [left[0]], (1, 0, 0)
        for other, other_offset in left[1:]:
            by, offset_by, key_by = other - head, other_offset - offset, other // group - head // group
            # A view cannot step backwards.
            if offset_by < 0 or (one_residue and offset_by):
                continue
            chain, members = [left[0]], set(left)
            while (following := (chain[-1][0] + by, chain[-1][1] + offset_by)) in members:
                if following[0] // group - chain[-1][0] // group != key_by:
                    break
                chain.append(following)
            if len(chain) > len(best):
                best, step = chain, (by, offset_by, key_by)
        left = [one for one in left if one not in best]
        yield head, step[0], len(best), offset, step[1], step[2]


def _over_batches(piece: Piece, batch: int, call: AttentionCall) -> Iterator[Piece]:
    """The piece for the whole batch, counted with the segments or the heads where memory lies so; else one each."""
    place = astuple(piece)[4:]
    if batch == 1:
        yield piece
        return
    sides = (call.query, False), (call.key, True), (call.value, True)
    for folded in (Piece(0, batch, piece.segments, 0, *place), Piece(0, batch, 0, piece.heads, *place)):
        if all(folded.folds(tensor.stride(), keys) for tensor, keys in sides):
            yield folded
            return
    yield from (Piece(index, 1, 0, 0, *place) for index in range(batch))


def _rows_strides(like: Tensor) -> Strides:
    return empty_rows(torch.empty_strided(like.size(), like.stride(), device="meta"), like.shape[3]).stride()


def _unfolded(rows: Tensor, like: Tensor) -> Tensor:
    return rows.as_strided(like.size(), _rows_strides(like))


def _laid_out(rows: Tensor, strides: Strides) -> Tensor:
    """The same rows in this memory order; nothing to do where the kernel chose it itself."""
    if all(a == b or edge == 1 for a, b, edge in zip(rows.stride(), strides, rows.shape, strict=True)):
        return rows
    return torch.empty_strided(rows.size(), strides, dtype=rows.dtype, device=rows.device).copy_(rows)


def _dense_as_it_lies(piece: Piece, of: Strides, strides: Strides) -> bool:
    """Whether the piece's view of a (B, H, N, D) tensor with strides `of` already has these."""
    size = (piece.outer, piece.inner, piece.length)
    alike = (a == b or edge == 1 for a, b, edge in zip(piece.strides(of, False), strides, size, strict=False))
    return piece.folds(of, False) and all(alike)

"""Index tensors of `selected_attention`: checks, and their normal form on the device, a `Selection`.

Shapes: b batch, s 1, key heads or query heads, r rows (n tokens or t query blocks), k entries of a row, t key blocks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops.attention import is_observed
from ..ops.checks import check_bounds, validate_cu_seqlens
from ..ops.operators import join_batch
from ..plan.documents import row_bounds
from . import backend as implementations
from .types import Selection, shared_blocks, with_memo

GRANULARITIES = (16, 32, 64, 128, 256)
"""Tokens of a key block."""
INTEGERS = (torch.int32, torch.int64)
ROWS_PER_ENTRY = 64
"""Rows for each entry of a row from which a sorting network is faster than `torch.sort` on the CPU."""
NORMALISED = 2**24
"""Entries that are sorted at a time: each takes about 30 bytes."""
LONGEST_COMPARED = 128
"""Entries of a row up to which a kernel makes the normal form: it compares all pairs of them."""

_library = torch.library.Library("dilated_attention", "FRAGMENT")
_library.define(
    "normal_lists(Tensor indices, Tensor? counts, Tensor? cu_seqlens, SymInt n, int granularity, bool is_causal, "
    "int local_blocks, int sink_blocks) -> (Tensor, Tensor, Tensor)"
)


def validate_indices(indices: Tensor, blocks: int, counts: Tensor | None = None) -> None:
    """Raise unless every entry of an index tensor is -1 or the number of one of `blocks` key blocks.

    Reads values back to the host: a check for debugging on a GPU, where `selected_attention` ignores wrong entries. On
    the CPU `selected_attention` calls it itself.

    Args:
        indices: int32 or int64 (..., rows, K).
        blocks: key blocks of the sequence: ceil(N / granularity).
        counts: int (..., rows), valid entries of each row, 0 to K; entries past the count may hold any value.

    >>> import torch
    >>> from dilated_attention_pytorch import validate_indices
    >>> validate_indices(torch.tensor([[0, 2, -1]], dtype=torch.int32), blocks=3)
    """
    _check_integers("indices", indices)
    wrong = (indices < -1) | (indices >= blocks)
    if counts is not None:
        _check_integers("counts", counts)
        if counts.shape != indices.shape[:-1]:
            what = f"counts must have shape {tuple(indices.shape[:-1])}, that of indices without the last dimension"
            raise must(what, tuple(counts.shape))
        outside = (counts < 0) | (counts > indices.shape[-1])
        if outside.any():
            at = tuple(outside.nonzero()[0].tolist())
            raise must(f"counts must lie in 0 to {indices.shape[-1]}", f"{int(counts[at])} at {list(at)}")
        wrong &= _within(counts, indices.shape[-1])
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        what = f"indices must be block numbers in 0 to {blocks - 1}, or -1 for no block"
        raise must(what, f"{int(indices[at])} at {list(at)}", "A block number is a token number // granularity.")


def check_indices(indices: Tensor, counts: Tensor | None, n: int, granularity: int) -> None:
    """Check types and shapes of index tensors for n tokens; values are not read."""
    if granularity not in GRANULARITIES:
        raise must(f"granularity must be one of {', '.join(map(str, GRANULARITIES))}", granularity)
    _check_integers("indices", indices)
    if indices.dim() != 4:
        advice = "A row is a query token, or a block of granularity query tokens."
        raise must("indices must have shape (batch, heads, rows, entries)", tuple(indices.shape), advice)
    rows, blocks = indices.shape[2], -(-n // granularity)
    if rows != n and rows != blocks:
        what = (
            f"indices must have {n} rows, one for each token, or {blocks}, one for each block of {granularity} tokens"
        )
        raise must(what, f"{rows} rows")
    if counts is not None:
        _check_integers("counts", counts)
        if counts.shape != indices.shape[:3]:
            raise must(f"counts must have shape {tuple(indices.shape[:3])}", tuple(counts.shape))
        if counts.device != indices.device:
            raise must(f"counts must be on the device of the indices {indices.device}", counts.device)


def _check_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise must_be(f"{name} must be a Tensor", type(tensor).__name__)
    if tensor.dtype not in INTEGERS:
        raise must_be(f"{name} must be int32 or int64", tensor.dtype)


def _within(counts: Tensor, entries: int) -> Tensor:
    """Whether entries of rows come before the count of their row, bool (..., r, k)."""
    return torch.arange(entries, device=counts.device) < counts[..., None]


def normalise_indices(
    indices: Tensor,
    counts: Tensor | None,
    blocks: int,
    last: Tensor | None = None,
    first: Tensor | int = 0,
    *,
    host_sync: bool = False,
) -> Tensor:
    """Sorted lists without duplicates, int32 (b, s, r, min(max(k, 1), blocks)): unused entries are `blocks`, the last.

    Values outside 0 to `blocks` - 1 are dropped, as are blocks after `last` (r), which are below `blocks`, and
    before `first` (r, or one for all rows), which are not negative. Nothing is read back, unless `host_sync` allows it:
    then rows are sorted and compacted only where their values require it.
    """
    if indices.numel() > NORMALISED and indices.shape[-2] > 1:
        made = indices.new_empty((*indices.shape[:-1], min(max(indices.shape[-1], 1), blocks)), dtype=torch.int32)
        step = max(1, NORMALISED * indices.shape[-2] // indices.numel())
        for begin in range(0, indices.shape[-2], step):
            rows = slice(begin, begin + step)
            given = indices[..., rows, :], None if counts is None else counts[..., rows], blocks
            limits = None if last is None else last[rows], first[rows] if isinstance(first, Tensor) else first
            made[..., rows, :] = normalise_indices(*given, *limits, host_sync=host_sync)
        return made
    listed = indices.clamp(max=blocks) if last is None else indices.masked_fill(indices > last[:, None], blocks)
    if isinstance(first, Tensor):
        listed = listed.masked_fill(listed < first[:, None], blocks)
    else:
        listed = torch.threshold(listed, first - 1, blocks)
    if counts is not None:
        listed = listed.masked_fill(~_within(counts, indices.shape[-1]), blocks)
    listed = listed.int()
    if not listed.shape[-1]:
        return listed.new_full((*listed.shape[:-1], 1), blocks)
    if host_sync:
        listed = listed if _is_normal(listed, blocks) else _compacted(_sorted_by_network(listed), blocks)
    elif listed.shape[-1] > 1:
        listed = listed.sort(dim=-1).values
        # A second sort takes fewer launches than a prefix sum and a scatter.
        listed[..., 1:].masked_fill_(listed[..., 1:] == listed[..., :-1], blocks)
        listed = listed.sort(dim=-1).values
    return listed[..., :blocks].contiguous()


def _compacted(listed: Tensor, blocks: int) -> Tensor:
    """Sorted lists without their duplicates, on the CPU."""
    if _is_normal(listed, blocks):
        return listed
    fresh = torch.zeros_like(listed, dtype=torch.bool)
    torch.ne(listed[..., 1:], listed[..., :-1], out=fresh[..., 1:])
    # A duplicate is written to the place of the entry that it repeats.
    return torch.full_like(listed, blocks).scatter_(-1, fresh.cumsum(-1), listed)


def _sorted_by_network(x: Tensor) -> Tensor:
    """Sorted rows (..., k) on the CPU, by Batcher's odd-even merge network if rows are many.

    The network takes minima and maxima of whole columns; `torch.sort` sorts row by row, with positions.
    """
    k, rows = x.shape[-1], x.shape[:-1].numel()
    if rows < ROWS_PER_ENTRY * k:
        return x.sort(dim=-1).values
    columns = list(x.flatten(0, -2).t().contiguous().unbind())
    merged = 1
    while merged < k:
        step = merged
        while step:
            for first in range(step % merged, k - step, 2 * step):
                for low in range(first, min(first + step, k - step)):
                    if low // (2 * merged) == (low + step) // (2 * merged):
                        a, b = columns[low], columns[low + step]
                        columns[low], columns[low + step] = torch.minimum(a, b), torch.maximum(a, b)
            step //= 2
        merged *= 2
    return torch.stack(columns, -1).view(x.shape)


def _is_normal(listed: Tensor, blocks: int) -> bool:
    """Whether all lists ascend without duplicates, apart from unused entries at their end."""
    return not bool(((listed[..., 1:] <= listed[..., :-1]) & (listed[..., 1:] < blocks)).any())


def make_selection(
    indices: Tensor,
    counts: Tensor | None = None,
    *,
    n: int,
    heads: int,
    granularity: int = 128,
    is_causal: bool = False,
    local_blocks: int = 0,
    sink_blocks: int = 0,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Normal form of index tensors: sorted lists without duplicates, made once for any number of calls.

    Runs on the device and reads nothing back from a GPU. On the CPU wrong values raise an error; on a GPU they are
    ignored.

    Args:
        indices: int32 or int64 (B, S, rows, K), as for `selected_attention`; S divides `heads`.
        counts: int (B, S, rows), as for `selected_attention`.
        n: tokens of the sequence.
        heads: query heads.
        granularity: tokens of a block: 16, 32, 64, 128 or 256.
        is_causal: drop keys after the query.
        local_blocks: blocks nearer than this to the row's own need not be listed: 1 for the own block, 2 for its
            neighbours too; 0 for none.
        sink_blocks: first blocks that need not be listed; requires `local_blocks`.
        cu_seqlens: bounds of packed documents, as for `selected_attention`, which exclude `local_blocks`.

    >>> import torch
    >>> from dilated_attention_pytorch import make_selection, selected_attention
    >>> q, k, v = torch.randn(3, 1, 8, 512, 64).unbind()
    >>> indices = torch.randint(-1, 8, (1, 1, 512, 3))
    >>> selection = make_selection(indices, n=512, heads=8, granularity=64, is_causal=True, local_blocks=1)
    >>> selected_attention(q, k, v, selection).shape
    torch.Size([1, 8, 512, 64])
    """
    check_indices(indices, counts, n, granularity)
    if heads < 1 or indices.shape[1] < 1 or heads % indices.shape[1]:
        raise must(f"the heads of indices must divide the {heads} query heads", f"{indices.shape[1]} heads")
    if local_blocks < 0 or sink_blocks < 0:
        raise must("local_blocks and sink_blocks must be >= 0", f"{local_blocks} and {sink_blocks}")
    if sink_blocks and not local_blocks:
        raise must("sink_blocks must come with local_blocks >= 1", local_blocks, "List the first blocks instead.")
    if cu_seqlens is not None:
        check_bounds(cu_seqlens)
        if len(indices) != 1:
            raise must("packed sequences must have batch size 1", len(indices))
        if local_blocks:
            raise must("local_blocks must be 0 for packed sequences", local_blocks, "List the blocks instead.")
    selection = normal_form(
        indices, counts, cu_seqlens, heads, n, granularity, is_causal, local_blocks, sink_blocks, is_counted=True
    )
    return selection if is_observed(indices) else with_memo(selection)


def normal_form(
    indices: Tensor,
    counts: Tensor | None,
    cu_seqlens: Tensor | None,
    heads: int,
    n: int,
    granularity: int,
    is_causal: bool,
    local_blocks: int = 0,
    sink_blocks: int = 0,
    *,
    is_counted: bool = False,
) -> Selection:
    """`make_selection` of arguments that have been checked; attention does not need the counts of the result."""
    settings = cu_seqlens, n, granularity, is_causal, local_blocks, sink_blocks
    bounds = None if cu_seqlens is None else row_bounds(cu_seqlens, n, is_causal)
    if is_observed(indices):
        listed, many, own = torch.ops.dilated_attention.normal_lists(indices, counts, *settings)
    else:
        listed, many, own = _lists(indices, counts, *settings, is_counted, bounds)
    per_token, group = _is_per_token(indices, n, granularity), heads // indices.shape[1]
    if bounds is not None:
        return Selection(listed, many, n, granularity, False, per_token, 0, 0, None, bounds, group)
    splits = _splits_own(per_token, is_causal, local_blocks)
    near, sharing = ((1, 0), own) if splits else ((local_blocks, sink_blocks), None)
    return Selection(listed, many, n, granularity, is_causal, per_token, *near, sharing, None, group)


def _is_per_token(indices: Tensor, n: int, granularity: int) -> bool:
    return indices.shape[2] != -(-n // granularity)


def _splits_own(per_token: bool, is_causal: bool, local_blocks: int) -> bool:
    """Whether the own block is taken out of the lists: it has the triangle of the causal mask, and gathered queries
    read whole blocks."""
    return per_token and is_causal and not local_blocks


@torch.library.impl(_library, "normal_lists", "CompositeExplicitAutograd")
def _normal_lists(
    indices: Tensor,
    counts: Tensor | None,
    cu_seqlens: Tensor | None,
    n: int,
    granularity: int,
    is_causal: bool,
    local_blocks: int,
    sink_blocks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """`Selection.indices`, `counts` and, where the own block is split off, `sharing_rows`."""
    near = local_blocks, sink_blocks
    listed, many, sharing = _lists(indices, counts, cu_seqlens, n, granularity, is_causal, *near, True)
    return listed, many, indices.new_empty(0, dtype=torch.bool) if sharing is None else sharing


def _lists(
    indices: Tensor,
    counts: Tensor | None,
    cu_seqlens: Tensor | None,
    n: int,
    granularity: int,
    is_causal: bool,
    local_blocks: int,
    sink_blocks: int,
    is_counted: bool,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`Selection.indices`, `counts` if they are needed, and where the own block is split off, `sharing_rows`.

    `bounds` are the `row_bounds` of `cu_seqlens`, if known.
    """
    rows, blocks, per_token = indices.shape[2], -(-n // granularity), _is_per_token(indices, n, granularity)
    splits = cu_seqlens is None and _splits_own(per_token, is_causal, local_blocks)
    by_row, near = granularity if per_token else 1, 1 if splits else local_blocks
    host_sync = implementations.allows_host_sync(indices.device)
    if not host_sync and cu_seqlens is None and _fits_kernel(indices):
        from .kernels.normal_lists import normal_lists

        return normal_lists(indices, counts, blocks, by_row, sink_blocks, near, is_causal, splits, is_counted)
    if host_sync:
        validate_indices(indices, blocks, counts)
        if cu_seqlens is not None:
            validate_cu_seqlens(cu_seqlens, n)
    sharing, last = None, None
    first: Tensor | int = sink_blocks
    if cu_seqlens is not None:
        bounds = row_bounds(cu_seqlens, n, is_causal) if bounds is None else bounds
        first, last = bounds[:, 0], bounds[:, 1] - 1
        if not per_token:
            ends = (torch.arange(1, blocks + 1, device=indices.device) * granularity).clamp(max=n) - 1
            first, last = first[::granularity], last[ends]
        first, last = first // granularity, last // granularity
    elif is_causal or local_blocks:
        own = torch.arange(rows, dtype=indices.dtype, device=indices.device) // by_row
        last = own - near if is_causal else None
        if splits:
            mine = indices == own[:, None]
            sharing = (mine if counts is None else mine & _within(counts, indices.shape[-1])).any(-1)
        elif not is_causal:
            indices = indices.masked_fill((indices - own[:, None]).abs() < local_blocks, -1)
    listed = normalise_indices(indices, counts, blocks, last, first, host_sync=host_sync)
    many = (listed < blocks).sum(-1, dtype=torch.int32) if is_counted else listed.new_empty(0)
    return listed, many, sharing


def _fits_kernel(indices: Tensor) -> bool:
    """Whether a kernel can make the normal form: lists are short, and numbered in 32 bits."""
    is_short = 0 < indices.shape[3] <= LONGEST_COMPARED and 0 < indices.numel() < 2**31
    return is_short and implementations.runs_kernels(indices.device)


@torch.library.register_fake("dilated_attention::normal_lists", lib=_library)
def _normal_lists_fake(
    indices: Tensor, counts: Tensor | None, cu_seqlens: Tensor | None, *settings: Any
) -> tuple[Tensor, Tensor, Tensor]:
    n, granularity, is_causal, local_blocks, _ = settings
    lead, entries = indices.shape[:3], indices.shape[3]
    splits = cu_seqlens is None and _splits_own(_is_per_token(indices, n, granularity), is_causal, local_blocks)
    width = min(entries, -(-n // granularity)) if entries else 1
    listed, many = indices.new_empty((*lead, width), dtype=torch.int32), indices.new_empty(lead, dtype=torch.int32)
    return listed, many, indices.new_empty(lead if splits else 0, dtype=torch.bool)


def _normal_lists_vmap(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[int, int, int | None]]:
    """A mapped dimension joins the batch."""
    check_unpacked(arguments[2])
    tensors = [join_batch(arguments[i], in_dims[i], info.batch_size) for i in range(2)]
    results = torch.ops.dilated_attention.normal_lists(*tensors, *arguments[2:])
    listed, counts = (x.unflatten(0, (info.batch_size, -1)) for x in results[:2])
    splits = results[2].dim() > 1
    sharing = results[2].unflatten(0, (info.batch_size, -1)) if splits else results[2]
    return (listed, counts, sharing), (0, 0, 0 if splits else None)


torch.library.register_vmap("dilated_attention::normal_lists", _normal_lists_vmap, lib=_library)


def check_unpacked(packed: Tensor | None) -> None:
    """Refuse bounds of packed sequences under `vmap`."""
    if packed is not None:
        what, advice = "vmap must not map packed sequences", "Call selected_attention once for each packed batch."
        raise must(what, "cu_seqlens", advice)


def listed_pairs(selection: Selection, host_sync: bool) -> int:
    """Pairs of a query and a key in the blocks that rows see, over all samples and query heads.

    Masked pairs of the own block count, as in `ops.flops.kept_pairs`. Without `host_sync` values are not read: an upper
    bound from shapes, as if every entry were another block that the row may see. Bounds of packed documents are left
    out: a listed block counts whole.
    """
    s = selection
    (batch, _, rows, entries), size = s.indices.shape, s.block_size
    own = torch.arange(rows, device="cpu") // (size if s.per_token else 1)
    tokens = (s.n - size * torch.arange(s.blocks + 1, device="cpu")).clamp(0, size)
    shared = shared_blocks(torch.arange(s.blocks, device="cpu"), s.blocks, s.local_blocks, s.sink_blocks, s.is_causal)
    implied = (shared * tokens[:-1]).sum(1)[own]
    many = batch * s.heads
    if host_sync:
        listed = tokens[s.indices.long()].sum((0, 1, 3)) * s.group
        sharing = many if s.sharing_rows is None else s.sharing_rows.sum((0, 1)) * s.group
        keys = listed + implied * sharing
    else:
        visible = tokens.cumsum(0)[own if s.is_causal else torch.full_like(own, -1)]
        room = entries * size + (implied if s.sharing_rows is None else 0)
        keys = many * torch.minimum(visible, room + torch.zeros_like(visible))
    queries = 1 if s.per_token else tokens[:-1]
    return int((keys * queries).sum())

"""Index tensors of `selected_attention`: checks, and their normal form on the device.

Shapes: b batch, s 1, key heads or query heads, r rows (n tokens or t query blocks), k entries of a row, t key blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import must, must_be
from ..plan.documents import row_bounds
from .types import Selection

GRANULARITIES = (16, 32, 64, 128, 256)
"""Tokens of a key block."""
INTEGERS = (torch.int32, torch.int64)


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


def check_indices(query: Tensor, key: Tensor, indices: Tensor, counts: Tensor | None, granularity: int) -> None:
    """Check types, shapes and devices of the index tensors of a call; values are not read."""
    if granularity not in GRANULARITIES:
        raise must(f"granularity must be one of {', '.join(map(str, GRANULARITIES))}", granularity)
    (batch, heads, n, _), groups = query.shape, key.shape[1]
    blocks = -(-n // granularity)
    for name, tensor in (("indices", indices), ("counts", counts)):
        if tensor is not None:
            _check_integers(name, tensor)
            if tensor.device != query.device:
                raise must(f"{name} must be on the query's device {query.device}", tensor.device)
    if indices.dim() != 4:
        advice = "A row is a query token, or a block of granularity query tokens."
        raise must("indices must have shape (batch, heads, rows, entries)", tuple(indices.shape), advice)
    if indices.shape[0] != batch:
        raise must(f"indices must have the query's batch size {batch}", indices.shape[0])
    scope, rows = indices.shape[1:3]
    # Not by membership, which compares the symbols of a compiler and not their values.
    if scope != 1 and scope != groups and scope != heads:
        what = f"indices must be for 1 head, the {groups} key heads or the {heads} query heads"
        raise must(what, f"{scope} heads")
    if rows != n and rows != blocks:
        what = (
            f"indices must have {n} rows, one for each token, or {blocks}, one for each block of {granularity} tokens"
        )
        raise must(what, f"{rows} rows")
    if counts is not None and counts.shape != indices.shape[:3]:
        raise must(f"counts must have shape {tuple(indices.shape[:3])}", tuple(counts.shape))


def _check_integers(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor):
        raise must_be(f"{name} must be a Tensor", type(tensor).__name__)
    if tensor.dtype not in INTEGERS:
        raise must_be(f"{name} must be int32 or int64", tensor.dtype)


def _within(counts: Tensor, entries: int) -> Tensor:
    """Whether entries of rows come before the count of their row, bool (..., r, k)."""
    return torch.arange(entries, device=counts.device) < counts[..., None]


def normalise_indices(
    indices: Tensor, counts: Tensor | None, blocks: int, last: Tensor | None = None, first: Tensor | None = None
) -> Tensor:
    """Sorted lists without duplicates, int32 (b, s, r, max(k, 1)): unused entries are `blocks` and come last.

    Values outside 0 to `blocks` - 1 are dropped, as are blocks after `last` (r), which are below `blocks`, and
    before `first` (r), which are not negative. All operations run on the device, and nothing is read back.
    """
    not_early = indices >= (0 if first is None else first[:, None])
    valid = not_early & (indices < blocks if last is None else indices <= last[:, None])
    if counts is not None:
        valid &= _within(counts, indices.shape[-1])
    listed = torch.where(valid, indices, blocks).int()
    if not listed.shape[-1]:
        return listed.new_full((*listed.shape[:-1], 1), blocks)
    listed = listed.sort(dim=-1).values
    again = listed[..., 1:] == listed[..., :-1]
    listed[..., 1:].masked_fill_(again, blocks)
    return listed.sort(dim=-1).values


def selection_of(
    indices: Tensor,
    counts: Tensor | None,
    n: int,
    heads: int,
    granularity: int,
    is_causal: bool,
    cu_seqlens: Tensor | None = None,
) -> Selection:
    """Selection of the listed blocks and no others, for `heads` query heads."""
    blocks, rows, group = -(-n // granularity), indices.shape[2], heads // indices.shape[1]
    per_token = rows != blocks
    if cu_seqlens is not None:
        bounds = row_bounds(cu_seqlens, n, is_causal)
        first, last = bounds[:, 0], bounds[:, 1] - 1
        if not per_token:
            ends = (torch.arange(1, blocks + 1, device=indices.device) * granularity).clamp(max=n) - 1
            first, last = first[::granularity], last[ends]
        edges = last // granularity, first // granularity
        listed = normalise_indices(indices, counts, blocks, *edges)
        counts = (listed < blocks).sum(-1, dtype=torch.int32)
        return Selection(listed, counts, n, granularity, False, per_token, 0, 0, None, bounds, group)
    own = torch.arange(rows, device=indices.device)
    own = own // granularity if per_token else own
    listed = normalise_indices(indices, counts, blocks, own if is_causal else None)
    shape = n, granularity, is_causal, per_token
    if not (per_token and is_causal):
        return Selection(listed, (listed < blocks).sum(-1, dtype=torch.int32), *shape, 0, 0, group=group)
    # The own block has the triangle of the causal mask; gathered queries read whole blocks. It is the last of a list.
    mine = listed == own[:, None]
    listed = listed.masked_fill(mine, blocks)
    counts = (listed < blocks).sum(-1, dtype=torch.int32)
    return Selection(listed, counts, *shape, 1, 0, mine.any(-1), group=group)


def listed_pairs(
    indices: Tensor, counts: Tensor | None, n: int, heads: int, granularity: int, is_causal: bool, host_sync: bool
) -> int:
    """Pairs of a query and a key in the blocks that rows list, over all samples and query heads.

    Masked pairs of the own block count, as in `ops.flops.kept_pairs`. Without `host_sync` values are not read: an upper
    bound from shapes, as if every entry were another block that the row may see. Bounds of packed documents are left
    out: a listed block counts whole.
    """
    blocks, (batch, scope, rows, entries) = -(-n // granularity), indices.shape
    own = torch.arange(rows, device="cpu") // (granularity if rows != blocks else 1)
    tokens = (n - granularity * torch.arange(blocks + 1, device="cpu")).clamp(0, granularity)
    if host_sync:
        listed = normalise_indices(indices, counts, blocks, own if is_causal else None)
        keys = tokens[listed.long()].sum((0, 1, 3)) * (heads // scope)
    else:
        visible = tokens.cumsum(0)[own if is_causal else torch.full_like(own, -1)]
        keys = batch * heads * visible.clamp(max=entries * granularity)
    queries = 1 if rows != blocks else tokens[:-1]
    return int((keys * queries).sum())

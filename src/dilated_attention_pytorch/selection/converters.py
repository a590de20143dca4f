"""Block lists of other libraries as index tensors for `selected_attention`, and back.

Lists of whole blocks are carried over. An element mask inside a block is not, except that of `is_causal`: a partial
block of another library becomes a listed block. Functions `from_*` copy nothing where one list holds all blocks.

Shapes: b batch, h heads of the lists, r blocks of queries, k entries of a row, t key blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..errors import must
from .indices import GRANULARITIES, normalise_indices

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class IndexLists(NamedTuple):
    """Arguments of `selected_attention`."""

    indices: Tensor
    """int32 or int64 (b, h, r, k)"""
    counts: Tensor | None
    """int (b, h, r)"""
    granularity: int


class FlashBlocks(NamedTuple):
    """Lists with the names and layout of FlashAttention-4's `BlockSparseTensorsTorch`: its arguments, in order."""

    mask_block_cnt: Tensor
    """int32 (b, h, r): blocks that need an element mask"""
    mask_block_idx: Tensor
    """int32 (b, h, r, k)"""
    full_block_cnt: Tensor
    """int32 (b, h, r): whole blocks"""
    full_block_idx: Tensor
    """int32 (b, h, r, k)"""


def from_block_mask(block_mask: BlockMask) -> IndexLists:
    """Lists of a `torch.nn.attention.flex_attention.BlockMask`, partial and full blocks together.

    Lists of one sample apply to a batch of one: expand them for more.
    """
    size = _one_size(block_mask.BLOCK_SIZE)
    partial = block_mask.kv_num_blocks, block_mask.kv_indices
    return IndexLists(*_joined(*partial, block_mask.full_kv_num_blocks, block_mask.full_kv_indices), size)


def to_block_mask(
    indices: Tensor, counts: Tensor | None = None, *, n: int, granularity: int = 128, is_causal: bool = False
) -> BlockMask:
    """A `BlockMask` of the blocks that rows of query blocks list, for n tokens.

    For compiled `flex_attention`, which reads the lists: uncompiled, it evaluates `mask_mod` alone on all pairs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    partial, full = _split(indices, counts, n, granularity, is_causal)
    blocks = -(-n // granularity)
    # The width of the lists is the number of key blocks to a BlockMask.
    (cut, cut_indices), (whole, whole_indices) = ((c, pad(x, (0, blocks - x.shape[-1]))) for c, x in (partial, full))

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query if is_causal else key < n

    lists = cut, cut_indices, whole, whole_indices
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=granularity, mask_mod=mask_mod, seq_lengths=(n, n))


def from_flash4(tensors: Any, granularity: int | None = None) -> IndexLists:
    """Lists of an object with the attributes of FlashAttention-4's `BlockSparseTensorsTorch`.

    The block size is its `block_size` unless `granularity` is given.
    """
    size = getattr(tensors, "block_size", None) if granularity is None else granularity
    if size is None:
        raise must("granularity must be given", "None", "The object has no block_size.")
    full = getattr(tensors, "full_block_cnt", None), getattr(tensors, "full_block_idx", None)
    return IndexLists(*_joined(tensors.mask_block_cnt, tensors.mask_block_idx, *full), _one_size(size))


def to_flash4(
    indices: Tensor, counts: Tensor | None = None, *, n: int, granularity: int = 128, is_causal: bool = False
) -> FlashBlocks:
    """Lists for `BlockSparseTensorsTorch(*lists, block_size=(granularity, granularity))`.

    Blocks in the mask lists are the diagonal of a causal call and the last block of a ragged sequence; they need a
    `mask_mod` for key <= query, or key < n.
    """
    partial, full = _split(indices, counts, n, granularity, is_causal)
    return FlashBlocks(*partial, *full)


def from_cudnn(q2k_block_index: Tensor, q2k_block_nums: Tensor | None = None, granularity: int = 64) -> IndexLists:
    """Lists in the layout of cuDNN's block-sparse attention, which is that of `selected_attention`: no copy."""
    return IndexLists(q2k_block_index, q2k_block_nums, _one_size(granularity))


def to_cudnn(indices: Tensor, counts: Tensor | None = None, *, n: int, granularity: int = 64) -> tuple[Tensor, Tensor]:
    """`q2k_block_index` (b, h, r, k) and `q2k_block_nums` (b, h, r), int32.

    int32 tensors with counts are passed on without a copy: entries before the count must be distinct.
    """
    _check_rows(indices, n, granularity)
    if counts is not None and indices.dtype == counts.dtype == torch.int32:
        return indices, counts
    return _compact(normalise_indices(indices, counts, -(-n // granularity)), -(-n // granularity))[::-1]


def from_csr(matrix: Any, shape: tuple[int, int, int], granularity: int = 128) -> IndexLists:
    """Lists of a CSR matrix of b * h * r rows and t columns, of torch or, by its attributes, of scipy.

    `shape` is (b, h, r). Rows of one length are not copied.
    """
    if isinstance(matrix, Tensor):
        begin, column = matrix.crow_indices(), matrix.col_indices()
    else:
        begin, column = (torch.as_tensor(x, device="cpu") for x in (matrix.indptr, matrix.indices))
    rows = begin.numel() - 1
    if begin.dim() != 1 or rows != shape[0] * shape[1] * shape[2]:
        what = f"the CSR matrix must have {shape[0] * shape[1] * shape[2]} rows, those of {tuple(shape)}"
        raise must(what, f"{rows} rows" if begin.dim() == 1 else f"batches {tuple(begin.shape[:-1])}")
    counts = begin.diff()
    most = int(counts.max()) if rows else 0
    if most * rows == len(column):
        return IndexLists(column.view(*shape, most), None, _one_size(granularity))
    entry = torch.arange(most, device=column.device)
    at = (begin[:-1, None] + entry).clamp(max=max(len(column) - 1, 0))
    indices = torch.where(entry < counts[:, None], column[at], -1)
    return IndexLists(indices.view(*shape, most), counts.view(shape), _one_size(granularity))


def to_csr(indices: Tensor, counts: Tensor | None = None, *, blocks: int) -> Tensor:
    """Torch CSR matrix (b * h * rows, blocks) of ones, rows in order.

    Its size depends on values, which are read back from a GPU. For scipy: `scipy.sparse.csr_matrix((m.values(),
    m.col_indices(), m.crow_indices()), m.shape)` of a matrix m on the CPU.
    """
    listed = normalise_indices(indices, counts, blocks).flatten(0, -2)
    inside = listed < blocks
    begin = pad(inside.sum(-1).cumsum(0), (1, 0))
    column = listed[inside].long()
    ones = torch.ones(len(column), device=column.device)
    return torch.sparse_csr_tensor(begin, column, ones, (len(listed), blocks), check_invariants=True)


def _one_size(size: Any) -> int:
    sizes = (size, size) if isinstance(size, int) else tuple(size)
    if sizes[0] != sizes[1] or sizes[0] not in GRANULARITIES:
        what = f"blocks must be square, of {', '.join(map(str, GRANULARITIES))} tokens"
        raise must(what, " x ".join(map(str, sizes)))
    return sizes[0]


def _joined(
    counts: Tensor, indices: Tensor, more_counts: Tensor | None, more: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """One list of two; a single one as it is."""
    if more is None or more_counts is None:
        return indices, counts
    lists = []
    for count, entries in ((counts, indices), (more_counts, more)):
        lists.append(entries.masked_fill(torch.arange(entries.shape[-1], device=count.device) >= count[..., None], -1))
    lead = torch.broadcast_shapes(*(x.shape[:-1] for x in lists))
    return torch.cat([x.expand(*lead, x.shape[-1]) for x in lists], -1), None


def _check_rows(indices: Tensor, n: int, granularity: int) -> None:
    blocks = -(-n // _one_size(granularity))
    if indices.dim() != 4 or indices.shape[2] != blocks:
        what = (
            f"indices must have shape (batch, heads, {blocks}, entries), a row for each block of {granularity} tokens"
        )
        raise must(what, tuple(indices.shape), "Lists for tokens have no form in other libraries.")


def _split(
    indices: Tensor, counts: Tensor | None, n: int, granularity: int, is_causal: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Counts and lists of blocks with an element mask, and of whole blocks."""
    _check_rows(indices, n, granularity)
    blocks = -(-n // granularity)
    own = torch.arange(blocks, device=indices.device)
    listed = normalise_indices(indices, counts, blocks, own if is_causal else None)
    partial = listed == own[:, None] if is_causal else torch.zeros_like(listed, dtype=torch.bool)
    if n % granularity:
        partial |= listed == blocks - 1
    lists = (listed.masked_fill(~kind, blocks).sort(dim=-1).values for kind in (partial, ~partial))
    cut, whole = (_compact(x, blocks) for x in lists)
    return cut, whole


def _compact(listed: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Counts and lists, whose unused entries are 0."""
    inside = listed < blocks
    return inside.sum(-1, dtype=torch.int32), torch.where(inside, listed, 0)

"""Block lists of other libraries: round trips, results, and what is not copied."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from index_calls import seen_pairs
from oracle import dense_attention, error
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dilated_attention_pytorch import selected_attention
from dilated_attention_pytorch.selection.converters import (
    from_block_mask,
    from_csr,
    from_cudnn,
    from_flash4,
    to_block_mask,
    to_csr,
    to_cudnn,
    to_flash4,
)

SIZE = 16
CAUSAL = pytest.mark.parametrize("is_causal", [False, True])
LENGTHS = pytest.mark.parametrize("n", [96, 90])


def drawn_lists(n, batch=2, heads=3):
    return torch.randint(-1, -(-n // SIZE), (batch, heads, -(-n // SIZE), 4), dtype=torch.int32)


def pairs(lists, n, is_causal):
    """Pairs that converted lists allow, bool (b, h, n, n)."""
    indices, counts, size = lists
    if counts is not None:
        indices = indices.masked_fill(torch.arange(indices.shape[-1]) >= counts[..., None], -1)
    return seen_pairs(indices, n, size, indices.shape[1], is_causal)


@CAUSAL
@LENGTHS
def test_block_masks_come_back_as_they_went(n, is_causal):
    indices = drawn_lists(n)
    block_mask = to_block_mask(indices, n=n, granularity=SIZE, is_causal=is_causal)
    wanted = seen_pairs(indices, n, SIZE, 3, is_causal)
    assert torch.equal(pairs(from_block_mask(block_mask), n, is_causal), wanted)
    assert block_mask.seq_lengths == (n, n)
    tiles = torch.nn.functional.pad(wanted, (0, -n % SIZE, 0, -n % SIZE)).unflatten(-1, (-1, SIZE))
    tiles = tiles.unflatten(-3, (-1, SIZE)).any(-1).any(-2)
    assert torch.equal(block_mask.to_dense().bool(), tiles)
    again = to_block_mask(*from_block_mask(block_mask)[:2], n=n, granularity=SIZE, is_causal=is_causal)
    assert torch.equal(again.to_dense(), block_mask.to_dense())


@CAUSAL
def test_attention_on_a_block_mask_is_that_of_its_mask(is_causal):
    n = 90
    keep = torch.rand(6, 6) > 0.5

    def mask_mod(b, h, q, k):
        kept = keep[q // SIZE, k // SIZE]
        return kept & (q >= k) if is_causal else kept

    block_mask = create_block_mask(mask_mod, None, None, n, n, device="cpu", BLOCK_SIZE=SIZE)
    indices, counts, size = from_block_mask(block_mask)
    q, k, v = torch.randn(3, 1, 2, n, 8, dtype=torch.float64).unbind()
    token = torch.arange(n)
    seen = mask_mod(None, None, token[:, None], token).double().expand(2, n, n)
    found = selected_attention(q, k, v, indices, counts, granularity=size, is_causal=is_causal)
    assert error(found, dense_attention(q, k, v, seen)[0]) <= 1e-12


@CAUSAL
@LENGTHS
def test_flash4_lists_come_back_as_they_went(n, is_causal):
    indices = drawn_lists(n)
    lists = to_flash4(indices, n=n, granularity=SIZE, is_causal=is_causal)
    assert all(x.dtype == torch.int32 for x in lists)
    partial = lists.mask_block_cnt.sum()
    assert (partial > 0) == (is_causal or n % SIZE > 0)
    wanted = seen_pairs(indices, n, SIZE, 3, is_causal)
    assert torch.equal(pairs(from_flash4(lists, SIZE), n, is_causal), wanted)
    named = SimpleNamespace(**lists._asdict(), block_size=(SIZE, SIZE))
    assert torch.equal(pairs(from_flash4(named), n, is_causal), wanted)


def test_one_list_of_flash4_or_torch_is_not_copied():
    indices, counts = torch.zeros(1, 2, 3, 3, dtype=torch.int32), torch.ones(1, 2, 3, dtype=torch.int32)
    lists = from_flash4(SimpleNamespace(mask_block_cnt=counts, mask_block_idx=indices, block_size=(SIZE, SIZE)))
    assert lists.indices is indices and lists.counts is counts
    lists = from_block_mask(BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=SIZE))
    assert lists.indices is indices and lists.counts is counts and lists.granularity == SIZE


@LENGTHS
def test_cudnn_lists_come_back_as_they_went(n):
    indices = drawn_lists(n)
    index, counts = to_cudnn(indices, n=n, granularity=SIZE)
    assert index.dtype == counts.dtype == torch.int32
    lists = from_cudnn(index, counts, SIZE)
    assert lists.indices is index and lists.counts is counts
    assert torch.equal(pairs(lists, n, False), seen_pairs(indices, n, SIZE, 3, False))
    for row, count in zip(index.flatten(0, 2).tolist(), counts.flatten().tolist(), strict=True):
        assert len(set(row[:count])) == count
    assert to_cudnn(index, counts, n=n, granularity=SIZE) == (index, counts)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("kind", ["torch", "scipy"])
def test_csr_comes_back_as_it_went(kind):
    indices = drawn_lists(90)
    matrix = to_csr(indices, blocks=6)
    listed = matrix.to_dense().view(2, 3, 6, 6) > 0
    wanted = seen_pairs(indices, 90, SIZE, 3, False)
    assert torch.equal(listed.repeat_interleave(SIZE, 2).repeat_interleave(SIZE, 3)[:, :, :90, :90], wanted)
    if kind == "scipy":
        arrays = matrix.crow_indices().int().numpy(), matrix.col_indices().int().numpy()
        matrix = SimpleNamespace(indptr=arrays[0], indices=arrays[1])
    assert torch.equal(pairs(from_csr(matrix, (2, 3, 6), SIZE), 90, False), wanted)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_csr_rows_of_one_length_are_not_copied():
    indices = torch.tensor([[0, 2], [1, 2], [0, 1]]).view(1, 1, 3, 2)
    matrix = to_csr(indices, blocks=3)
    lists = from_csr(matrix, (1, 1, 3), SIZE)
    assert lists.indices.data_ptr() == matrix.col_indices().data_ptr()
    assert torch.equal(lists.indices, indices) and lists.counts is None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_wrong_lists_have_a_message():
    indices = drawn_lists(90)
    with pytest.raises(ValueError, match="a row for each block of 16 tokens, got"):
        to_block_mask(indices[:, :, :5], n=90, granularity=SIZE)
    with pytest.raises(ValueError, match=r"blocks must be square.* got 16 x 32"):
        from_flash4(to_flash4(indices, n=90, granularity=SIZE), (16, 32))
    with pytest.raises(ValueError, match="granularity must be given"):
        from_flash4(to_flash4(indices, n=90, granularity=SIZE))
    with pytest.raises(ValueError, match="the CSR matrix must have 18 rows"):
        from_csr(to_csr(indices, blocks=6), (1, 3, 6), SIZE)

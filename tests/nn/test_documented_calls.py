"""Calls as the library's reports show them, run as written at a small length."""

from __future__ import annotations

import pytest
import torch

from dilated_attention_pytorch import (
    BlockSparseAdaptive,
    create_adaptive_block_sparse,
    create_block_sparse_attention,
    create_multihead_block_sparse,
    get_block_sparse_preset,
)
from dilated_attention_pytorch.distributed import DistributedSparseConfig


def maximum_sequence_length():
    return create_block_sparse_attention(
        variant="base",
        segment_lengths=[4096],
        dilation_rates=[1],
        sparsity_ratio=0.01,
    )


def best_performance():
    return create_multihead_block_sparse(
        embed_dim=512,
        num_heads=8,
        segment_lengths=[8192],
        dilation_rates=[1],
        sparsity_ratio=0.05,
    )


def multi_scale_attention():
    return create_block_sparse_attention(
        variant="base",
        segment_lengths=[2048, 4096],
        dilation_rates=[1, 2],
        sparsity_ratio=0.01,
    )


def most_users():
    return create_block_sparse_attention(
        variant="base", segment_lengths=[2048], dilation_rates=[1], sparsity_ratio=0.01
    )


def drop_in_replacement():
    return create_multihead_block_sparse(embed_dim=768, num_heads=12, sparsity_ratio=0.05)


def distributed_training():
    return create_block_sparse_attention(
        variant="distributed",
        distributed_config=DistributedSparseConfig(enable_memory_optimization=True, gradient_compression_ratio=0.1),
    )


def adaptive_learning():
    return BlockSparseAdaptive(
        segment_lengths=[4096],
        dilation_rates=[1],
        num_heads=8,
        head_dim=64,
    )


def learnable_patterns():
    return create_adaptive_block_sparse(base_sparsity=0.9, temperature=1.0, learnable_temperature=True)


def factory_functions():
    create_block_sparse_attention(variant="auto")
    create_adaptive_block_sparse(base_sparsity=0.9)
    create_multihead_block_sparse(embed_dim=768, num_heads=12)
    return get_block_sparse_preset("ultra_sparse")


CALLS = (
    maximum_sequence_length,
    best_performance,
    multi_scale_attention,
    most_users,
    drop_in_replacement,
    distributed_training,
    adaptive_learning,
    learnable_patterns,
    factory_functions,
)


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_the_call_makes_a_module_that_attends(make):
    model = make()
    if hasattr(model, "embed_dim"):
        x = torch.randn(1, 300, model.embed_dim, requires_grad=True)
        output, weights = model(x, x, x)
        assert weights is None
    else:
        x = torch.randn(1, 300, 8, 64, requires_grad=True)
        output = model(x, x, x)
    assert output.shape == x.shape
    output.sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("make", "ratio"),
    [(maximum_sequence_length, 0.01), (multi_scale_attention, 0.01), (best_performance, 0.05), (most_users, 0.01)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_sparsity_asked_for_is_kept(make, ratio):
    assert make().plan(16384, 8).density == pytest.approx(ratio, rel=0.25)

"""User-defined patterns and `Packed` inside other patterns, planned and run on a GPU."""

from __future__ import annotations

import pytest
import torch
from oracle import answer, error
from own_patterns import HeadBlocks, HeadResidues, Levels

from dilated_attention_pytorch import Causal, Dilated, Global, Packed, attention, make_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LADDER = Dilated((32, 64), (1, 2))
PATTERNS = [
    HeadResidues(),
    Levels() & Causal(),
    HeadBlocks(block=64),
    Packed(LADDER, (120, 180)) & Causal(),
    Packed(LADDER, (120, 180)) | Global(5),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_plans_made_on_a_gpu_hold_the_same_pairs(pattern):
    found = make_plan(pattern, 300, 4, device="cuda").to("cpu")
    assert torch.equal(found.to_dense(), make_plan(pattern, 300, 4).to_dense())


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_user_patterns_match_oracle_on_a_gpu(pattern):
    query, key, value = torch.randn(3, 2, 4, 300, 64, device="cuda", dtype=torch.bfloat16).unbind()
    assert error(attention(query, key, value, pattern), answer(query, key, value, pattern).output) <= 2e-2

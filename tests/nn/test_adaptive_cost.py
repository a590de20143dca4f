"""What learned selection costs: time beside dense attention, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
import torch
from torch.nn import functional as F

from dilated_attention_pytorch.kernels.cpu import native
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive


def test_learned_attention_takes_less_than_half_of_dense():
    if not native.library_path().exists():
        pytest.skip("the C++ kernel is not built")
    module = BlockSparseAdaptive([8192], [1], 4, 64, AdaptiveConfig(base_sparsity=0.9)).eval()
    x = torch.randn(3, 1, 8192, 4, 64).unbind()
    heads = [t.transpose(1, 2).contiguous() for t in x]

    def busy(run):
        began = time.process_time()
        run()
        return time.process_time() - began

    with torch.no_grad():
        module(*x)
        took = min(busy(lambda: module(*x)) for _ in range(3))
        dense_took = min(busy(lambda: F.scaled_dot_product_attention(*heads)) for _ in range(2))
    assert 2 * took <= dense_took


MEMORY = """
import resource, sys, torch
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection.backend import select
n, causal, width, sparsity = int(sys.argv[1]), sys.argv[2] == "causal", int(sys.argv[3]), float(sys.argv[4])
config = AdaptiveConfig(base_sparsity=sparsity, match_rank=width // 2, hidden_dim=2 * width, score_unit=16 if n < 10**5 else 64)
module = BlockSparseAdaptive([n], [1], 8, width, config).eval()
def choose(n):
    q = torch.randn(1, 1, n, width).expand(1, 8, n, width)
    k = torch.randn(1, 1, n, width)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.no_grad():
        select(module.score_blocks(q, k.expand(1, 8, n, width), causal), n)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
choose(2048)
print(choose(n))
"""


@pytest.mark.parametrize(
    ("n", "causal", "width", "sparsity", "most"),
    [
        ("32768", "both ways", "64", "0.9", 64),
        ("16384", "causal", "64", "0.9", 64),
        # All scores at once would take 512 MiB.
        ("262144", "both ways", "16", "0.99", 128),
    ],
)
def test_choosing_takes_little_memory(n, causal, width, sparsity, most):
    command = [sys.executable, "-c", MEMORY, n, causal, width, sparsity]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert float(result.stdout) <= most

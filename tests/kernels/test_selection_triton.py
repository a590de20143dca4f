"""The Triton kernels on plans that a tensor holds, on the CPU in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from kernels.test_selection import drawn, inputs, seen_pairs
from oracle import dense_attention, error
from dilated_attention_pytorch.ops.selected import selected_attention

found = {}
for per_token in (False, True):
    for is_causal in (per_token,):
        selection = drawn(batch=2, heads=2, n=40, most=1, is_causal=is_causal, per_token=per_token, local=1)
        single = [x.float().requires_grad_() for x in inputs(selection, key_heads=1, width=16, value_width=16)]
        double = [x.detach().double().requires_grad_() for x in single]
        weights = torch.randn(2, 2, 40, 16)
        output, lse = selected_attention(*single, selection, backend="triton")
        wanted, wanted_lse = dense_attention(*double, seen_pairs(selection).double())
        grads = torch.autograd.grad((output * weights).sum(), single)
        wanted_grads = torch.autograd.grad((wanted * weights.double()).sum(), double)
        pairs = [(output, wanted), (lse, wanted_lse), *zip(grads, wanted_grads)]
        found[f"{'token' if per_token else 'block'} {is_causal}"] = max(error(a, b.detach()) for a, b in pairs)
print(json.dumps(found))
"""


@pytest.mark.xdist_group("triton interpreter")
def test_triton_computes_selections():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == 2
    assert {name: worst for name, worst in found.items() if not worst < 1e-5} == {}

"""How far each CPU backend errs from float64, for every dtype, beside torch's own dense attention on the same inputs.

    python benchmarks/accuracy.py        prints a table and writes benchmarks/results/numbers_cpu.jsonl

The inputs are rounded to the dtype first, so that only the computation errs. An error is the largest difference over
the largest wanted magnitude (at least 1) of the output, the LSE or a gradient.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from oracle import answer, error  # noqa: E402

from dilated_attention_pytorch import attention_with_lse, parse  # noqa: E402
from dilated_attention_pytorch.kernels.cpu.native import library_path  # noqa: E402
from dilated_attention_pytorch.tools.bench.measure import facts  # noqa: E402
from dilated_attention_pytorch.tools.html_page import write  # noqa: E402

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
N, HEADS, WIDTH = 512, 2, 64
NAMES = ("output", "query_grad", "key_grad", "value_grad")
INPUTS: dict[str, dict[str, float]] = {
    "ordinary": {},
    "small scores": {"query": 1e-3},
    "large scores": {"query": 10.0},
    "huge scores": {"query": 100.0, "key": 3.0},
    "equal scores": {"query": 0.0},
    "tiny values": {"value": 1e-6},
    "large values": {"value": 300.0},
    "values far from 0": {"shift": 100.0},
}
"""Factors on what is drawn from a normal distribution, and what is added to every value."""


def drawn(change: dict[str, float], dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value, and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(1, HEADS, N, WIDTH, generator=generator, dtype=torch.float64) for _ in range(4)]
    query, key, value = (x * change.get(name, 1.0) for name, x in zip(("query", "key", "value"), rows, strict=False))
    value = value + change.get("shift", 0.0)
    return [x.to(dtype) for x in (query, key, value)], rows[3].to(dtype)


def differentiated(output: Tensor, leaves: list[Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Output and gradients by name."""
    return dict(zip(NAMES, (output.detach(), *torch.autograd.grad(output, leaves, grad)), strict=True))


def measured(text: str) -> list[dict[str, Any]]:
    """A line for each kind of input, dtype and subject."""
    lines = []
    causal = text == "causal"
    for kind, change in INPUTS.items():
        for dtype in DTYPES:
            inputs, grad = drawn(change, dtype)
            exact = answer(*inputs, parse(text), grad_output=grad)
            for subject in (*(["torch"] if causal else []), "reference", "cpu", "native"):
                if subject == "native" and not library_path().exists():
                    continue
                leaves = [x.clone().requires_grad_() for x in inputs]
                if subject == "torch":
                    lse, output = None, scaled_dot_product_attention(*leaves, is_causal=True)
                else:
                    output, lse = attention_with_lse(*leaves, text, backend=subject)
                found = differentiated(output, leaves, grad)
                errors = {name: error(got, getattr(exact, name)) for name, got in found.items()}
                if lse is not None:
                    errors["lse"] = error(lse, exact.lse)
                name = str(dtype).removeprefix("torch.")
                lines.append({"inputs": kind, "pattern": text, "dtype": name, "subject": subject} | errors)
    return lines


def table(lines: list[dict[str, Any]]) -> str:
    """Largest error over output and gradients, one row for each kind of input and dtype."""
    subjects = ("torch", "reference", "cpu", "native")
    rows = [f"{'inputs':<18} {'pattern':<24} {'dtype':<9}" + "".join(f"{name:>11}" for name in subjects)]
    for key in dict.fromkeys((line["inputs"], line["pattern"], line["dtype"]) for line in lines):
        own = {x["subject"]: x for x in lines if (x["inputs"], x["pattern"], x["dtype"]) == key}
        worst = {who: max(line[name] for name in NAMES) for who, line in own.items()}
        cells = "".join(f"{worst[who]:>11.1e}" if who in worst else f"{'':>11}" for who in subjects)
        rows.append(f"{key[0]:<18} {key[1]:<24} {key[2]:<9}{cells}")
    return "\n".join(rows)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "numbers_cpu.jsonl")
    options = parser.parse_args()
    lines = [line for text in ("causal", "dilated:64x1,256x4 & causal") for line in measured(text)]
    print(table(lines))
    about = {"case": "numbers", "n": N, "d": WIDTH}
    write(options.out, "".join(json.dumps(about | line | facts("cpu")) + "\n" for line in lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""CPU tensors under another default device: every public entry gives what it gives without one.

The default device is "meta", which holds no numbers: a tensor made there by mistake cannot pass a comparison.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest
import torch
from calls import least_budget
from torch import Tensor

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.distributed.simulate import virtual_attention
from dilated_attention_pytorch.kernels.cpu.native import library_path
from dilated_attention_pytorch.ops.attention import CallSettings, call_of
from dilated_attention_pytorch.ops.streaming.sources import TensorSource
from dilated_attention_pytorch.ops.streaming.stream import streamed_gradients
from dilated_attention_pytorch.plan import plan_rows

BACKENDS = ["reference", "cpu", *(["native"] if library_path().exists() else [])]
PATTERNS = (
    "full",
    "dilated:16x1,64x2 & causal",
    "window:9 | global:3;queries=1",
    "strided:3 & documents:40,*",
    "random:0.4;block=16;per_head=1 | dilated:37x2",
    "hierarchical:1x1,0x2;block=16",
    "block_dilated:64x1;block=16",
    "blocks:0 1,1,2;block=64",
)
lengths = cycle(range(130, 190))
FACTORIES = {"arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand"}
FACTORIES |= {"randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"}


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS = {"with torch.device": lambda: torch.device("meta"), "set_default_device": default_device}


def tensors(n: int, heads: int = 2, dtype: torch.dtype = torch.float32, **options: bool) -> list[Tensor]:
    generator = torch.Generator("cpu").manual_seed(n)
    return [
        torch.randn(1, heads, n, 8, generator=generator, dtype=dtype, device="cpu").requires_grad_(**options)
        for _ in range(4)
    ]


def pattern_for(text: str, n: int) -> str:
    return text.replace("*", str(n - 40))


def graded(n: int, text: str, dtype: torch.dtype = torch.float32, **options: object) -> list[Tensor]:
    """Output, LSE and gradients of one call."""
    torch.manual_seed(3)
    *leaves, grad = tensors(n, dtype=dtype)
    leaves = [x.detach().requires_grad_() for x in leaves]
    output, lse = dap.attention_with_lse(*leaves, pattern_for(text, n), **options)
    return [output, lse, *torch.autograd.grad(output, leaves, grad)]


def masked(n: int, backend: str) -> list[Tensor]:
    padding = torch.zeros(1, n, dtype=torch.bool, device="cpu")
    padding[:, 5:20] = True
    return graded(n, "window:30", key_padding_mask=padding, dropout_p=0.3, backend=backend)


def packed(n: int, backend: str) -> list[Tensor]:
    bounds = torch.tensor([0, 50, 51, n], device="cpu")
    return graded(n, "dilated:16x1,64x2", cu_seqlens=bounds, is_causal=True, backend=backend)


def within_budget(n: int, backend: str) -> list[Tensor]:
    query, key, value, _ = tensors(n)
    call = call_of(
        query, key, value, CallSettings(pattern="window:20 | dilated:37x2", scale=0.3, dropout_p=0.2, backend=backend)
    )
    budget = least_budget(call, backend)
    return graded(n, "window:20 | dilated:37x2", scale=0.3, dropout_p=0.2, backend=backend, memory_budget=budget)


def decoded(n: int, text: str) -> list[Tensor]:
    query, key, value, _ = tensors(n)
    cache = dap.KVCache(text, length=n)
    with torch.no_grad():
        parts = [
            cache.attend(*(x[:, :, a:b] for x in (query, key, value)))
            for a, b in ((0, 40), (40, 41), (41, 42), (42, 47), (47, n))
        ]
    steps = [dap.attention_step(query[:, :, a:b], key, value, text, a, length=n) for a, b in ((60, 61), (61, n))]
    return [torch.cat(parts, 2), cache.positions(1), *steps]


def streamed(n: int, text: str, backend: str) -> list[Tensor]:
    query, key, value, _ = tensors(n)
    sink = torch.empty_like(query)
    dap.streamed_attention((query, key, value), pattern_for(text, n), sink, chunk=32, backend=backend)
    source = TensorSource(query, key, value, gradients=True)
    streamed_gradients(source, pattern_for(text, n), lambda begin, output, lse: output, chunk=64, backend=backend)
    return [sink, *source.grads]


def planned(n: int, text: str) -> list[Tensor]:
    text = pattern_for(text, n)
    plan = dap.make_plan(text, n, 2)
    rows = plan_rows(dap.parse(text).resolve(n, 2), n, 2, [(20, 50), (90, 100)])
    assert plan.picture(1) and repr(plan)
    return [plan.to_dense(), rows.to_dense(), plan.cells()[1], *(part.by_key.rows for part in plan.parts)]


def merged(n: int) -> list[Tensor]:
    halves = [graded(n, text, backend="cpu") for text in ("window:5", "strided:2")]
    return [
        *dap.merge([half[0] for half in halves], [half[1] for half in halves]),
        dap.attention_rows(*tensors(n)[:2], "window:5", [0, 7]),
    ]


def through(module: torch.nn.Module, n: int) -> list[Tensor]:
    """Output and gradients of a module whose parameters lie on the CPU."""
    rows = [x.transpose(1, 2) for x in tensors(n)[:3]]
    if isinstance(module, dap.LongNetLM):
        rows = [torch.arange(n, device="cpu")[None] % 50]
    elif hasattr(module, "embed_dim"):
        rows = [x.flatten(2) for x in rows]
    module.zero_grad()
    torch.manual_seed(3)
    output = module(*rows)
    output = output[0] if isinstance(output, tuple) else output
    if any(x.requires_grad for x in module.parameters()):
        output.square().sum().backward()
    return [output, *(x.grad for x in module.parameters() if x.grad is not None)]


def longnet() -> dap.LongNetLM:
    config = dap.LongNetConfig(
        num_tokens=50, d_model=16, nhead=2, num_decoder_layers=1, dim_feedforward=16, segment_lengths=(16, 64),
        dilation_rates=(1, 2),
    )  # fmt: skip
    return dap.LongNetLM(config)


MODULES = {
    "dilated": lambda: dap.DilatedAttention([16, 64], [1, 2]),
    "multihead dilated": lambda: dap.MultiheadDilatedAttention(16, 2, [16, 64], [1, 2]),
    "sparse": lambda: dap.SparseAttention("window:20 & causal"),
    "multihead sparse": lambda: dap.MultiheadSparseAttention(16, 2, "window:20 & causal", position=dap.Rotary()),
    "block sparse": lambda: dap.create_block_sparse_attention("base", [64], [1], block_size=16),
    "adaptive": lambda: dap.BlockSparseAdaptive([64], [1], 2, 8, dap.AdaptiveConfig(), block_size=16),
    "LongNet": longnet,
}


def virtual(n: int) -> list[Tensor]:
    *leaves, grad = tensors(n)
    leaves = [x.requires_grad_() for x in leaves]
    layout = dap.SequenceLayout.zigzag(n, 2)
    output, lse = virtual_attention(*leaves, "dilated:16x1,64x2 | window:3", layout)
    return [output, lse, *torch.autograd.grad(output, leaves, grad)]


ENTRIES: dict[str, Callable[[int], list[Tensor]]] = {
    **{f"{b} {text}": lambda n, b=b, text=text: graded(n, text, backend=b) for b in BACKENDS for text in PATTERNS},
    **{f"{b} bfloat16": lambda n, b=b: graded(n, PATTERNS[1], torch.bfloat16, backend=b) for b in BACKENDS},
    **{f"{b} masked, dropout": lambda n, b=b: masked(n, b) for b in BACKENDS},
    **{f"{b} packed": lambda n, b=b: packed(n, b) for b in BACKENDS},
    **{f"{b} memory budget": lambda n, b=b: within_budget(n, b) for b in BACKENDS},
    **{f"decoded {text}": lambda n, text=text: decoded(n, text) for text in (PATTERNS[1], PATTERNS[2], PATTERNS[4])},
    **{f"{b} streamed {t}": lambda n, b=b, t=t: streamed(n, t, b) for b in BACKENDS[1:] for t in PATTERNS[1:5]},
    **{f"plan {text}": lambda n, text=text: planned(n, text) for text in PATTERNS},
    "merge, rows": merged,
    "virtual ranks": virtual,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_cpu_tensors_under_another_default_device(context, entry):
    # Another length in each context: nothing that an earlier test planned is found again.
    n = next(lengths)
    with CONTEXTS[context]():
        found = ENTRIES[entry](n)
    dap.plan_cache.clear()
    for got, want in zip(found, ENTRIES[entry](n), strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_cpu_modules_under_another_default_device(context, kind):
    n = next(lengths)
    module = MODULES[kind]()
    with CONTEXTS[context]():
        found = through(module, n)
    dap.plan_cache.clear()
    for got, want in zip(found, through(module, n), strict=True):
        assert got.device.type == "cpu"
        assert torch.equal(got, want)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_are_made_on_the_default_device(kind):
    with torch.device("meta"):
        module = MODULES[kind]()
    assert {x.device.type for x in module.parameters()} <= {"meta"}


def test_the_library_names_the_device_of_every_tensor():
    """Command line tools run in processes of their own, where nobody sets a default device."""
    root = Path(dap.__file__).parent
    unnamed = []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)) if name in FACTORIES:
                    if not any(keyword.arg in ("device", None) for keyword in node.keywords):
                        unnamed.append(f"{path.relative_to(root)}:{node.lineno}: torch.{name}")
    assert [line for line in unnamed if not line.startswith("tools/")] == []

"""The launches of a training step of a learned layer, recorded instead of run, and compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch

PACKAGE = "dilated_attention_pytorch"
TYPES = {
    torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float64: "*fp64",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
HOST_MODULES = (
    "block_mass", "block_scores", "choose_blocks", "gather_index", "gathered_attention", "lowering",
    "score_gradients", "summaries",
)  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


class Recorded(NamedTuple):
    """A launch as the compiler sees it."""

    kernel: Any
    signature: tuple[str, ...]
    """Types of arguments that are not constants; the value of an argument that is compiled in"""
    even: tuple[int, ...]
    """Indices of arguments that are multiples of 16"""
    constants: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    @property
    def source(self) -> Any:
        """The kernel with its types and constants, for the compiler."""
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        known = {(names.index(name),): value for name, value in self.constants}
        known |= {(place,): 1 for place, one in enumerate(self.signature) if one == "1"}
        known |= {(place,): None for place, one in enumerate(self.signature) if one == "None"}
        signature = dict.fromkeys(names, "constexpr")
        signature |= {names[place]: one for place, one in enumerate(self.signature) if one not in ("1", "None")}
        attributes = {(place,): [["tt.divisibility", 16]] for place in self.even}
        return ASTSource(self.kernel, signature, known, attributes)


def recorded(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Recorded:
    """Record of a launch, specialized as Triton does."""
    signature, even = [], []
    for place, (one, parameter) in enumerate(zip(arguments, kernel.params, strict=False)):
        free = parameter.do_not_specialize
        if isinstance(one, torch.Tensor):
            signature.append(TYPES[one.dtype])
            even += [place] if one.data_ptr() % 16 == 0 and not free else []
        elif isinstance(one, float):
            signature.append("fp32")
        elif one is None:
            # A tensor that the kernel is compiled without.
            signature.append("None")
        else:
            signature.append("1" if one == 1 and not free else "i32" if one < 2**31 else "i64")
            even += [place] if one % 16 == 0 and not free else []
    told = tuple((name, value) for name, value in options.items() if name in OPTIONS)
    constants = tuple((name, value) for name, value in options.items() if name in kernel.arg_names)
    return Recorded(kernel, tuple(signature), tuple(even), constants, told)


@contextmanager
def recording(monkeypatch: Any) -> Iterator[list[Recorded]]:
    """Launches are collected and not run, and memory that they would write holds zeros."""
    # Imported before the variable below is set, which decides whether a kernel is compiled or interpreted.
    modules = [import_module(f"{PACKAGE}.kernels.triton.launches"), import_module(f"{PACKAGE}.kernels.launch.launcher")]
    modules += [import_module(f"{PACKAGE}.selection.kernels.{name}") for name in HOST_MODULES]
    found: list[Recorded] = []
    empty: Callable[..., torch.Tensor] = torch.zeros

    def run(made: Any, grid: Any, tensors: Any, *changing: int) -> None:
        found.append(recorded(made.kernel, (*tensors, *changing, *made._numbers), made.options))

    def launch(kernel: Any, grid: Any, *arguments: Any, **options: Any) -> None:
        found.append(recorded(kernel, arguments, modules[1].OPTIONS | options))

    with monkeypatch.context() as patched:
        patched.setattr(modules[1].Launch, "__call__", run)
        for module in modules:
            if hasattr(module, "launch"):
                patched.setattr(module, "launch", launch)
        # Kernels then accept tensors of the CPU.
        patched.setenv("TRITON_INTERPRET", "1")
        patched.setattr(import_module(f"{PACKAGE}.kernels.triton.backend"), "why_not", lambda call: None)
        patched.setattr(torch, "empty", empty)
        patched.setattr(torch, "empty_like", torch.zeros_like)
        patched.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
        patched.setattr(import_module(f"{PACKAGE}.selection.backend"), "allows_host_sync", lambda device: False)
        yield found


def training_step(
    monkeypatch: Any, block_size: int, score_unit: int, is_causal: bool, heads: int = 8, key_heads: int = 8, **more: Any
) -> list[Recorded]:
    """Launches of the forward and backward pass of a layer with heads of 64 over 16 blocks."""
    nn = import_module(f"{PACKAGE}.nn")
    config = nn.AdaptiveConfig(score_unit=score_unit, **more)
    made = {"block_size": block_size, "backend": "triton", "num_kv_heads": key_heads}
    layer = nn.BlockSparseAdaptive([4096], [1], heads, 64, config, **made)
    shape, kind = (1, 16 * block_size), {"dtype": torch.bfloat16, "requires_grad": True}
    x = [torch.zeros(*shape, many, 64, **kind) for many in (heads, key_heads, key_heads)]
    with recording(monkeypatch) as found:
        layer(*x, is_causal).sum().backward()
    return found

"""Count the memory of attention where every token selects its key blocks, without a GPU.

    python benchmarks/token_memory.py --out benchmarks/results/token_memory.jsonl
    python benchmarks/token_memory.py --tokens 131072 --call layer --shape "64 lists" --largest 12

A call runs on tensors of torch's meta device, which have sizes but no data, by the rules of a GPU of compute capability
9.0. Kernels are not launched. Every allocation of an operation counts from its first use until its last reference is
gone, in the second call of a shape. Not counted: memory inside operations of torch, fragmentation, code of kernels.
These are allocations counted, not measured on a GPU. A line of the result is a call:

    unit     tokens of a sub-block of a learned layer, `AdaptiveConfig.score_unit`
    tensors  bytes of query, key, value and output; with the backward pass also of their gradients
    extra    bytes of all tensors at the largest sum, given index tensors left out, minus `tensors`
    share    extra / tensors
    largest  allocations of the call that were alive then, by the line of the package that made them
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dilated_attention_pytorch as dap
from dilated_attention_pytorch.kernels import registry
from dilated_attention_pytorch.kernels.hopper import backend as hopper_backend
from dilated_attention_pytorch.kernels.launch import launcher
from dilated_attention_pytorch.kernels.triton import backend as triton_backend
from dilated_attention_pytorch.nn import AdaptiveConfig, BlockSparseAdaptive
from dilated_attention_pytorch.selection import attend, attention, backend, indices
from dilated_attention_pytorch.tools.bench.measure import git_sha

PACKAGE = Path(dap.__file__).parent
META, CPU = torch.device("meta"), torch.device("cpu")
LENGTHS = 2**17, 2**19, 2**20


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operations allocate on a device, while any tensor refers to them.

    >>> with Allocations(torch.device("cpu")) as counted:
    ...     x = torch.zeros(256)
    >>> counted.peak
    1024
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live: dict[int, tuple[StorageWeakRef, int, str]] = {}
        self.given: set[int] = set()
        self.peak = 0
        self.at_peak: Counter[str] = Counter()

    def exclude(self, *tensors: Tensor) -> None:
        """Leave out the storages of tensors."""
        for tensor in tensors:
            self.given.add(tensor.untyped_storage()._cdata)
            self.live.pop(tensor.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        inputs = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(results):
            if not isinstance(x, Tensor) or x.device.type != self.device.type:
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self.live and key not in self.given and key not in inputs:
                self.live[key] = StorageWeakRef(storage), storage.nbytes(), f"{_site()} {func._schema.name}"
        total = sum(size for _, size, _ in self.live.values())
        if total > self.peak:
            self.peak, self.at_peak = total, Counter()
            for _, size, site in self.live.values():
                self.at_peak[site] += size
        return results


def _site() -> str:
    """Line of the package that runs an operation."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE) and path.name != "arena.py":
            return f"{path.relative_to(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "caller"


@contextmanager
def gpu_rules() -> Iterator[None]:
    """Tensors of the meta device count as a Hopper GPU's, and launches do nothing."""
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=232448)
    reads = import_module("dilated_attention_pytorch.ops.attention"), backend
    plan = attend.shared_plan
    order = registry.Preference(("hopper", "triton"), "as on a Hopper GPU")
    with ExitStack() as stack:

        def replaced(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        for module in reads:
            replaced(module, "allows_host_sync", lambda device: False)
        # The first call of a shape reads the tables of this plan.
        replaced(attend, "shared_plan", lambda *sizes: plan(*sizes[:-1], CPU))
        replaced(backend, "full_precision", lambda device: nullcontext())
        replaced(registry, "preference", lambda call: order)
        replaced(triton_backend, "why_not", lambda call: None)
        replaced(hopper_backend, "device_problem", lambda device: None)
        replaced(torch.cuda, "get_device_capability", lambda *device: (9, 0))
        replaced(torch.cuda, "get_device_properties", lambda device: properties)
        replaced(torch.cuda, "current_device", lambda: None)
        replaced(torch.cuda, "is_current_stream_capturing", lambda: False)
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, create=True))
        for owner in (launcher.Launch, launcher.Launches):
            replaced(owner, "__call__", lambda self, *given: None)
        replaced(launcher.Launch, "ready", lambda self, key: (None, ()))
        replaced(launcher.Launch, "run_public", lambda self, *given: False)
        yield


@contextmanager
def seen_inside() -> Iterator[None]:
    """Calls do not run as operators, of which a mode would see no more than the results."""
    with mock.patch.object(attention, "is_observed", _never), mock.patch.object(indices, "is_observed", _never):
        yield


def _never(*tensors: Tensor) -> bool:
    return False


class Shape(NamedTuple):
    """Sizes of a call; by default those of a production model."""

    tokens: int
    lists: int = 4
    """Lists of a token: as many as key heads, or as query heads"""
    heads: int = 64
    key_heads: int = 4
    width: int = 128
    block: int = 128
    listed: int = 16
    """Key blocks that a token lists beside its own"""
    unit: int = 1
    """Tokens of a sub-block of a learned layer; None: its default"""
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def tensors(self, device: torch.device, by_token: bool) -> list[Tensor]:
        """Query, key and value (b, h, n, d), or (b, n, h, d) `by_token`."""
        made = []
        for heads in (self.heads, self.key_heads, self.key_heads):
            size = (self.tokens, heads) if by_token else (heads, self.tokens)
            made.append(torch.empty(self.batch, *size, self.width, dtype=self.dtype, device=device))
        return made

    def layer(self) -> BlockSparseAdaptive:
        """Learned layer that lists as many blocks."""
        group = {"select": "group", "group_size": self.heads // self.lists} if self.lists < self.heads else {}
        most = self.listed + 1
        settings = {"k_max": most, "k_min": most, "local_blocks": 1, "sink_blocks": 0, "score_unit": self.unit}
        config = AdaptiveConfig(base_sparsity=0.0, **settings, **group)
        options = {"block_size": self.block, "num_kv_heads": self.key_heads}
        return BlockSparseAdaptive([self.tokens], [1], self.heads, self.width, config, **options)


def count_call(call: str, shape: Shape, backward: bool = False, device: torch.device = META) -> dict[str, Any]:
    """Counted allocations of one call: `dap.selected_attention` on "indices", or a learned "layer"."""
    rules = gpu_rules() if device.type == "meta" else nullcontext()
    with rules, seen_inside(), torch.device(device), torch.set_grad_enabled(backward):
        inputs = [x.requires_grad_(backward) for x in shape.tensors(device, by_token=call == "layer")]
        if call == "layer":
            run = partial(shape.layer().train(backward), *inputs, is_causal=True)
        else:
            size = shape.batch, shape.lists, shape.tokens, shape.listed
            own = torch.arange(shape.tokens)[:, None] // shape.block
            # Spread over the blocks before the token's own.
            drawn = (own * torch.arange(shape.listed) // shape.listed).int().expand(size).contiguous()
            options = {"granularity": shape.block, "is_causal": True, "enable_gqa": True}
            run = partial(dap.selected_attention, *inputs, drawn, **options)
        # Launches are prepared in the first call of a shape.
        _step(run, inputs, backward, None)
        with Allocations(device) as counted:
            results = _step(run, inputs, backward, counted)
    tensors = (1 + backward) * (sum(x.nbytes for x in inputs) + results[0].nbytes)
    given = sum(x.nbytes for x in inputs) + (results[0].nbytes if backward else 0)
    extra = counted.peak + given - tensors
    unit = {"unit": shape.layer().config.score_unit} if call == "layer" else {}
    return {
        "call": call, "tokens": shape.tokens, "lists": shape.lists, **unit, "backward": backward, "tensors": tensors,
        "extra": extra, "share": round(extra / tensors, 4), "largest": dict(counted.at_peak.most_common(8)),
    }  # fmt: skip


def _step(
    run: Callable[[], Tensor], inputs: list[Tensor], backward: bool, counted: Allocations | None
) -> tuple[Tensor, ...]:
    """Run a call; the gradient of its output exists before the backward pass."""
    output = run()
    if not backward:
        return (output,)
    grad = torch.empty_like(output)
    if counted is not None:
        counted.exclude(grad)
    return output, *torch.autograd.grad(output, inputs, grad)


SHAPES: dict[str, Shape] = {
    "4 lists": Shape(0, 4),
    "64 lists": Shape(0, 64),
    "8 heads": Shape(0, 8, heads=8, key_heads=8, width=64),
}
"""Shapes by name: a list for each of 4 key heads or of 64 query heads of 128, and 8 heads of 64 with their own keys."""


def main() -> None:
    """Count the calls that the options name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--call", choices=["indices", "layer"], nargs="+", default=["indices", "layer"])
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=[*SHAPES])
    parser.add_argument("--units", type=int, nargs="+", default=[1, 4], help="score units of layers")
    parser.add_argument("--largest", type=int, default=0, help="print so many of the largest allocations")
    parser.add_argument("--out", type=Path, help="write JSON lines")
    options = parser.parse_args()
    software = {"git": git_sha() or "", "torch": torch.__version__, "python": platform.python_version()}
    stamp, lines = {"device": "none: allocations counted for sm_90"} | software, []
    print("call     shape     unit   tokens  pass      q, k, v, o (and gradients)   extra GiB   share")
    calls = [(call, unit) for call in options.call for unit in (options.units if call == "layer" else [1])]
    for (call, unit), name, tokens, backward in product(calls, options.shape, options.tokens, (False, True)):
        line = count_call(call, SHAPES[name]._replace(tokens=tokens, unit=unit), backward)
        lines.append(json.dumps(line | stamp))
        run = "forward" if not backward else "both"
        size = f"{line['tensors'] / 2**30:10.2f} GiB {'':14}{line['extra'] / 2**30:10.2f}  {line['share']:8.1%}"
        print(f"{call:8} {name:10}{unit if call == 'layer' else '':4}{tokens:9}  {run:8}{size}")
        for site, bytes_there in [*line["largest"].items()][: options.largest]:
            print(f"{bytes_there / 2**30:12.3f} GiB  {site}")
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

"""Portable Triton backend: every plan, in float16, bfloat16 or float32, on any GPU that Triton supports."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import cast

import torch
from torch import Tensor

from ..call import MOST_PROGRAMS, AttentionCall, Extent, Forward, Gradients, Runner

RUNS_OF_ROWS = True
DEVICE_TABLES = SOFTCAP = BIAS = True
WIDEST = 256
FASTEST = 2**22
"""Largest dilation rate: a tile of 256 elements must span less than 2**30 tokens."""
FARTHEST = 2**30
"""Most tokens of a call with a bias, whose distances are 32-bit integers."""
BLOCKS = (16, 32, 64, 128, 256)
_INSTALLED = find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def why_not(call: AttentionCall) -> str | None:
    """Reason why the Triton kernels cannot run the call, or None."""
    query, width = call.query, max(call.query.shape[3], call.value.shape[3])
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if not query.is_cuda and not interpreting:
        return f"needs a CUDA tensor, got {query.device.type}"
    if not installed():
        return "needs triton, which is not installed; CUDA builds of torch include it"
    if query.dtype not in DTYPES:
        return f"dtype must be float16, bfloat16 or float32, got {str(query.dtype).removeprefix('torch.')}"
    if interpreting and query.dtype is torch.bfloat16:
        return "bfloat16 products are wrong in Triton's interpreter; use float16 or float32"
    if width > WIDEST:
        return f"head width must be <= {WIDEST}, got {width}"
    if query.shape[1] > MOST_PROGRAMS:
        return f"heads must be <= {MOST_PROGRAMS}, got {query.shape[1]}"
    if call.plan.block_size not in BLOCKS:
        return f"block_size must be one of {BLOCKS}, got {call.plan.block_size}"
    if call.bias is not None and call.plan.n > FARTHEST:
        return f"n must be <= {FARTHEST} with a bias, got {call.plan.n}"
    rate = max((part.keys.rate for part in call.plan.parts), default=1)
    if rate > FASTEST:
        return f"rate must be <= {FASTEST}, got {rate}"
    if call.plan.device != query.device:
        return f"the plan must be on {query.device}, got {call.plan.device}"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    from .lowering import most_pieces

    d, e, parts = call.query.shape[3], call.value.shape[3], call.plan.parts
    # Several parts, or one that leaves rows out, carry their sums in float32; delta is one number per row.
    sums = 0 if _writes_all(call, extent) else 4
    width, rows = e + 1, sums * e * extent.queries
    if direction == "backward":
        width, rows = d + e, (4 + sums * d) * extent.queries + sums * (d + e) * extent.keys
        if call.bias is not None:
            # Sums of the table and its result, and the largest elements of rows.
            rows += 40 * call.bias.numel() + 8 * (extent.queries + extent.keys)
    if extent.samples > MOST_PROGRAMS:
        # Results of the samples of one launch are separate until they are copied.
        item, is_backward = call.query.element_size(), direction == "backward"
        rows += extent.queries * (item * max(d, e) + 4) + is_backward * extent.keys * item * (d + e)
    if not parts:
        return rows
    # The pieces of a part live until those of the next part exist.
    pieces = min(len(parts), 2) * max(most_pieces(call.plan, part, extent.heads, extent.pairs) for part in parts)
    return rows + extent.samples * pieces * call.plan.block_size * width * 4


def _writes_all(call: AttentionCall, extent: Extent) -> bool:
    """Whether one part of the plan writes every row."""
    parts = call.plan.parts
    if extent.pairs is not None or len(parts) != 1 or bool((parts[0].head_class < 0).any()):
        return False
    axes, block = (parts[0].queries, parts[0].keys), call.plan.block_size
    return all(a.rate == 1 and int((a.end - a.start).clamp(max=block).sum()) == call.plan.n for a in axes)


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    from . import launches

    return launches.forward(call)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value, given the gradients of the output and, optionally, of the LSE."""
    from . import launches

    return launches.backward(call, output, lse, grad_output, grad_lse)


def prepare(call: AttentionCall) -> Runner:
    """Runner for calls like this one: the module `launches`, which caches its tables in the plan."""
    from . import launches

    return cast(Runner, launches)


def import_kernels() -> None:
    """Import the kernels ahead of the first call; see `launch.warmup`."""
    from . import launches  # noqa: F401


def installed() -> bool:
    """Whether Triton is installed."""
    return _INSTALLED

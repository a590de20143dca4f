"""FlashAttention-4 (`flash_attn.cute`) as a backend; an optional package of another project.

It takes lists of blocks of 128 and one mask function for partial blocks, here a band. The first call of a shape
compiles for 5 to 10 seconds. dQ is summed with atomic adds, so gradients may differ in their last bits between runs.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from ...plan.plan import Plan
from ..call import AttentionCall, Extent, Forward, Gradients, empty_rows, reproducible_gradients
from ..sink import scale_by_sink
from .block_lists import Band, Lists, tables_of, why_not_blocks

BLOCK = 128
"""Key tile of FlashAttention-4 on Hopper, which accepts no other block size."""
WIDTHS = (64, 128)


def installed() -> bool:
    """Whether `flash_attn.cute` and its compiler are installed."""
    try:
        return all(find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except ModuleNotFoundError:
        return False


def why_not(call: AttentionCall) -> str | None:
    """Reason why FlashAttention-4 cannot run the call, or None."""
    query, plan = call.query, call.plan
    if not query.is_cuda:
        return f"needs a CUDA tensor, got {query.device.type}"
    capability = torch.cuda.get_device_capability(query.device)
    if capability[0] != 9:
        return f"needs a GPU of compute capability 9.x, got {capability[0]}.{capability[1]}"
    if not installed():
        return "needs FlashAttention-4, which is not installed: pip install flash-attn-4"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {str(query.dtype).removeprefix('torch.')}"
    d, e = query.shape[3], call.value.shape[3]
    if d not in WIDTHS or d != e:
        return f"query and value width must be 64 or 128, the same for both, got {d} and {e}"
    if any(t.data_ptr() % 16 for t in (query, call.key, call.value)):
        return "needs tensors that start at multiples of 16 bytes"
    if plan.block_size != BLOCK:
        return f"block_size must be {BLOCK}, got {plan.block_size}"
    if call.key_padding_mask is not None:
        return "has no key padding mask"
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    if not call.scale > 0:
        return f"scale must be > 0, got {call.scale}"
    if plan.device != query.device:
        return f"the plan must be on {query.device}, got {plan.device}"
    reason = why_not_blocks(plan)
    if reason is not None:
        return reason
    if tables_of(plan).band is None:
        return "needs partial blocks that are cut out of one band, such as a window or the causal triangle"
    if reproducible_gradients() and any(t.requires_grad for t in (query, call.key, call.value)):
        return "sums dQ in any order; allow that with reproducible_gradients(False)"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    if direction == "forward":
        return 0
    n, block, d, e = call.plan.n, call.plan.block_size, call.query.shape[3], call.value.shape[3]
    tiles = max((part.queries.tiles for part in call.plan.parts), default=0)
    # Two numbers per row of whole blocks, and sums of the three gradients in float32.
    padded = -(-max(-(-n // block), tiles) * block * 4 // n)
    row = padded * (d + 2) + call.query.dtype.itemsize * e + 4
    return row * extent.queries + padded * (d + e) * extent.keys


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    from flash_attn.cute.interface import _flash_attn_fwd  # pyrefly: ignore[missing-import]

    output = empty_rows(call.query, call.value.shape[3])
    lse = torch.empty(call.query.shape[:3], dtype=torch.float32, device=call.device)
    options, _ = _options_of(call.plan)
    inputs = (t.detach().transpose(1, 2) for t in (call.query, call.key, call.value))
    _flash_attn_fwd(*inputs, softmax_scale=call.scale, return_lse=True, out=output.transpose(1, 2), lse=lse, **options)
    return Forward(output if call.sink is None else scale_by_sink(output, lse, call.sink), lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value, given the gradients of the output and, optionally, of the LSE."""
    from flash_attn.cute.interface import _flash_attn_bwd  # pyrefly: ignore[missing-import]

    grads = Gradients(*(empty_rows(t, t.shape[3]) for t in (call.query, call.key, call.value)))
    slope = None if grad_lse is None else torch.where(lse > float("-inf"), grad_lse, 0.0)
    _, options = _options_of(call.plan)
    rows = (t.detach().transpose(1, 2) for t in (call.query, call.key, call.value, output, grad_output))
    dq, dk, dv = (t.transpose(1, 2) for t in grads)
    _flash_attn_bwd(*rows, lse, softmax_scale=call.scale, dlse=slope, dq=dq, dk=dk, dv=dv, **options)
    return grads


def _options_of(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments of the forward and the backward that follow from the plan; built once per plan."""
    options = plan.memo.get("flash4 options")
    if options is None:
        tables = tables_of(plan)
        rule = band_rule(tables.band, plan.n)
        options = plan.memo["flash4 options"] = (
            {"block_sparse_tensors": sparse_tensors(tables.partial, tables.whole), **rule},
            {"block_sparse_tensors": sparse_tensors(tables.partial_by_key, tables.whole_by_key), **rule},
        )
    return options


def sparse_tensors(partial: Lists, whole: Lists) -> Any:
    """Block lists [1, H, ...] in the format of FlashAttention-4."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # pyrefly: ignore[missing-import]

    return BlockSparseTensorsTorch(*partial, *whole, block_size=(BLOCK, BLOCK))


def band_rule(band: Band | None, n: int) -> dict[str, Any]:
    """Mask argument for partial blocks; empty if all elements count."""
    if band is None or (band.low <= -n and band.high >= n):
        return {}
    return {"mask_mod": _band_in_cute(None if band.low <= -n else band.low, None if band.high >= n else band.high)}


@lru_cache(maxsize=256)
def _band_in_cute(low: int | None, high: int | None) -> Any:
    """Band as a CuTe function with compiled-in bounds; a bound of None is omitted."""
    import cutlass.cute as cute  # pyrefly: ignore[missing-import]

    # ruff: noqa: ANN001, ANN202 (CuTe reads these functions as source)
    if low is None:

        @cute.jit
        def inside(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            return n_idx <= m_idx + high

    elif high is None:

        @cute.jit
        def inside(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            return n_idx >= m_idx + low

    else:

        @cute.jit
        def inside(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):
            return (n_idx >= m_idx + low) & (n_idx <= m_idx + high)

    return inside

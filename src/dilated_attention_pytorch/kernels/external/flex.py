"""FlexAttention of torch as a backend, for comparison on plans of one part.

On a GPU the first call of a shape compiles for tens of seconds. On the CPU torch computes densely and has no backward.
Gradients need a second forward pass, as FlexAttention keeps its saved tensors inside autograd.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...plan.plan import Plan
from ..call import AttentionCall, Extent, Forward, Gradients, laid_like
from ..sink import row_products, scale_by_sink
from .block_lists import lists_of, why_not_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

LARGEST_TABLE = 2**24
"""Most blocks of all head classes: a BlockMask and its element mask have an entry for each."""
LONGEST_DENSE = 8192
SHAPES = 256
"""Most compiled shapes; beyond its own, smaller limit torch would fail or compute all scores."""


def why_not(call: AttentionCall) -> str | None:
    """Reason why FlexAttention cannot run the call, or None."""
    query, plan = call.query, call.plan
    if query.device.type not in ("cuda", "cpu"):
        return f"needs a CUDA or CPU tensor, got {query.device.type}"
    if query.is_cuda and query.dtype is torch.float64:
        return "dtype must be float16, bfloat16 or float32 on a GPU, got float64"
    if query.is_cuda and plan.block_size % 128:
        return f"block_size must be a multiple of 128 on a GPU, got {plan.block_size}"
    if query.is_cuda and min(query.shape[3], call.value.shape[3]) < 16:
        return f"head width must be >= 16 on a GPU, got {min(query.shape[3], call.value.shape[3])}"
    inputs = query, call.key, call.value, call.sink
    if not query.is_cuda and any(t is not None and t.requires_grad for t in inputs):
        return "torch has no backward of FlexAttention on the CPU; the forward runs without gradients"
    if not query.is_cuda and plan.n > LONGEST_DENSE:
        return f"n must be <= {LONGEST_DENSE} on the CPU, where torch computes it densely, got {plan.n}"
    if call.key_padding_mask is not None:
        return "has no key padding mask"
    if call.dropout_p:
        return "has no dropout; pass dropout_p=0.0"
    reason = why_not_blocks(plan)
    if reason is not None:
        return reason
    part = plan.parts[0]
    size = len(part.by_query.rows) * part.keys.tiles
    if size > LARGEST_TABLE:
        return f"needs a table of all {size} blocks, and at most {LARGEST_TABLE} are allowed; use larger blocks"
    if plan.device != query.device:
        return f"the plan must be on {query.device}, got {plan.device}"
    return None


def workspace(call: AttentionCall, direction: str, extent: Extent) -> int:
    """Upper bound of the bytes besides results; see `registry.Backend`."""
    d, e = call.query.shape[3], call.value.shape[3]
    item, wide = call.query.dtype.itemsize, call.compute_dtype.itemsize
    dense = 8 * wide * call.plan.n if call.device.type == "cpu" else 0
    if direction == "forward":
        return (dense + 2 * item * e + 2 * wide) * extent.queries
    # A sink scales the gradient of the output in float32.
    scaled = 0 if call.sink is None else (item + wide) * e
    return (dense + scaled + 2 * item * (d + e) + 6 * wide) * extent.queries + 2 * item * (d + e) * extent.keys


def forward(call: AttentionCall) -> Forward:
    """Output and LSE of a call that `why_not` accepts."""
    with torch.no_grad():
        output, lse = _attend(call, call.query, call.key, call.value)
    if call.sink is not None:
        output = scale_by_sink(output, lse, call.sink)
    return Forward(laid_like(output, call.query), lse)


def backward(
    call: AttentionCall, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> Gradients:
    """Gradients of query, key and value, given the gradients of the output and, optionally, of the LSE."""
    inputs = [t.detach().requires_grad_() for t in (call.query, call.key, call.value)]
    with torch.enable_grad():
        results = _attend(call, *inputs)
    slope = torch.zeros_like(lse) if grad_lse is None else torch.where(lse > float("-inf"), grad_lse, 0.0)
    if call.sink is not None:
        # The output and LSE computed anew are those of the keys alone.
        share = torch.where(lse > float("-inf"), (results[1].detach() - lse).exp(), 0.0)
        slope = slope * share + (1 - share) * row_products(output, grad_output, lse.dtype)
        grad_output = (grad_output * share[..., None]).to(grad_output.dtype)
    grads = torch.autograd.grad(results, inputs, (grad_output, slope.to(lse.dtype)))
    return Gradients(*(laid_like(grad, t) for grad, t in zip(grads, inputs, strict=True)))


def _attend(call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    attend: Any = compiled() if query.is_cuda else flex_attention
    options: dict[str, Any] = {"scale": call.scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if query.is_cuda:
        # With more stages, the tables of `_elements` would exceed shared memory.
        options["kernel_options"] = {"num_stages": 1}
    with torch._dynamo.config.patch(recompile_limit=SHAPES), warnings.catch_warnings():
        # On the CPU the dense computation is intended.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        output, aux = attend(
            query, key, value, block_mask=block_mask(call.plan), return_aux=AuxRequest(lse=True), **options
        )
    return output, aux.lse


@cache
def compiled(dynamic: bool = False) -> Callable[..., Any]:
    """`flex_attention` compiled for each shape, or once for all lengths if `dynamic`."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=dynamic, fullgraph=True)


def block_mask(plan: Plan) -> BlockMask:
    """`BlockMask` of a plan; built once per plan."""
    cached = plan.memo.get("block mask")
    if cached is None:
        part = plan.parts[0]
        row, tile, mask = part.by_query.entries()
        tiles = part.queries.tiles
        # 0 for an excluded block, 1 for a whole block, 2 + m for a block with mask m. Heads without a class use the
        # last line, which is zero.
        table = torch.zeros(
            len(part.by_query.rows) // tiles + 1, tiles, part.keys.tiles, dtype=torch.int32, device="cpu"
        )
        table = table.to(plan.device)
        table[row // tiles, row % tiles, tile] = (mask + 2).int()
        own = _classes(plan, len(table))
        lines = table[own[:1] if bool((own == own[0]).all()) else own]
        cached = mask_of(lines > 1, lines == 1, plan.block_size, plan.n, _elements(plan, table, own))
        plan.memo["block mask"] = cached
    return cached


def _classes(plan: Plan, lines: int) -> Tensor:
    """Line of the table of each head."""
    own = plan.parts[0].head_class.long()
    return torch.where(own < 0, lines - 1, own)


def mask_of(partial: Tensor, whole: Tensor, block: int, n: int, elements: Callable[..., Tensor]) -> BlockMask:
    """BlockMask of blocks [H, rows, columns]; `elements` is the mask function of partial blocks."""
    from torch.nn.attention.flex_attention import BlockMask

    # Lists as wide as the sequence, as torch derives the number of blocks from their width.
    lists = (part[None] for table in (partial, whole) for part in lists_of(table, table.shape[-1]))
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=block, mask_mod=elements, seq_lengths=(n, n))


def _elements(plan: Plan, table: Tensor, own: Tensor) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Mask function of the pairs that the plan allows, from its masks; torch traces it."""
    block = plan.block_size
    bits = plan.masks.bits if len(plan.masks.bits) else plan.masks.bits.new_zeros(1, block, -(-block // 32))

    def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        entry = table[own[head], query // block, key // block]
        word = bits[(entry - 2).clamp(min=0), query % block, key % block // 32]
        return (entry == 1) | ((entry > 1) & (((word >> (key % block % 32)) & 1) == 1))

    return allowed

"""Peers on the same tensors and blocks: SDPA, FlexAttention, FlashAttention-4, cuDNN's sparse attention.

Every peer is timed through autograd, as the library is. Optional packages are imported when a peer is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from ...kernels.external import FLEX, flash4, flex
from ...kernels.external.block_lists import Band, Lists, lists_of

BLOCK = 128
CUDNN_BLOCKS, CUDNN_INTERVAL = "cudnn-blocks", "cudnn-interval"
"""cuDNN-frontend's attention on block lists, and on one interval of keys a row."""
NOT_INSTALLED = "not installed"
SDPA = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
Three = tuple[Tensor, Tensor, Tensor]
"""query, key, value"""


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Key blocks of each query block, equal for all heads."""

    table: Tensor
    """bool [query blocks, key blocks]; False above the diagonal if causal"""
    causal: bool
    block: int = BLOCK
    """Tokens of a block."""

    @property
    def whole(self) -> Tensor:
        """Blocks of which every pair is allowed."""
        return self.table.tril(-1) if self.causal else self.table

    @property
    def partial(self) -> Tensor:
        """Blocks on the diagonal of a causal mask."""
        return self.table & ~self.whole

    @property
    def pairs(self) -> int:
        """Allowed pairs of one query and one key, for one head."""
        triangle = self.block * (self.block + 1) // 2
        return int(self.whole.sum()) * self.block**2 + int(self.partial.sum()) * triangle

    @property
    def density(self) -> float:
        """Computed blocks over all blocks."""
        return float(self.table.float().mean())

    def intervals(self) -> Tensor:
        """First key and end of the keys of each row, int32 [2, n]; the blocks of a row must be adjacent."""
        side, device = len(self.table), self.table.device
        numbers = torch.arange(side, device=device)
        low = torch.where(self.table, numbers, side).amin(1)
        high = torch.where(self.table, numbers, -1).amax(1) + 1
        if not torch.equal(high - low, self.table.sum(1)):
            raise ValueError("the blocks of a row must be adjacent, got a table with gaps")
        low, high = (bound.repeat_interleave(self.block) * self.block for bound in (low, high))
        if self.causal:
            high = torch.minimum(high, torch.arange(1, len(high) + 1, device=device))
        return torch.stack((low, high)).int()


@dataclass(frozen=True, eq=False, kw_only=True)
class PeerProblem:
    """One call: tensors of shape (1, heads, n, d) and a block table."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    blocks: BlockTable | None
    """None for dense attention"""
    causal: bool

    @property
    def device(self) -> str:
        return self.query.device.type

    @property
    def grouped(self) -> bool:
        """Whether several query heads share one key head."""
        return self.query.shape[1] != self.key.shape[1]


@dataclass(frozen=True, eq=False, kw_only=True)
class PeerRunner:
    """A forward call ready for timing, and the inputs of its backward pass."""

    forward: Callable[[], Tensor]
    inputs: Three
    grad_output: Tensor
    heads_first: bool = True
    """(1, heads, n, d); otherwise (1, n, heads, d)"""

    def standard(self, tensor: Tensor) -> Tensor:
        """A result of this runner in the shape (1, heads, n, d)."""
        return tensor if self.heads_first else tensor.transpose(1, 2)


def why_not(name: str, problem: PeerProblem) -> str | None:
    """Reason why a peer cannot run a problem, or None; the library itself always tries."""
    if name in ("sdpa-cudnn", FLEX, "fa4", CUDNN_BLOCKS, CUDNN_INTERVAL) and problem.device != "cuda":
        return f"needs a CUDA device, got {problem.device}"
    if name == "fa4" and not flash4.installed():
        return NOT_INSTALLED
    if name == "fa4" and problem.blocks is not None and problem.blocks.block != BLOCK:
        return f"needs blocks of {BLOCK} on Hopper, got {problem.blocks.block}"
    if name in (CUDNN_BLOCKS, CUDNN_INTERVAL) and find_spec("cudnn") is None:
        return NOT_INSTALLED
    if name == CUDNN_BLOCKS:
        if problem.causal:
            return "has no causal mask"
        if problem.query.shape[3] != 128 or problem.grouped:
            return "its backward needs width 128 and as many key heads as query heads"
    return None


def build(name: str, problem: PeerProblem) -> PeerRunner:
    """A peer on a problem. Its kernels are compiled in the first call."""
    if name in SDPA:
        return _sdpa(name, problem)
    makers = {FLEX: _flex, "fa4": _flash_attention_4, CUDNN_BLOCKS: _cudnn_blocks, CUDNN_INTERVAL: _cudnn_interval}
    return makers[name](problem)


def _leaves(problem: PeerProblem, heads_first: bool = True) -> Three:
    """Leaf copies of query, key and value in the peer's memory order."""
    given = (problem.query, problem.key, problem.value)
    own = (t.detach() if heads_first else t.detach().transpose(1, 2) for t in given)
    query, key, value = (t.contiguous().clone().requires_grad_() for t in own)
    return query, key, value


def _sdpa(name: str, problem: PeerProblem) -> PeerRunner:
    query, key, value = _leaves(problem)

    def forward() -> Tensor:
        with sdpa_kernel(SDPA[name]):
            return scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=problem.grouped)

    return PeerRunner(forward=forward, inputs=(query, key, value), grad_output=problem.grad_output)


def _past(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def _flex(problem: PeerProblem) -> PeerRunner:
    assert problem.blocks is not None
    query, key, value = _leaves(problem)
    # Each shape is a kernel of its own; past this limit torch would run the whole score matrix eagerly.
    torch._dynamo.config.recompile_limit = flex.SHAPES
    # Timing repeats the backward pass on one graph, so a backward must not donate its buffers.
    torch._functorch.config.donated_buffer = False
    attend = flex.compiled()
    # One mask function for all patterns, so that a compiled kernel serves every pattern of a shape.
    blocks = problem.blocks
    mask = flex.mask_of(blocks.partial[None], blocks.whole[None], blocks.block, query.shape[2], _past)

    def forward() -> Tensor:
        return attend(query, key, value, block_mask=mask, enable_gqa=problem.grouped)

    return PeerRunner(forward=forward, inputs=(query, key, value), grad_output=problem.grad_output)


def _flash_attention_4(problem: PeerProblem) -> PeerRunner:
    from flash_attn.cute import flash_attn_func  # pyrefly: ignore[missing-import]

    query, key, value = _leaves(problem, heads_first=False)
    options: dict[str, Any] = {"causal": problem.causal}
    if problem.blocks is not None:
        n, tables = query.shape[1], (problem.blocks.partial, problem.blocks.whole)
        by_query, by_key = (
            flash4.sparse_tensors(*(Lists(*(part[None, None] for part in lists_of(table))) for table in side))
            for side in (tables, tuple(table.T for table in tables))
        )
        options = {"block_sparse_tensors": by_query, "block_sparse_tensors_bwd": by_key}
        options |= flash4.band_rule(Band(-n, 0 if problem.causal else n), n)

    def forward() -> Tensor:
        found = flash_attn_func(query, key, value, **options)
        return found[0] if isinstance(found, tuple) else found

    grad_output = problem.grad_output.transpose(1, 2).contiguous()
    return PeerRunner(forward=forward, inputs=(query, key, value), grad_output=grad_output, heads_first=False)


class _CudnnBlocks(torch.autograd.Function):
    """cuDNN-frontend's two functions as one differentiable call; it has none of its own."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, indices: Tensor, counts: Tensor, block: int
    ) -> Tensor:
        from cudnn.block_sparse_attention import (  # pyrefly: ignore[missing-import]
            block_sparse_attention_forward,
        )

        # Splitting long lists is offered for blocks of 64 alone.
        options = {"kv_splits": "auto"} if block == 64 else {}
        out = block_sparse_attention_forward(
            query, key, value, indices, q2k_block_nums=counts, sparse_block_size=block, **options
        )
        ctx.block = block
        ctx.save_for_backward(query, key, value, out["o_tensor"], out["lse_tensor"], indices, counts)
        return out["o_tensor"]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        from cudnn.block_sparse_attention import (  # pyrefly: ignore[missing-import]
            block_sparse_attention_backward,
        )

        *given, indices, counts = ctx.saved_tensors
        found = block_sparse_attention_backward(
            grads[0], *given, indices, q2k_block_nums=counts, sparse_block_size=ctx.block
        )
        return found["dq_tensor"], found["dk_tensor"], found["dv_tensor"], None, None, None


def _cudnn_blocks(problem: PeerProblem) -> PeerRunner:
    assert problem.blocks is not None
    query, key, value = _leaves(problem)
    counts, indices = (part.expand(1, query.shape[1], *part.shape) for part in lists_of(problem.blocks.table))
    lists = indices.int().contiguous(), counts.int().contiguous()

    def forward() -> Tensor:
        return _CudnnBlocks.apply(query, key, value, *lists, problem.blocks.block)  # pyrefly: ignore[missing-attribute]

    return PeerRunner(forward=forward, inputs=(query, key, value), grad_output=problem.grad_output)


def _cudnn_interval(problem: PeerProblem) -> PeerRunner:
    from cudnn.flex_attention import create_mask_plan, flex_attn_func  # pyrefly: ignore[missing-import]

    assert problem.blocks is not None
    query, key, value = _leaves(problem, heads_first=False)
    low, high = problem.blocks.intervals()
    # Intervals are [0, first row) and [second row, third row): the first is empty.
    bounds = torch.stack((torch.zeros_like(low), low, high))[None].contiguous()
    plan = create_mask_plan(bounds, query, key, value, build_backward=True)

    def forward() -> Tensor:
        return flex_attn_func(query, key, value, mask_plan=plan)

    grad_output = problem.grad_output.transpose(1, 2).contiguous()
    return PeerRunner(forward=forward, inputs=(query, key, value), grad_output=grad_output, heads_first=False)

"""What a user would pick instead, on the same tensors and the same blocks: SDPA, FlexAttention, FlashAttention-4.

Every peer is timed through autograd, as the library is. Optional packages are imported when a peer is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BLOCK = 128
NOT_INSTALLED = "not installed"
SDPA = {"sdpa-cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
Three = tuple[Tensor, Tensor, Tensor]
"""query, key, value"""


class Lists(NamedTuple):
    """Blocks of each row: how many, and which, ascending, in the first places of its line."""

    counts: Tensor
    """int32 [rows]"""
    indices: Tensor
    """int32 [rows, width]"""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which key blocks each query block sees, the same for every head."""

    table: Tensor
    """bool [query blocks, key blocks]; when causal, nothing above the diagonal"""
    causal: bool

    @property
    def whole(self) -> Tensor:
        """The blocks of which every pair is allowed."""
        return self.table.tril(-1) if self.causal else self.table

    @property
    def partial(self) -> Tensor:
        """The blocks cut by the diagonal."""
        return self.table & ~self.whole

    @property
    def pairs(self) -> int:
        """Allowed pairs of one query and one key, for one head."""
        triangle = BLOCK * (BLOCK + 1) // 2
        return int(self.whole.sum()) * BLOCK**2 + int(self.partial.sum()) * triangle

    @property
    def density(self) -> float:
        """Computed blocks over all blocks."""
        return float(self.table.float().mean())


@dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """One call: tensors of shape (1, heads, n, d), and who sees whom."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad_output: Tensor
    blocks: Blocks | None
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
class Runner:
    """A forward call ready to be timed, with what its backward needs."""

    forward: Callable[[], Tensor]
    inputs: Three
    grad_output: Tensor
    heads_first: bool = True
    """(1, heads, n, d); otherwise (1, n, heads, d)"""

    def standard(self, tensor: Tensor) -> Tensor:
        """A result of this runner in the shape (1, heads, n, d)."""
        return tensor if self.heads_first else tensor.transpose(1, 2)


def lists_of(table: Tensor, width: int | None = None) -> Lists:
    """A table of blocks as lists of the given width, or as wide as the longest row."""
    counts = table.sum(1)
    width = max(1, int(counts.max())) if width is None else width
    # A stable sort of "absent" brings the columns that are present to the front in ascending order.
    order = torch.argsort((~table).to(torch.uint8), dim=1, stable=True)
    return Lists(counts.to(torch.int32), order[:, :width].to(torch.int32).contiguous())


def why_not(name: str, problem: Problem) -> str | None:
    """Why a peer cannot run a problem, or None when it can (as the library itself always can try)."""
    if name in ("sdpa-cudnn", "flex", "fa4") and problem.device != "cuda":
        return f"needs a CUDA device, got {problem.device}"
    if name == "fa4" and not has_flash_attention_4():
        return NOT_INSTALLED
    return None


def build(name: str, problem: Problem) -> Runner:
    """A peer on a problem. Its kernels are compiled by the first call, not here."""
    if name in SDPA:
        return _sdpa(name, problem)
    return {"flex": _flex, "fa4": _flash_attention_4}[name](problem)


def _leaves(problem: Problem, heads_first: bool = True) -> Three:
    """Copies of query, key and value in the peer's own memory order, which gradients end at."""
    given = (problem.query, problem.key, problem.value)
    own = (t.detach() if heads_first else t.detach().transpose(1, 2) for t in given)
    query, key, value = (t.contiguous().clone().requires_grad_() for t in own)
    return query, key, value


def _sdpa(name: str, problem: Problem) -> Runner:
    query, key, value = _leaves(problem)

    def forward() -> Tensor:
        with sdpa_kernel(SDPA[name]):
            return scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=problem.grouped)

    return Runner(forward=forward, inputs=(query, key, value), grad_output=problem.grad_output)


def _past(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    # Each shape is a kernel of its own; past this limit torch would run the whole score matrix eagerly.
    torch._dynamo.config.recompile_limit = 256
    # A backward that gives its buffers away could not be repeated on one graph, which is how all are timed.
    torch._functorch.config.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _flex(problem: Problem) -> Runner:
    from torch.nn.attention.flex_attention import BlockMask

    assert problem.blocks is not None
    query, key, value = _leaves(problem)
    attend = _compiled_flex()
    n = query.shape[2]
    # Lists as wide as the sequence and one mask for all: the compiled kernel then serves every pattern of a shape.
    partial, whole = (lists_of(table, n // BLOCK) for table in (problem.blocks.partial, problem.blocks.whole))
    mask = BlockMask.from_kv_blocks(
        *(part[None, None] for part in (*partial, *whole)), BLOCK_SIZE=BLOCK, mask_mod=_past, seq_lengths=(n, n)
    )

    def forward() -> Tensor:
        return attend(query, key, value, block_mask=mask, enable_gqa=problem.grouped)

    return Runner(forward=forward, inputs=(query, key, value), grad_output=problem.grad_output)


@cache
def has_flash_attention_4() -> bool:
    """Whether `flash_attn.cute` and the compiler it is written in can be found."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in ("flash_attn.cute", "cutlass"))
    except ModuleNotFoundError:
        return False


@cache
def _past_in_cute() -> Any:
    import cutlass.cute as cute  # pyrefly: ignore[missing-import]

    @cute.jit
    def past(batch, head, m_idx, n_idx, seqlen_info, aux_tensors):  # noqa: ANN001, ANN202 (read as source by CuTe)
        return n_idx <= m_idx

    return past


def _flash_attention_4(problem: Problem) -> Runner:
    from flash_attn.cute import flash_attn_func  # pyrefly: ignore[missing-import]
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # pyrefly: ignore[missing-import]

    query, key, value = _leaves(problem, heads_first=False)
    options: dict[str, Any] = {"causal": problem.causal}
    if problem.blocks is not None:
        sides = []
        for transposed in (False, True):
            tables = (problem.blocks.partial, problem.blocks.whole)
            lists = [lists_of(table.T if transposed else table) for table in tables]
            fields = (part[None, None] for pair in lists for part in pair)
            sides.append(BlockSparseTensorsTorch(*fields, block_size=(BLOCK, BLOCK)))
        options = {"block_sparse_tensors": sides[0], "block_sparse_tensors_bwd": sides[1]}
        if problem.causal:
            options["mask_mod"] = _past_in_cute()

    def forward() -> Tensor:
        found = flash_attn_func(query, key, value, **options)
        return found[0] if isinstance(found, tuple) else found

    grad_output = problem.grad_output.transpose(1, 2).contiguous()
    return Runner(forward=forward, inputs=(query, key, value), grad_output=grad_output, heads_first=False)

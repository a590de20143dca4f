"""Attention over a sequence spread over ranks: fetch the keys the pattern needs, then compute as on one device."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any, NamedTuple, get_args
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ..errors import must
from ..kernels.dropout import fresh_seed
from ..kernels.registry import backend_named
from ..ops import AttentionOutput
from ..ops.attention import lengths_of
from ..ops.checks import check_masks, check_tensors
from ..patterns import Causal, Packed, Pattern, as_pattern
from .choose import Exchange, Machine, Overlap
from .comm import same_everywhere
from .engine import ContextParallel, Job, gradients_of, outcomes_of
from .local import Settings
from .shard import SequenceLayout
from .share import Problem, Share, shares_of
from .transport import GroupTransport, check_group, rank_in, wire_device

MOST_PREPARED = 64
"""Problems a group keeps the shares of."""


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    backend: str = "auto",
) -> Tensor:
    """`attention` for a sequence whose tokens are spread over the ranks of a group. Collective.

    Every rank gives its shard of query, key and value and receives its shard of the output: the rows that `attention`
    gives for the whole sequence. Only the rows of K and V that some query of this rank sees are sent to it.

    Args:
        query: (B, H, n, D), the tokens `layout.positions(rank)` of the sequence; n may be 0.
        key: (B, G, n, D).
        value: (B, G, n, E).
        pattern: who may see whom in the whole sequence; the same on every rank.
        layout: which rank holds which tokens; the same on every rank.
        group: who takes part; the default group if None. A layout of one rank needs none.
        is_causal: also require the key not to come after the query.
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, n), True where a key of this shard takes no part; on all ranks or on none.
        cu_seqlens: int (documents + 1): bounds of sequences packed one after another in the whole sequence (B must be
            1); the same on every rank.
        dropout_p: probability of dropping a weight. The first rank's seed decides, as it would on one device.
        overlap: "none" computes once all rows are here: the same bits for every number of ranks. "local" computes on
            own keys while the others travel, and lets queries that see everything travel instead of the keys.
        exchange: "direct" (each holder to each asker), "butterfly" (few messages, for dilated ladders on equal
            shards), "ring" (whole shards go round) or "auto": by predicted time. A ring adds up in another order.
        receive_budget: bytes of fetched rows that may be here at a time; what is more comes in stages, and once more
            in the backward pass. Sums then depend on the stages.
        machine: what predictions assume.
        backend: "auto", or the name of a backend, which then never falls back.

    >>> from dilated_attention_pytorch.distributed import SequenceLayout, context_parallel_attention
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16).unbind()
    >>> context_parallel_attention(q, k, v, "window:8", SequenceLayout.contiguous(100, 1)).shape
    torch.Size([1, 2, 100, 16])
    """
    return context_parallel_attention_with_lse(
        query,
        key,
        value,
        pattern,
        layout,
        group,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        dropout_p=dropout_p,
        overlap=overlap,
        exchange=exchange,
        receive_budget=receive_budget,
        machine=machine,
        backend=backend,
    ).output


def context_parallel_attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    layout: SequenceLayout,
    group: dist.ProcessGroup | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dropout_p: float = 0.0,
    overlap: Overlap = "none",
    exchange: Exchange = "auto",
    receive_budget: int | None = None,
    machine: Machine | None = None,
    backend: str = "auto",
) -> AttentionOutput:
    """`context_parallel_attention`, and the natural logarithm of each row's denominator; both differentiable."""
    call = Call(
        pattern, layout, is_causal, scale, enable_gqa, cu_seqlens, dropout_p, overlap, exchange, receive_budget, machine
    )
    seed = fresh_seed(query.device) if dropout_p and isinstance(query, Tensor) else None
    # Where one rank wants gradients and another does not, the first would wait for the second in backward.
    wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in (query, key, value))
    if torch.compiler.is_compiling():
        # As plain values: torch 2.11 takes no object of a class of ours for a constant.
        plain = {
            "pattern": pattern if isinstance(pattern, str) else pattern.describe(),
            "layout": (layout.world, layout.begins, layout.ranks, layout.n),
            "machine": None if machine is None else (machine.latency, machine.bandwidth, machine.flops),
            "cu_seqlens": None,
        }
        text = _written(tuple((call._asdict() | plain).items()), group, wanted, backend)
        tensors = query, key, value, key_padding_mask, cu_seqlens, seed
        return AttentionOutput(*torch.ops.dilated_attention.context_parallel(*tensors, text))
    job = _job(call, group, (query, key, value), key_padding_mask, seed, wanted, backend)
    if wanted:
        return AttentionOutput(*ContextParallel.apply(job, query, key, value))
    found = job.forward(job.shards([query], [key], [value]))
    return AttentionOutput(found.outputs[0], found.lses[0])


class Call(NamedTuple):
    """What a user asked, apart from tensors and ranks."""

    pattern: Pattern | str
    layout: SequenceLayout
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    cu_seqlens: Tensor | None = None
    dropout_p: float = 0.0
    overlap: Overlap = "none"
    exchange: Exchange = "auto"
    receive_budget: int | None = None
    machine: Machine | None = None

    def check_shard(self, rank: int, tensors: tuple[Tensor, Tensor, Tensor], padding: Tensor | None) -> None:
        """What must hold of one rank's tensors."""
        held = self.layout.lengths[rank]
        for name, x in zip(("query", "key", "value"), tensors, strict=True):
            if isinstance(x, Tensor) and x.dim() == 4 and x.shape[2] != held:
                raise must(f"{name} must hold the {held} tokens of rank {rank}", x.shape[2])
        # A rank may hold no token at all; everything else about its tensors must still be right.
        query, key, value = tensors if held else map(_one_token, tensors)
        check_tensors(query, key, value, self.enable_gqa)
        check_masks(tensors[0], padding, self.cu_seqlens)

    def problem(self, query: Tensor, key: Tensor, value: Tensor) -> Problem:
        """What is to be computed, with everything filled in and checked."""
        if not 0.0 <= self.dropout_p < 1.0:
            raise must("dropout_p must lie in [0, 1)", self.dropout_p)
        for name, kinds in (("overlap", Overlap), ("exchange", Exchange)):
            if getattr(self, name) not in get_args(kinds):
                raise must(f"{name} must be one of {', '.join(get_args(kinds))}", repr(getattr(self, name)))
        if self.receive_budget is not None and self.receive_budget < 1:
            raise must("receive_budget must be a number of bytes, at least 1", self.receive_budget)
        return Problem(
            self.resolved(query.shape[1]),
            query.shape[1],
            key.shape[1],
            len(query),
            (key.shape[3], value.shape[3]),
            query.itemsize,
            self.overlap,
            self.exchange,
            self.receive_budget,
            self.machine or Machine(),
        )

    def resolved(self, heads: int) -> Pattern:
        """The pattern of the whole sequence, with all it needs to know filled in."""
        whole = as_pattern(self.pattern)
        if self.is_causal:
            packed = isinstance(whole, Packed)
            whole = replace(whole, pattern=whole.pattern & Causal()) if packed else whole & Causal()
        if self.cu_seqlens is not None:
            whole = Packed(whole, lengths_of(self.cu_seqlens, self.layout.n))
        return whole.resolve(self.layout.n, heads)

    def scale_for(self, width: int) -> float:
        """The factor on the scores."""
        scale = width**-0.5 if self.scale is None else float(self.scale)
        if not math.isfinite(scale):
            raise must("scale must be finite", scale)
        return scale


def _one_token(x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:2], 1, x.shape[3]) if isinstance(x, Tensor) and x.dim() == 4 else x


def _job(
    call: Call,
    group: dist.ProcessGroup | None,
    tensors: tuple[Tensor, Tensor, Tensor],
    padding: Tensor | None,
    seed: Tensor | None,
    wanted: bool,
    backend: str,
) -> Job:
    """Check the call, compare it with the other ranks, and find this rank's share. Collective."""
    layout, several = call.layout, group is not None or call.layout.world > 1
    rank = rank_in(group, layout.world)
    problem, words, scale, failure = None, "", 1.0, None
    try:
        if several:
            check_group(
                group, layout.world, tensors[0].device if isinstance(tensors[0], Tensor) else torch.device("cpu")
            )
        call.check_shard(rank, tensors, padding)
        problem, scale = call.problem(*tensors), call.scale_for(tensors[0].shape[3])
        if backend != "auto":
            # A rank without tokens computes nothing, and one that found out later would leave others waiting.
            backend_named(backend)
        words = (
            f"{problem.pattern.describe()}, {layout}, batch {problem.batch}, {problem.heads} heads, "
            f"{problem.key_heads} key heads, widths {problem.widths}, {tensors[0].dtype}, scale {scale}, "
            f"dropout {call.dropout_p}, padding {'no' if padding is None else 'yes'}, gradients "
            f"{'yes' if wanted else 'no'}, overlap {problem.overlap}, exchange {problem.exchange}, "
            f"receive budget {problem.receive_budget}, {problem.machine}, backend {backend}"
        )
    except (TypeError, ValueError) as error:
        if not several:
            raise
        failure = error
    share, agreed_seed = _agreed(problem, words, failure, seed, layout, rank, group, several)
    device = tensors[0].device
    if seed is not None:
        seed = torch.tensor([agreed_seed], device=device)
    settings = Settings(scale, backend, call.dropout_p, seed)
    transport = GroupTransport(group, rank, layout.world)
    return Job(transport, [share.to(device)], settings, [padding], wanted)


_shares: WeakKeyDictionary[dist.ProcessGroup, dict[str, Share]] = WeakKeyDictionary()


def _agreed(
    problem: Problem | None,
    words: str,
    failure: Exception | None,
    seed: Tensor | None,
    layout: SequenceLayout,
    rank: int,
    group: dist.ProcessGroup | None,
    several: bool,
) -> tuple[Share, int]:
    """The rank's share, from before if every rank still has it; raises on every rank where one differs or failed."""
    start = 0 if seed is None else int(seed)
    transport = GroupTransport(group, rank, layout.world)
    if not several:
        assert problem is not None
        return shares_of(problem, layout, transport)[0], start
    members = dist.group.WORLD if group is None else group
    assert members is not None
    kept = _shares.setdefault(members, {})
    agreement = same_everywhere(words, failure, words in kept, start, group, wire_device(group))
    if not agreement.prepared:
        assert problem is not None
        while len(kept) >= MOST_PREPARED:
            kept.pop(next(iter(kept)))
        kept[words] = shares_of(problem, layout, transport)[0]
    return kept[words], agreement.seed


@torch.compiler.assume_constant_result
def _written(facts: tuple[tuple[str, Any], ...], group: dist.ProcessGroup | None, wanted: bool, backend: str) -> str:
    """Everything but tensors, as text that an operator can take: the fields of a call, group, gradients, backend."""
    told = dict(facts)
    members = dist.group.WORLD if group is None and told["layout"][0] > 1 else group
    return json.dumps([told, "" if members is None else members.group_name, wanted, backend])


def _read_job(tensors: list[Tensor], masks: list[Tensor | None], text: str) -> Job:
    facts, name, wanted, backend = json.loads(text)
    world, begins, ranks, n = facts["layout"]
    padding, facts["cu_seqlens"], seed = masks
    facts["layout"] = SequenceLayout(world, tuple(begins), tuple(ranks), n)
    facts["machine"] = None if facts["machine"] is None else Machine(*facts["machine"])
    group = _resolve_process_group(name) if name else None  # pyrefly: ignore[bad-argument-type]
    query, key, value = tensors
    return _job(Call(**facts), group, (query, key, value), padding, seed, wanted, backend)


_MASKS = "Tensor? padding, Tensor? cu_seqlens, Tensor? seed, str call"


@torch.library.custom_op(
    "dilated_attention::context_parallel",
    mutates_args=(),
    schema=f"(Tensor query, Tensor key, Tensor value, {_MASKS}) -> (Tensor, Tensor)",
)
def _forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    query, key, value, *masks, text = arguments
    job = _read_job([query, key, value], masks, text)
    found = job.forward(job.shards([query], [key], [value]))
    return found.outputs[0], found.lses[0]


@torch.library.custom_op(
    "dilated_attention::context_parallel_backward",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, "
    f"{_MASKS}) -> (Tensor, Tensor, Tensor)",
)
def _backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value, output, lse, grad_output, grad_lse, *masks, text = arguments
    job = _read_job([query, key, value], masks, text)
    shards = job.shards([query], [key], [value])
    # A traced graph keeps no fetched rows: they come again.
    totals = job.backward(shards, outcomes_of([output], [lse], [grad_output], [grad_lse]), [])
    return tuple(gradients_of(shards, totals))  # pyrefly: ignore[bad-return]


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3]), query.new_empty(query.shape[:3], dtype=lse_dtype)


@_backward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(x.new_empty(x.shape) for x in (query, key, value))  # pyrefly: ignore[bad-return]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiated(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    *tensors, padding, cu_seqlens, seed, output, lse = ctx.saved_tensors
    found = torch.ops.dilated_attention.context_parallel_backward(
        *tensors, output, lse, grad_output, grad_lse, padding, cu_seqlens, seed, ctx.call
    )
    return *found, *(None,) * 4


_forward.register_autograd(_differentiated, setup_context=_keep)

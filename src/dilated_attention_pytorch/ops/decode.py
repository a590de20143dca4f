"""Single rows of causal attention against cached keys, in time of the keys they see."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import must, must_be
from ..kernels.sink import apply_sink
from ..patterns import Pattern, as_pattern
from ..plan.closed_forms import ClosedForm, Domain, LiveKeys, closed_form
from .attention import attention, empty_attention
from .bias import kernel_bias
from .checks import autocasted, check_masks, check_sink, check_softcap, check_tensors, full_precision
from .derivatives import scale_of

CPU = torch.device("cpu")
MOST_ROWS = 64
"""From this many new tokens on, one whole computation is cheaper than row after row."""


class RowKeys(NamedTuple):
    """Keys that one row sees, padded to the longest list of any head."""

    positions: Tensor
    """int64 (H, K)"""
    bias: Tensor
    """float64 (H, K): logarithm of how often each counts; -inf where padded"""


def attention_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern | str,
    positions: int | Sequence[int] | Tensor,
    *,
    length: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    key_padding_mask: Tensor | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    live: LiveKeys | int = 0,
    backend: str = "auto",
    memory_budget: int | float | None = None,
) -> Tensor:
    """Rows of causal attention for queries that follow cached keys.

    Args:
        query: (B, H, M, D), M consecutive tokens, usually one.
        key: (B, G, L, D), the cache, these tokens' own keys included; G = H, or a divisor of H when `enable_gqa`.
        value: (B, G, L, E).
        pattern: keys that each query attends to; always causal here.
        positions: position of the first of the M tokens, for all samples or one for each; a tensor is read by the host.
        length: length of the whole sequence, for patterns whose layout depends on it (a ratio of all blocks).
        scale: factor on the scores; 1 / sqrt(D) by default.
        enable_gqa: let query head h read key head h // (H / G).
        key_padding_mask: bool (B, L), True where a key is ignored.
        sink: (H,), one more logit in the softmax of every row of a head, see `attention`.
        softcap: bound of the scores, see `attention`.
        bias: (H, 2 * R + 1), table by distance, see `attention`.
        live: positions that the cache holds if not all, or the position of its first key.
        backend: for many tokens at once, see `attention`, as `memory_budget`.

    Returns:
        (B, H, M, E): row t of the full computation, in time proportional to its keys.

    >>> from dilated_attention_pytorch import attention
    >>> q, k, v = torch.randn(3, 1, 2, 50, 8).unbind()
    >>> row = attention_step(q[:, :, 40:41], k, v, "dilated:16x1,64x4", 40)
    >>> torch.allclose(row, attention(q, k, v, "dilated:16x1,64x4", is_causal=True)[:, :, 40:41], atol=1e-6)
    True
    """
    whole = as_pattern(pattern)
    check_tensors(query, key, value, enable_gqa, one_length=False)
    check_masks(key, key_padding_mask, None)
    check_softcap(softcap)
    bias, _ = kernel_bias(query, bias, None)
    if sink is not None:
        check_sink(query, sink)
    (query,) = autocasted(query)
    batch, heads, rows, width = query.shape
    numbers = positions.tolist() if isinstance(positions, Tensor) else positions
    first = [numbers] * batch if isinstance(numbers, int) else list(numbers)
    if len(first) != batch or not all(isinstance(number, int) and number >= 0 for number in first):
        raise must(f"positions must be one number or {batch}, each >= 0", first)
    scale = scale_of(scale, width)
    if not batch or not rows:
        return empty_attention(query, key, value)[0]
    live = LiveKeys(0, live) if isinstance(live, int) else live
    last_slot = live.slots(torch.tensor([max(first) + rows - 1], device="cpu"))
    if int(last_slot) >= key.shape[2]:
        raise must(
            "the cache must hold the keys of the new tokens too", f"{key.shape[2]} keys for position {max(first)}"
        )
    if rows < MOST_ROWS or live != LiveKeys() or len(set(first)) > 1:
        where = length, scale, key_padding_mask, sink, softcap, bias, live
        with full_precision(query.device):
            return torch.stack(
                [_row(query[:, :, m], key, value, whole, [t + m for t in first], *where) for m in range(rows)], 2
            )
    before, end = first[0], first[0] + rows
    output = attention(
        torch.nn.functional.pad(query, (0, 0, before, 0)),
        key[:, :, :end],
        value[:, :, :end],
        prefix_pattern(whole, length, end, heads),
        is_causal=True,
        scale=scale,
        enable_gqa=True,
        key_padding_mask=None if key_padding_mask is None else key_padding_mask[:, :end],
        sink=sink,
        softcap=softcap,
        bias=bias,
        backend=backend,
        memory_budget=memory_budget,
    )
    return output[:, :, before:]


def _row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    positions: list[int],
    length: int | None,
    scale: float,
    key_padding_mask: Tensor | None,
    sink: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
    live: LiveKeys,
) -> Tensor:
    batch, heads, _ = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    seen = {t: seen_keys(pattern, length, t, heads) for t in set(positions)}
    longest = max(row.positions.shape[1] for row in seen.values())
    if longest == 0:
        # In the graph of every input, whose gradients are 0.
        given = (x for x in (query, key, value, sink, bias) if x is not None)
        return query.new_zeros(batch, heads, value.shape[-1]) + sum(0 * x[..., :0].sum() for x in given)
    uniform = len(seen) == 1
    rows = [_padded(*seen[t], longest) for t in (positions[:1] if uniform else positions)]
    index, log_count = (torch.stack(column).to(query.device) for column in zip(*rows, strict=True))
    slots = live.slots(index).clamp(min=0).expand(batch, heads, longest)
    sample = torch.arange(batch, device=query.device)[:, None, None]
    group = torch.arange(heads, device=query.device)[None, :, None] // (heads // key.shape[1])
    absent = log_count == -torch.inf
    if key_padding_mask is not None:
        absent = absent | key_padding_mask[sample, slots]
    # Rows of the cache take the query's dtype, which is autocast's, as they are read. What takes no part may hold
    # anything, and 0 times NaN is NaN, in a gradient too.
    read = (x[sample, group, slots].to(query.dtype).to(dtype) for x in (key, value))
    keys, values = (x.masked_fill(absent[..., None], 0.0) for x in read)
    scores = scale * torch.einsum("bhd,bhkd->bhk", query.to(dtype), keys)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    if bias is not None:
        radius = bias.shape[1] // 2
        distance = index - torch.tensor(positions[: len(index)], device=index.device)[:, None, None]
        entry = (distance + radius).clamp(0, 2 * radius)
        scores = scores + bias.expand(len(index), -1, -1).gather(2, entry)
    scores = (scores + log_count.to(dtype)).masked_fill(absent, -torch.inf)
    any_key = (scores != -torch.inf).any(-1, keepdim=True)
    scores = torch.where(any_key, scores, 0.0)
    output = torch.einsum("bhk,bhke->bhe", torch.where(any_key, scores.softmax(-1), 0.0), values)
    if sink is not None:
        lse = torch.where(any_key[..., 0], scores.logsumexp(-1), -torch.inf)
        output = apply_sink(output[:, :, None], lse[:, :, None], sink)[:, :, 0]
    return output.to(query.dtype)


def _padded(positions: Tensor, bias: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    more = longest - positions.shape[-1]
    if more == 0:
        return positions, bias
    return torch.nn.functional.pad(positions, (0, more)), torch.nn.functional.pad(bias, (0, more), value=-torch.inf)


@lru_cache(maxsize=256)
def seen_keys(pattern: Pattern, length: int | None, position: int, heads: int) -> RowKeys:
    """Keys that the causal row at `position` sees in every head."""
    resolved, domain = _laid_out(pattern, length, position, heads)
    form = closed_form(resolved)
    by_class: dict[object, tuple[Tensor, Tensor]] = {}
    rows = []
    for head in range(heads):
        own = form.head_key(head)
        if own not in by_class:
            by_class[own] = _seen_by(form, position, head, domain)
        rows.append(by_class[own])
    longest = max(len(keys) for keys, _ in rows)
    positions, bias = zip(*(_padded(*row, longest) for row in rows), strict=True)
    return RowKeys(torch.stack(positions), torch.stack(bias))


def _seen_by(form: ClosedForm[Any], t: int, head: int, domain: Domain) -> tuple[Tensor, Tensor]:
    ranges = [torch.arange(s.start, s.stop, s.step, device="cpu") for s in form.row_keys(t, head, domain) if len(s)]
    keys = torch.cat(ranges).unique() if ranges else torch.arange(0, device="cpu")
    times = form.count(torch.tensor(t, device="cpu"), keys, head, domain).to(torch.float64)
    return keys[times > 0], times[times > 0].log()


def _laid_out(pattern: Pattern, length: int | None, position: int, heads: int) -> tuple[Pattern, Domain]:
    if length is None:
        check_decodable(pattern, None)
        # Doubling, so that a growing sequence lays its blocks out a logarithmic number of times.
        length = max(1024, 1 << position.bit_length())
    elif position >= length:
        raise must(f"positions must lie below the length {length}", position)
    return _resolved_domain(pattern, length, heads)


@lru_cache(maxsize=32)
def _resolved_domain(pattern: Pattern, length: int, heads: int) -> tuple[Pattern, Domain]:
    check_decodable(pattern, length)
    return pattern.resolve(length, heads), Domain(length, CPU)


def check_decodable(pattern: Pattern, length: int | None) -> None:
    """Refuse patterns without later rows: packed sequences, and layouts of an unknown length."""
    form = closed_form(pattern)
    if form.is_packed:
        raise must_be("a decoded pattern must be of one sequence", pattern, "Decode each document with its own cache.")
    for side in form.sides:
        check_decodable(side, length)
    if length is None and not form.sides and form.follows_length:
        raise must("length must be given for a pattern that depends on it", f"{pattern} without it")


def live_keys(pattern: Pattern, length: int | None, position: int, heads: int) -> LiveKeys:
    """Keys that rows from `position` on can still see; a cache may drop the others."""
    resolved, domain = _laid_out(pattern, length, position, heads)
    return closed_form(resolved).live_keys(position, heads, domain, length is not None)


def prefix_pattern(pattern: Pattern, length: int | None, n: int, heads: int) -> Pattern:
    """Pattern for the first `n` tokens whose causal rows equal those of the whole sequence."""
    check_decodable(pattern, length)
    if length is None or n == length:
        return pattern
    form = closed_form(pattern)
    if form.sides:
        return form.combine([prefix_pattern(side, length, n, heads) for side in form.sides])
    if not form.follows_length:
        return pattern
    resolved, domain = _resolved_domain(pattern, length, heads)
    return closed_form(resolved).prefix(n, heads, domain)

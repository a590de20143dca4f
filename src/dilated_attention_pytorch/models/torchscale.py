"""Dilated attention as published checkpoints were trained with it: torchscale's padding and torchscale's gradient.

torchscale fills the last segment of a branch, and every segment whose length its rate does not divide, with zero keys
and zero values, and masks none of them. A zero key scores 0 and adds exp(0) = 1 to the denominator and nothing to the
numerator. So what it computes is exact attention times `exp(lse) / (exp(lse) + zeros)`, `zeros` counting the zero keys
that a row meets in all its branches; nothing has to be padded. A causal row comes before them and meets none.

It mixes branches under `no_grad`, which changes no output and leaves a term out of the gradient.

It never takes the fill of a segment out again. Where a sequence has several segments whose length the rate does not
divide, the outputs of segment k are placed k times the fill too late, and rows of the fill, whose query is zero, stand
where a segment ends (`shifted_segments`). The slide encoder's fourth branch, 185,363 tokens at rate 8, is one of those:
longer slides are off by 5 tokens in the second segment, 10 in the third.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import must
from ..ops import attention_with_lse
from ..ops.checks import require
from ..patterns import Dilated, Pattern


def check_published(pattern: Pattern) -> Dilated:
    """`pattern` if torchscale's padding and gradient mean something for it."""
    if not isinstance(pattern, Dilated) or pattern.heads != "all" or pattern.overlap != "count":
        raise must(
            "zero_padding and detach_mixing must come with a dilated pattern whose branches all heads mix", pattern
        )
    return pattern


def zero_keys(pattern: Dilated, lengths: Tensor, n: int, heads: int) -> Tensor:
    """Number of zero keys of each row, int64 (B, H, N): `lengths` (B) are the real tokens of each sample.

    >>> zero_keys(Dilated((4,), (1,)), torch.tensor([6]), 6, 1).tolist()
    [[[0, 0, 0, 0, 2, 2]]]
    """
    whole = pattern.resolve(n, heads)
    assert isinstance(whole, Dilated)
    token = torch.arange(n, device=lengths.device)
    length = lengths[:, None, None]
    total = torch.zeros(len(lengths), heads, n, dtype=torch.int64, device=lengths.device)
    for index, (segment, rate) in enumerate(whole.branches):
        residue = torch.tensor([int(whole.sampled_residue(index, h)) for h in range(heads)], device=lengths.device)
        residue = residue[:, None]
        # A segment longer than the sequence is cut down to it before it is filled up to a multiple of the rate.
        width = length.clamp(max=segment)
        sampled = token % width % rate == residue
        real = (length - token // width * width).clamp(max=width)
        seen = (real - residue + rate - 1).clamp(min=0) // rate
        total += torch.where(sampled & (token < length), (width + rate - 1) // rate - seen, 0)
    return total


def real_lengths(key_padding_mask: Tensor | None, batch: int, n: int, device: torch.device) -> Tensor:
    """Real tokens of each sample; padding must follow them, for zero keys are counted from there."""
    if key_padding_mask is None:
        return torch.full((batch,), n, device=device)
    lengths = (~key_padding_mask).sum(1)
    after = torch.arange(n, device=device) >= lengths[:, None]
    return require(
        lengths,
        (after == key_padding_mask).all() & (lengths > 0).all(),
        "with zero_padding, key_padding_mask must hide the end of each sample and leave a token",
        lambda: "another mask",
        "Put padding last, or load the model with zero_padding=False.",
    )


def shift_segments(
    output: Tensor, lse: Tensor, value: Tensor, branch: Dilated, lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, E) and LSE of one branch where torchscale places them.

    A token receives the row of the filled segments that has its number: that of an earlier token, or a row of the fill,
    which attends to all `count` sampled tokens of its segment with a score of 0.
    """
    heads, n = output.shape[1:3]
    whole = branch.resolve(n, heads)
    assert isinstance(whole, Dilated)
    ((segment, rate),) = branch.branches
    token, device = torch.arange(n, device=output.device), output.device
    width = lengths[:, None].clamp(max=segment)
    pitch = -(-width // rate) * rate
    number, offset = token // pitch, token % pitch
    is_fill = (offset >= width)[:, None]
    source = (number * width + offset).clamp(max=n - 1)[:, None].expand(-1, heads, -1)
    residue = torch.tensor([int(whole.sampled_residue(0, head)) for head in range(heads)], device=device)[:, None]
    sampled = (token % width % rate)[:, None] == residue
    sampled = sampled & (token < lengths[:, None])[:, None]
    value = value.repeat_interleave(heads // value.shape[1], 1) * sampled[..., None]
    sums = torch.zeros_like(value).scatter_add(2, (token // width)[:, None, :, None].expand_as(value), value)
    count = (pitch // rate)[:, None]
    fill = sums.gather(2, number[:, None, :, None].expand_as(value)) / count[..., None].to(value.dtype)
    is_row = is_fill & ((offset % rate)[:, None] == residue)
    shifted = output.gather(2, source[..., None].expand_as(output))
    output = torch.where(is_fill[..., None], fill * is_row[..., None], shifted)
    fill_lse = torch.where(is_row, count.to(lse.dtype).log(), -torch.inf)
    return output, torch.where(is_fill, fill_lse, lse.gather(2, source))


def published_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Pattern,
    *,
    zero_padding: bool,
    detach_mixing: bool,
    shifted_segments: bool = False,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    **settings: Any,
) -> Tensor:
    """`attention` with torchscale's padding, placement or gradient; other arguments are those of `attention`."""
    whole = check_published(pattern)
    if cu_seqlens is not None:
        raise must("torchscale's attention must come without cu_seqlens", "packed sequences")
    if given := [name for name in ("softcap", "bias") if name in settings]:
        raise must("torchscale's attention must come without a soft cap and a bias", " and ".join(given))
    batch, heads, n, _ = query.shape
    branches = [whole]
    shifted = shifted_segments and any(w < n and w % r for w, r in whole.branches)
    if shifted or (detach_mixing and torch.is_grad_enabled()):
        # The block offset depends on the rate alone, so a branch by itself samples what it samples among the others.
        branches = [Dilated((w,), (r,), whole.offset) for w, r in whole.branches]
    lengths = None
    if shifted or (zero_padding and not is_causal):
        lengths = real_lengths(key_padding_mask, batch, n, query.device)
    outputs, lses = [], []
    for branch in branches:
        masks = {"is_causal": is_causal, "key_padding_mask": key_padding_mask}
        output, lse = attention_with_lse(query, key, value, branch, **masks, **settings)
        if lengths is not None and zero_padding and not is_causal:
            zeros = zero_keys(branch, lengths, n, heads).to(lse.dtype)
            share = torch.where(zeros > 0, (lse - zeros.clamp(min=1).log()).sigmoid(), 1.0)
            output = output * share[..., None].to(output.dtype)
            lse = torch.logaddexp(lse, zeros.log())
        if lengths is not None and shifted:
            output, lse = shift_segments(output, lse, value, branch, lengths)
        outputs.append(output)
        lses.append(lse)
    if len(branches) == 1:
        return outputs[0]
    every = torch.stack(lses)
    every = every.detach() if detach_mixing else every
    # A row that no branch samples has an LSE of -inf in all of them and shares of 0.
    sampled = every.isfinite()
    shares = every.masked_fill(~sampled, torch.finfo(every.dtype).min).softmax(0) * sampled
    return sum(
        (o * s[..., None].to(o.dtype) for o, s in zip(outputs, shares, strict=True)), torch.zeros_like(outputs[0])
    )

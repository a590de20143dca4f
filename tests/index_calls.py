"""Calls of `selected_attention` on drawn index tensors, and their errors against the dense formula in float64."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from oracle import dense_attention, error
from strategies import Draw
from torch import Tensor

from dilated_attention_pytorch import selected_attention


def seen_pairs(indices: Tensor, n: int, size: int, heads: int, is_causal: bool) -> Tensor:
    """Pairs that lists allow, bool (b, h, n, n); values that are no block are ignored."""
    batch, scope, rows, _ = indices.shape
    blocks = -(-n // size)
    inside = torch.where((indices >= 0) & (indices < blocks), indices, blocks).long()
    listed = torch.zeros(batch, scope, rows, blocks + 1, dtype=torch.bool).scatter_(-1, inside, True)[..., :-1]
    listed = listed.repeat_interleave(heads // scope, 1)
    token = torch.arange(n)
    seen = listed[:, :, token if rows == n else token // size][..., token // size]
    return seen & (token <= token[:, None]) if is_causal else seen


def same_document(cu_seqlens: Tensor, n: int) -> Tensor:
    """Pairs of tokens of one document, bool (n, n)."""
    document = torch.searchsorted(cu_seqlens, torch.arange(n), right=True)
    return document[:, None] == document


def with_sink(output: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """The sink as one more logit of a softmax, whose value is 0."""
    top = torch.maximum(lse, sink[:, None]).detach()
    weight = (lse - top).exp()
    return output * (weight / (weight + (sink[:, None] - top).exp()))[..., None]


class IndexCall(NamedTuple):
    """One call with drawn indices: duplicates, holes, rows without blocks, any order."""

    per_token: bool
    is_causal: bool = False
    n: int = 40
    size: int = 16
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    scope: int = 1
    """Heads of the indices"""
    entries: int = 4
    counted: bool = False
    """Valid entries are counted; others hold arbitrary values."""
    padded: bool = False
    wild: bool = False
    """Values that are no block, which a GPU ignores"""
    seed: int = 0
    documents: int = 0
    """Documents of a packed sequence, some of them empty; 0 for none"""

    def cu_seqlens(self) -> Tensor | None:
        """Bounds of the documents, for a batch of one."""
        if not self.documents:
            return None
        draw = torch.Generator().manual_seed(self.seed + 1)
        inner = torch.randint(self.n + 1, (self.documents - 1,), generator=draw).sort().values
        edges = torch.tensor([0]), inner, torch.tensor([self.n])
        return torch.cat(edges).to(torch.int32 if self.seed % 2 else torch.int64)

    def lists(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Indices, counts, and the indices that hold."""
        draw = torch.Generator().manual_seed(self.seed)
        blocks = -(-self.n // self.size)
        rows = self.n if self.per_token else blocks
        shape = self.batch, self.scope, rows, self.entries
        indices = torch.randint(-1, blocks, shape, generator=draw, dtype=torch.int32)
        indices[torch.rand(shape[:3], generator=draw) < 0.2] = -1
        wrong = torch.rand(shape, generator=draw) < 0.2
        values = torch.tensor([-(2**31), -7, blocks, 2**31 - 1], dtype=torch.int32)
        luck = values[torch.randint(4, shape, generator=draw)]
        if self.wild:
            indices = torch.where(wrong, luck, indices)
        if not self.counted:
            return indices, None, indices
        counts = torch.randint(self.entries + 1, shape[:3], generator=draw, dtype=torch.int32)
        past = torch.arange(self.entries) >= counts[..., None]
        return torch.where(past, luck, indices), counts, indices.masked_fill(past, -1)

    def errors(
        self,
        backend: str = "auto",
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
        rules: AbstractContextManager[object] | None = None,
        widths: tuple[int, int] = (8, 6),
    ) -> dict[str, float]:
        """Of output, LSE and the gradients of query, key, value and sink."""
        draw = torch.Generator().manual_seed(self.seed)
        lead = [(self.heads, widths[0]), (self.key_heads, widths[0]), (self.key_heads, widths[1])]
        given = [torch.randn(self.batch, h, self.n, d, generator=draw, dtype=torch.float64) for h, d in lead]
        given.append(torch.randn(self.heads, generator=draw, dtype=torch.float64))
        given = [x.to(dtype) for x in given[:3]] + [given[3].to(torch.promote_types(dtype, torch.float32))]
        shape = self.batch, self.heads, self.n
        slopes = torch.randn(*shape, widths[1], generator=draw), torch.randn(*shape, generator=draw)
        padding = torch.arange(self.n) >= torch.tensor([self.n, self.n // 2])[torch.arange(self.batch) % 2, None]
        padding = padding if self.padded else None
        indices, counts, held = self.lists()
        bounds = self.cu_seqlens()
        found = []
        for exact in (False, True):
            kind = torch.float64 if exact else None
            leaves = [x.detach().to("cpu" if exact else device, kind or x.dtype).requires_grad_() for x in given]
            with nullcontext() if exact or rules is None else rules:
                if exact:
                    seen = seen_pairs(held, self.n, self.size, self.heads, self.is_causal)
                    seen = seen if bounds is None else seen & same_document(bounds, self.n)
                    output, lse = dense_attention(*leaves[:3], seen.double(), key_padding_mask=padding)
                    output = with_sink(output, lse, leaves[3])
                else:
                    output, lse = selected_attention(
                        *leaves[:3],
                        indices.to(device),
                        None if counts is None else counts.to(device),
                        granularity=self.size,
                        is_causal=self.is_causal,
                        enable_gqa=True,
                        sink=leaves[3],
                        cu_seqlens=None if bounds is None else bounds.to(device),
                        key_padding_mask=None if padding is None else padding.to(device),
                        return_lse=True,
                        backend=backend,
                    )
                grad_output, grad_lse = (x.to(lse.device, lse.dtype) for x in slopes)
                # A row without a key gives its LSE no slope.
                grad_lse = torch.where(lse > -torch.inf, grad_lse, 0.0)
                loss = (output * grad_output).sum() + (lse.clamp(min=-1e30) * grad_lse).sum()
                found.append([output, lse, *torch.autograd.grad(loss, leaves)])
        names = "output", "lse", "query", "key", "value", "sink"
        return {name: error(got.detach(), want.detach()) for name, got, want in zip(names, *found, strict=True)}


def drawn_call(draw: Draw, sizes: tuple[int, ...] = (16, 32)) -> IndexCall:
    """Some call of `selected_attention`."""
    key_heads, group = draw.choice([(1, 1), (2, 1), (1, 3), (2, 2)])
    heads = key_heads * group
    documents = draw.integer(0, 6)
    return IndexCall(
        draw.choice([False, True]),
        draw.choice([False, True]),
        draw.integer(1, 90),
        draw.choice(sizes),
        1 if documents else draw.integer(1, 2),
        heads,
        key_heads,
        draw.choice([1, key_heads, heads]),
        draw.integer(0, 6),
        draw.choice([False, True]),
        draw.choice([False, True]),
        False,
        draw.integer(0, 999),
        documents,
    )

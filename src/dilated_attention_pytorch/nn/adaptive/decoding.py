"""Decoding with learned attention: a token selects among the blocks before its own, by cached features."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import must
from ...ops.checks import autocasted, cast_dtype, full_precision
from ...patterns import Full
from ...selection.backend import select_rows, summarise
from ...selection.distill import spans
from ...selection.scores import BlockScores, KeyFeatures, QueryFeatures, cast_layers, features, scaled_halves
from ...selection.summaries import score_dtype
from ...selection.types import shared_blocks
from ..kv_cache import KVCache

if TYPE_CHECKING:
    from .module import BlockSparseAdaptive

GATHERED = 2**24
"""Numbers of gathered keys and values held at a time."""


class AdaptiveCache(KVCache):
    """KV cache of learned attention.

    All keys stay, since any block may be chosen. Features of a block are computed once, when it is complete; the
    unfinished block is every token's own, which is always seen. Step t returns row t of the computation over the tokens
    up to it.

    Args:
        layer: the attention, in evaluation mode.
        length: a bound on the tokens.

    >>> from dilated_attention_pytorch.nn import MultiheadBlockSparseAdaptive
    >>> module = MultiheadBlockSparseAdaptive(64, 4, [4096], [1], block_size=16).eval()
    >>> cache = module.cache()
    >>> with torch.no_grad():
    ...     prompt = module(torch.randn(1, 100, 64), is_causal=True, cache=cache)[0]
    ...     module(torch.randn(1, 1, 64), is_causal=True, cache=cache)[0].shape
    torch.Size([1, 1, 64])
    """

    def __init__(self, layer: BlockSparseAdaptive, length: int | None = None) -> None:
        super().__init__(Full(), length)
        if layer.is_weighted():
            raise must("a cache must come with blocks kept as they are", "scores that weigh them",
                       'Use hard_sparsity=True and score_gradient="distill" or "none".')  # fmt: skip
        self.layer = layer
        self._features: list[Tensor] = []
        """Features of keys, then of means of queries, by block, (b, s, blocks, ...); zero for incomplete blocks. The
        match of 16-bit queries is stored as ranking rounds it, in float16, with its scales at the end."""
        self._queries: Tensor | None = None
        """(2, b, h, block size, d): queries of the last complete block, and of the tokens since then"""

    @property
    def nbytes(self) -> int:
        """Memory held."""
        own = [*self._features, *([] if self._queries is None else [self._queries])]
        return super().nbytes + sum(x.numel() * x.element_size() for x in own)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # pyrefly: ignore[bad-override]
        """Add tokens and return their rows of causal attention; see `KVCache.attend`."""
        if self.layer.training:
            raise must("a cache must come with a layer that does not explore", "training", "Call eval() first.")
        return super().attend(query, key, value)

    def reorder(self, samples: Tensor) -> None:
        """Continue sample i from the tokens of sample `samples[i]`, as a beam search does."""
        super().reorder(samples)
        self._features = [x[samples] for x in self._features]
        self._queries = None if self._queries is None else self._queries[:, samples]

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        found = self.layer(*(x.transpose(1, 2) for x in (query, key, value)), is_causal=True)
        size = self.layer.block_size
        done = [length // size for length in self.lengths]
        self._queries = query.new_zeros(2, *query.shape[:2], size, query.shape[3])
        if max(done):
            end = max(done) * size
            self._store(slice(None), 0, query[:, :, :end], key[:, :, :end])
        for sample, (blocks, length) in enumerate(zip(done, self.lengths, strict=True)):
            self._queries[0, sample] = query[sample, :, (blocks - 1) * size : blocks * size].detach() if blocks else 0
            rest = query[sample, :, blocks * size : length].detach()
            self._queries[1, sample, :, : rest.shape[1]] = rest
            for stored in self._features:
                stored[sample, :, blocks:] = 0
        return found.transpose(1, 2)

    @torch.no_grad()
    def _store(self, samples: Any, first: int, query: Tensor, key: Tensor) -> None:
        """Store features of complete blocks from `first` on."""
        layer = self.layer
        settings, parameters = layer.config.settings(layer.block_size, True), layer.scorer.selecting_parameters()
        with full_precision(query.device):
            layers = cast_layers(parameters.stacks, score_dtype(query))
            summaries = summarise(query.detach(), key.detach(), settings, None, before=False)
            rows, columns = features(*summaries, parameters, layers)
        stored = [*columns, rows.hidden]
        if query.dtype.itemsize == 2 and columns.matched.shape[-1]:
            halves, scale = scaled_halves(columns.matched, (3, 4))
            stored = [stored[0], halves, *stored[2:], scale]
        for index, found in enumerate(stored):
            if index == len(self._features):
                self._features.append(found.new_zeros(len(self.lengths), found.shape[1], 0, *found.shape[3:]))
            self._features[index] = self._room(self._features[index], first + found.shape[2])
            self._features[index][samples, :, first : first + found.shape[2]] = found

    def _room(self, held: Tensor, blocks: int) -> Tensor:
        """Storage with room for one more block, of the tokens to come."""
        if held.shape[2] > blocks:
            return held
        larger = held.new_zeros(*held.shape[:2], max(blocks + 1, 2 * held.shape[2]), *held.shape[3:])
        larger[:, :, : held.shape[2]] = held
        return larger

    def _follow(self, query: Tensor, before: list[int], settings: dict[str, Any]) -> Tensor:
        assert self._value is not None
        found = query.new_empty(*query.shape[:3], self._value.shape[3], dtype=cast_dtype(query))
        for length in sorted(set(before)):
            same = [i for i, other in enumerate(before) if other == length]
            samples = slice(None) if len(same) == len(before) else torch.tensor(same, device=query.device)
            at, first_selecting = 0, (self.layer.config.dense_below or 0) - 1
            while at < query.shape[2]:
                rows = min(query.shape[2] - at, self.layer.block_size - (length + at) % self.layer.block_size)
                if length + at < first_selecting:
                    rows = min(rows, first_selecting - length - at)
                found[samples, :, at : at + rows] = self._run(samples, query[samples, :, at : at + rows], length + at)
                at += rows
        return found

    def _run(self, samples: Any, query: Tensor, position: int) -> Tensor:
        """Rows of tokens from `position` on, all in one block."""
        assert self._key is not None and self._queries is not None
        size = self.layer.block_size
        own, at = divmod(position, size)
        self._queries[1, samples, :, at : at + query.shape[2]] = query
        found = self._attend(samples, query, position, self._chosen(samples, query, position))
        if at + query.shape[2] == size:
            keys = self._key[samples, :, own * size : (own + 1) * size]
            self._queries[0, samples] = self._queries[1, samples]
            self._store(samples, own, self._queries[0, samples], keys)
        return found

    def _chosen(self, samples: Any, query: Tensor, position: int) -> Tensor:
        """Blocks that the rows see, including own and forced blocks, int64 (b, h, r or 1, k); -1 for none."""
        layer, config, device = self.layer, self.layer.config, query.device
        size, per_token = layer.block_size, config.per_token(True)
        own = position // size
        mine = torch.tensor([own], device=device)
        whole = position + query.shape[2] < (config.dense_below or 0)
        near = own + 1 if whole else config.local_blocks
        forced = shared_blocks(mine, own + 1, near, config.sink_blocks, True)[0].nonzero()[:, 0]
        forced = forced.expand(*query.shape[:2], 1, -1)
        if not own or whole:
            return forced
        held = [x[samples] for x in self._features]
        columns = KeyFeatures(*(x[:, :, : own + 1] for x in held[:3]))
        hidden = held[3][:, :, own - 1 : own]
        rows = QueryFeatures(hidden, None)
        ids = position + torch.arange(query.shape[2], device=device) if per_token else mine
        settings, parameters = config.settings(size, True), layer.scorer.selecting_parameters()
        with full_precision(device):
            layers, rounds = cast_layers(parameters.stacks, hidden.dtype), query.dtype.itemsize == 2
            for scale in held[4:]:
                columns = columns._replace(matched=columns.matched.to(hidden.dtype).ldexp(scale[:, :, : own + 1]))
            if not per_token:
                assert self._queries is not None
                query = self._queries[0, samples].unflatten(2, (-1, settings.row_unit)).to(hidden.dtype).mean(3)
            scores = BlockScores(parameters, query, rows, columns, layers, settings, True, ids, own, rounds=rounds)
            if held[4:]:
                # Rounded already.
                scores.ranked_keys = columns.matched
            listed = select_rows(scores, ids).long()
        listed = listed.masked_fill(listed > own, -1).repeat_interleave(scores.group, 1)
        return torch.cat([forced.expand(-1, -1, listed.shape[2], -1), listed], -1)

    def _attend(self, samples: Any, query: Tensor, position: int, blocks: Tensor) -> Tensor:
        assert self._key is not None and self._value is not None
        layer, size = self.layer, self.layer.block_size
        (query,), key, value = autocasted(query), self._key[samples], self._value[samples]
        batch, heads, rows, width = query.shape
        dtype = torch.promote_types(query.dtype, torch.float32)
        scale = width**-0.5 if layer.softmax_scale is None else layer.softmax_scale
        sample = torch.arange(batch, device=query.device).view(-1, 1, 1, 1)
        group = (torch.arange(heads, device=query.device) // (heads // key.shape[1])).view(-1, 1, 1)
        found = []
        each = batch * heads * blocks.shape[-1] * size * (width + value.shape[3])
        for begin, end in spans(rows, max(1, GATHERED // each)):
            token = position + torch.arange(begin, end, device=query.device)
            mine = blocks if blocks.shape[2] == 1 else blocks[:, :, begin:end]
            column = (mine[..., None] * size + torch.arange(size, device=query.device)).flatten(3)
            column = column.expand(-1, -1, end - begin, -1)
            seen = (column >= 0) & (column <= token[:, None])
            column = column.clamp(0, key.shape[2] - 1)
            # Memory that was never written may hold NaN.
            keys, values = (x[sample, group, column].to(query.dtype).to(dtype) for x in (key, value))
            values = torch.where(seen[..., None], values, 0.0)
            with full_precision(query.device):
                scores = scale * (query[:, :, begin:end, None].to(dtype) @ keys.mT)
                share = scores[..., 0, :].masked_fill(~seen, -torch.inf).softmax(-1)
                found.append((share[..., None, :] @ values)[..., 0, :])
        return torch.cat(found, 2).to(query.dtype)

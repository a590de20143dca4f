"""Keys and values of tokens already read, for decoding one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from ..errors import must, must_be
from ..ops.attention import attention
from ..ops.checks import check_tensors
from ..ops.decode import attention_step, check_decodable, live_keys, prefix_pattern
from ..patterns import Pattern, as_pattern
from ..plan.closed_forms import LiveKeys


class KVCache:
    """Keys and values of earlier tokens, and attention of each new token.

    Args:
        pattern: keys that each query attends to; always causal here.
        length: length of the whole sequence, for patterns that keep a share of all blocks; a bound on the tokens.
        prompt_lengths: real tokens of each sample in the first call, if samples are padded on the right.

    Keys that no later token attends to are dropped. Decode without gradients: the cache stores none.

    >>> cache = KVCache("window:64")
    >>> q, k, v = torch.randn(3, 1, 4, 101, 16).unbind()
    >>> prompt = cache.attend(q[:, :, :100], k[:, :, :100], v[:, :, :100])
    >>> cache.attend(q[:, :, 100:], k[:, :, 100:], v[:, :, 100:]).shape
    torch.Size([1, 4, 1, 16])
    """

    def __init__(
        self, pattern: Pattern | str, length: int | None = None, prompt_lengths: Sequence[int] | Tensor | None = None
    ) -> None:
        self.pattern = as_pattern(pattern)
        check_decodable(self.pattern, length)
        self.length = length
        self.prompt_lengths = None if prompt_lengths is None else [index(length) for length in prompt_lengths]
        self.lengths: list[int] = []
        """Tokens read so far, of each sample."""
        self.live = LiveKeys()
        """Positions held."""
        self._key: Tensor | None = None
        self._value: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return sum(t.numel() * t.element_size() for t in (self._key, self._value) if t is not None)

    @property
    def tokens(self) -> int:
        """Number of cached positions of the longest sample."""
        return self._end() if self.lengths else 0

    def positions(self, batch: int) -> Tensor:
        """Position of the next token of each sample, int64 (B)."""
        return torch.tensor(self.lengths or [0] * batch, device="cpu")

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        sink: Tensor | None = None,
        softcap: float | None = None,
        bias: Tensor | None = None,
        backend: str = "auto",
        memory_budget: int | float | None = None,
    ) -> Tensor:
        """Add tokens and return their rows of causal attention.

        Args:
            query: (B, H, M, D), the next M tokens: the prompt at first, then usually one at a time.
            key: (B, G, M, D), G = H or a divisor of it.
            value: (B, G, M, E).
            scale: factor on the scores; 1 / sqrt(D) by default.
            sink: (H,), see `attention`.
            softcap: bound of the scores, see `attention`.
            bias: (H, 2 * R + 1), table by distance, see `attention`.
            backend: for the prompt, see `attention`, as `memory_budget`.

        Returns:
            (B, H, M, E). Rows of padding after a shorter prompt are undefined.
        """
        check_tensors(query, key, value, enable_gqa=True)
        batch, heads, rows, _ = query.shape
        if self.lengths and len(self.lengths) != batch:
            raise must(f"the batch must have the cache's {len(self.lengths)} samples", batch)
        if self.lengths and torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
            raise must("decoding must run without gradients", "tensors that require them", "Use torch.no_grad().")
        self._check_stored(key, value)
        first = not self.lengths
        before = self.lengths or [0] * batch
        added = self._added(batch, rows) if first else [rows] * batch
        after = [old + more for old, more in zip(before, added, strict=True)]
        if self.length is not None and max(after) > self.length:
            raise must(f"a cache for {self.length} tokens must not be given more", max(after))
        self._write(key.detach(), value.detach(), before, heads)
        self.lengths = after
        settings = {"scale": scale, "sink": sink, "softcap": softcap, "bias": bias}
        settings |= {"backend": backend, "memory_budget": memory_budget}
        try:
            return self._prompt(query, key, value, settings) if first else self._follow(query, before, settings)
        except BaseException:
            # The tokens were not stored, so a corrected call may be repeated.
            self.lengths = [] if first else before
            self._key, self._value = (None, None) if first else (self._key, self._value)
            raise

    def _check_stored(self, key: Tensor, value: Tensor) -> None:
        """New tokens must be like those that are held."""
        for name, stored, given in (("key", self._key, key), ("value", self._value, value)):
            if stored is not None and stored.shape[1::2] != given.shape[1::2]:
                heads, width = stored.shape[1::2]
                raise must(f"{name} must have the cache's {heads} heads of width {width}", tuple(given.shape))
            if stored is not None and stored.dtype != given.dtype:
                raise must_be(f"{name} must have the cache's dtype {stored.dtype}", given.dtype)

    def reorder(self, samples: Tensor) -> None:
        """Continue sample i from the cache of sample `samples[i]`, as beam search does."""
        if self._key is None or self._value is None:
            return
        self._key, self._value = self._key[samples], self._value[samples]
        self.lengths = [self.lengths[i] for i in samples.tolist()]

    def _added(self, batch: int, rows: int) -> list[int]:
        lengths = self.prompt_lengths or [rows] * batch
        if len(lengths) != batch or not 0 < min(lengths) <= max(lengths) <= rows:
            raise must(f"prompt_lengths must be {batch} numbers in 1 .. {rows}", lengths)
        return lengths

    def _prompt(self, query: Tensor, key: Tensor, value: Tensor, settings: dict[str, Any]) -> Tensor:
        """Rows of the first tokens."""
        pattern = prefix_pattern(self.pattern, self.length, query.shape[2], query.shape[1])
        return attention(query, key, value, pattern, is_causal=True, enable_gqa=True, **settings)

    def _follow(self, query: Tensor, before: list[int], settings: dict[str, Any]) -> Tensor:
        """Rows of tokens that were written after `before` others."""
        assert self._key is not None and self._value is not None
        where = {"length": self.length, "enable_gqa": True, "live": self.live}
        return attention_step(query, self._key, self._value, self.pattern, before, **where, **settings)

    def _end(self, lengths: Sequence[int] | None = None) -> int:
        """Slots in use when the longest sample has read this much."""
        last = max(lengths or self.lengths) - 1
        return int(self.live.slots(torch.tensor(last, device="cpu"))) + 1

    def _write(self, key: Tensor, value: Tensor, before: list[int], heads: int) -> None:
        rows = key.shape[2]
        if self.lengths:
            self._drop(min(before), heads)
        capacity = self._end([max(before) + rows])
        self._key, self._value = self._grown(self._key, key, capacity), self._grown(self._value, value, capacity)
        at = torch.tensor(before, device="cpu")[:, None] + torch.arange(rows, device="cpu")
        slots = self.live.slots(at).to(key.device)
        sample = torch.arange(len(before), device=key.device)[:, None]
        for stored, given in ((self._key, key), (self._value, value)):
            stored[sample, :, slots] = given.transpose(1, 2)

    def _grown(self, stored: Tensor | None, given: Tensor, capacity: int) -> Tensor:
        if stored is not None and stored.shape[2] >= capacity:
            return stored
        larger = given.new_empty(
            *given.shape[:2], capacity if stored is None else max(capacity, 2 * stored.shape[2]), given.shape[3]
        )
        if stored is not None:
            larger[:, :, : stored.shape[2]] = stored
        return larger

    def _drop(self, position: int, heads: int) -> None:
        """Drop the keys that no row from `position` on attends to, once they are half of the stored ones."""
        assert self._key is not None and self._value is not None
        needed = live_keys(self.pattern, self.length, position, heads)
        end = max(self.lengths)
        stored_rows = end - self.live.begin + self.live.sinks
        left = end - needed.begin + needed.sinks
        if needed.begin <= max(self.live.begin, needed.sinks) or 2 * left > stored_rows:
            return
        slots = self.live.slots(
            torch.cat([torch.arange(needed.sinks, device="cpu"), torch.arange(needed.begin, end, device="cpu")])
        )
        slots = slots.to(self._key.device)
        self._key, self._value = self._key[:, :, slots], self._value[:, :, slots]
        self.live = needed


def check_cache_type(cache: object) -> None:
    """Refuse a cache argument that is no cache, such as `True`."""
    if cache is not None and not isinstance(cache, KVCache):
        raise must_be("cache must be a KVCache", repr(cache), "Make an empty one with module.cache().")

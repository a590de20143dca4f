"""Modules over a sequence that is spread over ranks: what they are on one device, computed for this rank's tokens."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import must, must_be
from ..patterns import Pattern
from .dilated import DilatedAttention

# `distributed` is imported where a group is met: torch may have been built without it.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import SequenceLayout
    from .cache import KVCache

LAYOUTS = ("contiguous", "zigzag")
SAID = {"query", "key", "value", "pattern", "layout", "group", "is_causal", "scale", "enable_gqa", "key_padding_mask"}
SAID |= {"cu_seqlens", "dropout_p", "backend", "memory_budget"}
"""What a module tells `context_parallel_attention` itself."""


class Ranks:
    """Who holds a sequence together, and how it is cut.

    Args:
        process_group: a process group, or a DeviceMesh of one dimension; None for this process alone.
        ring_size: members it must have; more than 1 without a group means the default group.
        layout: "contiguous" (shards of any lengths follow one another), "zigzag", or a `SequenceLayout`.
        transfer: keywords for `context_parallel_attention`: `overlap`, `exchange`, `receive_budget`, `machine`.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_size: int | None = None,
        layout: SequenceLayout | str = "contiguous",
        transfer: Mapping[str, Any] | None = None,
    ) -> None:
        if process_group is None and ring_size not in (None, 1):
            if not dist.is_available() or not dist.is_initialized():
                advice = "Start the script with torchrun and call torch.distributed.init_process_group."
                raise must(f"ring_size={ring_size} must meet a process group", "no initialised process group", advice)
            process_group = dist.group.WORLD
        self.group = _group_of(process_group)
        if ring_size not in (None, self.world):
            raise must(f"ring_size must be the number of ranks, {self.world}", ring_size)
        if isinstance(layout, str) and layout not in LAYOUTS:
            raise must(f"layout must be a SequenceLayout or one of {', '.join(LAYOUTS)}", repr(layout))
        if transfer:
            options = _keywords() - SAID
            unknown = sorted(set(transfer) - options)
            if unknown:
                raise must(f"transfer must have keywords among {', '.join(sorted(options))}", ", ".join(unknown))
        self.layout, self.transfer = layout, dict(transfer or {})
        self.meter: Callable[[], int] | None = None
        """Tells the free memory of this rank, where the least of all ranks is wanted."""
        self.least_room: int | None = None
        """Free bytes of the poorest rank in this call."""
        self._current: SequenceLayout | None = None
        self._spoken = False

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def alone(self) -> bool:
        """Whether this process holds every token."""
        return self.world == 1

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call of a module. A rank that fails before the others hear of it tells them, so that none waits."""
        self._current, self._spoken = None, False
        try:
            yield
        except Exception:
            if not self._spoken:
                self._told(-1)
            raise

    def layout_of(self, n: int) -> SequenceLayout:
        """How the sequence is cut in this call, of which this rank holds `n` tokens. Collective, once a call."""
        if self._current is None:
            lengths, rooms = self._told(n)
            failed = [rank for rank, length in enumerate(lengths) if length < 0]
            if failed:
                raise must("every rank must call its module with what it takes", f"an error on ranks {failed}")
            self._current = self._cut(lengths)
            self.least_room = min(rooms) if min(rooms) >= 0 else None
        return self._current

    def _cut(self, lengths: Sequence[int]) -> SequenceLayout:
        from ..distributed import SequenceLayout

        if self.layout == "contiguous":
            return SequenceLayout.of_lengths(lengths)
        layout = SequenceLayout.zigzag(sum(lengths), self.world) if isinstance(self.layout, str) else self.layout
        if layout.lengths != tuple(lengths):
            raise must(f"shards must hold {list(layout.lengths)} tokens", list(lengths), "Use shard_sequence.")
        return layout

    def _told(self, n: int) -> tuple[list[int], list[int]]:
        """Tokens and free bytes of every rank."""
        from ..distributed.transport import wire_device

        self._spoken = True
        own = torch.tensor([n, -1 if self.meter is None else self.meter()], device=wire_device(self.group))
        every = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(every, own, group=self.group)
        lengths, rooms = torch.stack(every).T.tolist()
        return lengths, rooms

    def joined(self, group: dist.ProcessGroup | None) -> Ranks:
        """The same over another group."""
        return Ranks(group, None, self.layout, self.transfer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        return self.joined(self.group)

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise must("a module must be pickled without a process group", "one with it", "Save its state_dict.")
        return self.__dict__


def _keywords() -> set[str]:
    from ..distributed import context_parallel_attention

    return set(inspect.signature(context_parallel_attention).parameters)


def _group_of(process_group: object) -> dist.ProcessGroup | None:
    if process_group is None or isinstance(process_group, dist.ProcessGroup):
        return process_group
    dimensions = getattr(process_group, "ndim", None)
    if dimensions is None:
        raise must_be("process_group must be a ProcessGroup or a DeviceMesh", type(process_group).__name__)
    if dimensions != 1:
        advice = 'Take the one of the sequence: mesh["cp"].'
        raise must("a DeviceMesh must have one dimension", dimensions, advice)
    return process_group.get_group()  # pyrefly: ignore[missing-attribute]


class OverRanks:
    """What a module of either form does differently over several ranks; alone, nothing."""

    ranks: Ranks
    pattern: Pattern

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Who holds the sequence together; set it after `regroup`, or with `set_process_group` in a whole model."""
        return self.ranks.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self.ranks = self.ranks.joined(group)
        self._regrouped()

    def _regrouped(self) -> None:
        """Follow a change of the group."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As on one device; tensors are this rank's tokens, `cu_seqlens` the bounds in the whole sequence."""
        if self.ranks.alone:
            return super().forward(*args, **kwargs)  # pyrefly: ignore[missing-attribute]
        with self.ranks.call():
            return super().forward(*args, **kwargs)  # pyrefly: ignore[missing-attribute]

    def _operation(self, n: int, keys: int) -> Callable[..., Tensor]:
        if self.ranks.alone:
            return super()._operation(n, keys)  # pyrefly: ignore[missing-attribute]
        if n != keys:
            raise must("query and key must hold the same tokens over several ranks", f"{n} and {keys} of them")
        return self._attend

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, **settings: Any) -> Tensor:
        from ..distributed import context_parallel_attention

        given = {name: setting for name, setting in settings.items() if setting is not None}
        if given.get("memory_budget") is not None:
            advice = "transfer={'receive_budget': bytes} bounds what is fetched at a time."
            raise must("memory_budget must be None over several ranks", given["memory_budget"], advice)
        layout = self.ranks.layout_of(query.shape[2])
        return context_parallel_attention(
            query, key, value, pattern, layout, self.ranks.group, **{**self.ranks.transfer, **given}
        )

    def notes(self) -> list[str]:
        told = super().notes()  # pyrefly: ignore[missing-attribute]
        return told if self.ranks.alone else [*told, f"spread over {self.ranks.world} ranks, {self.ranks.layout}"]


class MultiheadOverRanks(OverRanks):
    """What a module with projections does differently besides."""

    def _tokens(self, n: int, device: torch.device) -> Tensor:
        if self.ranks.alone:
            return super()._tokens(n, device)  # pyrefly: ignore[missing-attribute]
        return self.ranks.layout_of(n).positions(self.ranks.rank).to(device)

    def _check_call(self, need_weights: bool, attn_mask: Tensor | None, cache: KVCache | None) -> None:
        for what, given in (("need_weights", need_weights), ("attn_mask", attn_mask), ("a cache", cache)):
            if given is not None and given is not False:
                self._check_whole(what)

    def _check_whole(self, what: str) -> None:
        """Refuse what one rank cannot answer for all."""
        if not self.ranks.alone:
            advice = "Say it as the module's pattern, or use one device."
            raise must(f"{what} must come with one device", f"{self.ranks.world} ranks", advice)


def set_process_group(model: nn.Module, process_group: dist.ProcessGroup | None) -> int:
    """Give every module of a model that works over ranks another group; returns how many there were."""
    found = [module for module in model.modules() if isinstance(module, OverRanks)]
    for module in found:
        module.process_group = process_group
    return len(found)


class RingDilatedAttention(OverRanks, DilatedAttention):
    """`DilatedAttention` for sequences spread over ranks; on one device, that computation itself.

    Every rank calls it with its tokens and gets its rows. It receives only the keys that its queries see.

    Args:
        segment_lengths: tokens in a segment, one for each branch.
        dilation_rates: distance between two tokens that meet, one for each branch.
        softmax_scale: factor on the scores; 1 / sqrt(D) by default.
        attention_dropout: probability of dropping a weight while training.
        process_group: see `Ranks`, as `ring_size`, `layout` and `transfer`.
        options: what else `DilatedAttention` takes.
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_size: int | None = None,
        layout: SequenceLayout | str = "contiguous",
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(segment_lengths, dilation_rates, softmax_scale, attention_dropout, **options)
        self.ranks = Ranks(process_group, ring_size, layout, transfer)

"""Modules for a sequence spread over ranks: the single-device modules, computed for this rank's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import must, must_be
from ..patterns import Pattern
from .dilated import DilatedAttention

# `distributed` is imported where it is used: torch may have been built without it.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from ..distributed import SequenceLayout
    from .kv_cache import KVCache

LAYOUTS = ("contiguous", "zigzag")
TRANSFER = {"exchange", "machine", "overlap", "receive_budget"}
"""Keywords of `context_parallel_attention` that a module does not set itself."""


class Ranks:
    """The process group that shares a sequence, and the layout of its shards.

    In a job of several ranks the choice is explicit: a call without a process group raises, unless `ring_size=1`
    selects this process alone. `set_process_group` makes the same choice for a whole model.

    Args:
        process_group: a process group, or a DeviceMesh of one dimension. None until `set_process_group` in a job of
            several ranks; this process alone elsewhere.
        ring_size: members it must have; without a group, 1 means this process alone and more the default group.
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
                raise must(f"ring_size={ring_size} needs a process group", "no initialised process group", advice)
            process_group = dist.group.WORLD
        self.group = _group_of(process_group)
        self._explicit = self.group is not None or ring_size == 1
        if ring_size not in (None, self.world):
            raise must(f"ring_size must be the number of ranks, {self.world}", ring_size)
        if isinstance(layout, str) and layout not in LAYOUTS:
            raise must(f"layout must be a SequenceLayout or one of {', '.join(LAYOUTS)}", repr(layout))
        unknown = sorted(set(transfer or ()) - TRANSFER)
        if unknown:
            raise must(f"transfer must have keywords among {', '.join(sorted(TRANSFER))}", ", ".join(unknown))
        self.layout, self.transfer = layout, dict(transfer or {})
        self.meter: Callable[[], int] | None = None
        """Returns the free memory of this rank; None if `least_room` is not needed."""
        self.least_free: int | None = None
        """Least free bytes over the ranks in this call."""
        self._inside = False
        self._current: SequenceLayout | None = None
        self._announce: Callable[[Exception], None] | None = None

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

    def check(self) -> None:
        """Raise in a job of several ranks if neither a process group nor `ring_size=1` was given."""
        if self._explicit or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        raise must(
            f"expected process_group in a job of {dist.get_world_size()} ranks",
            "None",
            "Pass process_group=torch.distributed.group.WORLD (or call set_process_group) if the ranks share one "
            "sequence; pass ring_size=1 if every rank has sequences of its own.",
        )

    @contextmanager
    def call(self) -> Iterator[None]:
        """One forward call of a module over ranks.

        The other ranks wait in a collective of the call. `_announce` takes part in the next one on behalf of a rank
        that failed before it, so that every rank raises; it is None once `context_parallel_attention` or a broken
        link takes over. A call within a call is part of it.
        """
        if self._inside:
            yield
            return
        self._inside, self._current, self._announce = True, None, self._announce_length
        try:
            yield
        except Exception as error:
            if self._announce is not None:
                # A broken link must not hide this rank's own error.
                with suppress(Exception):
                    self._announce(error)
            raise
        finally:
            self._inside, self._current, self._announce = False, None, None

    def layout_of(self, n: int) -> SequenceLayout:
        """The layout of the sequence in this call, of which this rank holds `n` tokens. Collective, once a call."""
        if self._current is None:
            free = -1 if self.meter is None else self.meter()
            self._announce = None
            lengths, free_by_rank = self._gathered(n, free)
            self._announce = self._announce_call
            self._current = self._cut(lengths)
            self.least_free = min(free_by_rank) if min(free_by_rank) >= 0 else None
        return self._current

    def hand_over(self) -> None:
        """Leave the report of later failures to the collective operation that follows."""
        self._announce = None

    def _cut(self, lengths: Sequence[int]) -> SequenceLayout:
        from ..distributed import SequenceLayout

        if self.layout == "contiguous":
            return SequenceLayout.of_lengths(lengths)
        layout = SequenceLayout.zigzag(sum(lengths), self.world) if isinstance(self.layout, str) else self.layout
        if layout.lengths != tuple(lengths):
            raise must(f"shards must hold {list(layout.lengths)} tokens", list(lengths), "Use shard_sequence.")
        return layout

    def _gathered(self, n: int, free: int, error: Exception | None = None) -> tuple[list[int], list[int]]:
        """Tokens and free bytes of every rank; raises on all ranks if one has an error and a length of -1."""
        from ..distributed.transport import check_everywhere, gathered, wire_device

        own = torch.tensor([n, free], device=wire_device(self.group))
        lengths, free_by_rank = torch.stack(gathered(own, self.group)).T.tolist()
        if min(lengths) < 0:
            check_everywhere(error, self.group)
        return lengths, free_by_rank

    def _announce_length(self, error: Exception) -> None:
        """Take part in `layout_of` with an error, which it raises."""
        self._gathered(-1, -1, error)

    def _announce_call(self, error: Exception) -> None:
        """Take part in the comparison of calls with an error, which it raises."""
        from ..distributed.exchange import compare_calls
        from ..distributed.transport import wire_device

        compare_calls("", error, False, 0, self.group, wire_device(self.group))

    def joined(self, group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
        """The same settings over another group; this process alone if None."""
        return Ranks(group, 1 if group is None else None, self.layout, self.transfer)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        copied = self.joined(self.group)
        copied._explicit = self._explicit
        return copied

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            raise must("a module must be pickled without a process group", "one with it", "Save its state_dict.")
        return self.__dict__


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
    """Behaviour of modules over several ranks; a single rank runs the module itself."""

    ranks: Ranks
    pattern: Pattern

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Group that shares the sequence; set it after `regroup`, or with `set_process_group` in a whole model."""
        return self.ranks.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        self.ranks = self.ranks.joined(group)
        self._regrouped()

    def _regrouped(self) -> None:
        """Follow a change of the group."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute as on one device; tensors hold this rank's tokens, `cu_seqlens` bounds of the whole sequence."""
        self.ranks.check()
        if self.ranks.alone:
            return super().forward(*args, **kwargs)  # pyrefly: ignore[missing-attribute]
        with self.ranks.call():
            return super().forward(*args, **kwargs)  # pyrefly: ignore[missing-attribute]

    def _operation(self, n: int, keys: int, with_lse: bool = False) -> Callable[..., Any]:
        if self.ranks.alone:
            return super()._operation(n, keys, with_lse)  # pyrefly: ignore[missing-attribute]
        if n != keys:
            raise must("query and key must hold the same tokens over several ranks", f"{n} and {keys} of them")
        return partial(self._attend, with_lse=with_lse)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, pattern: Pattern, with_lse: bool = False, **settings: Any
    ) -> Any:
        from ..distributed import context_parallel_attention, context_parallel_attention_with_lse

        given = {name: setting for name, setting in settings.items() if setting is not None}
        if given.get("memory_budget") is not None:
            advice = "transfer={'receive_budget': bytes} bounds what is fetched at a time."
            raise must("memory_budget must be None over several ranks", given["memory_budget"], advice)
        layout = self.ranks.layout_of(query.shape[2])
        self.ranks.hand_over()
        attend = context_parallel_attention_with_lse if with_lse else context_parallel_attention
        return attend(query, key, value, pattern, layout, self.ranks.group, **{**self.ranks.transfer, **given})

    def _check_whole(self, what: str) -> None:
        """Raise for an argument that needs the whole sequence."""
        if not self.ranks.alone:
            advice = "Express it by the module's pattern, or use one device."
            raise must(f"{what} must come with one device", f"{self.ranks.world} ranks", advice)

    def notes(self) -> list[str]:
        notes = super().notes()  # pyrefly: ignore[missing-attribute]
        return notes if self.ranks.alone else [*notes, f"spread over {self.ranks.world} ranks, {self.ranks.layout}"]


class TakesRanks(OverRanks):
    """Module on one device with the arguments of `Ranks` besides its own.

    Args:
        args: arguments of the module on one device, as `options`.
        process_group: see `Ranks`, as `ring_size`, `layout` and `transfer`.
    """

    def __init__(
        self,
        *args: Any,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        ring_size: int | None = None,
        layout: SequenceLayout | str = "contiguous",
        transfer: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.ranks = Ranks(process_group, ring_size, layout, transfer)


class MultiheadOverRanks(OverRanks):
    """Behaviour of modules with projections over several ranks."""

    def _tokens(self, n: int, device: torch.device) -> Tensor:
        if self.ranks.alone:
            return super()._tokens(n, device)  # pyrefly: ignore[missing-attribute]
        return self.ranks.layout_of(n).positions(self.ranks.rank).to(device)

    def _check_call(self, need_weights: bool, attn_mask: Tensor | None, cache: KVCache | None) -> None:
        for what, given in (("need_weights", need_weights), ("attn_mask", attn_mask), ("a cache", cache)):
            if given is not None and given is not False:
                self._check_whole(what)


def set_process_group(model: nn.Module, process_group: dist.ProcessGroup | DeviceMesh | None) -> int:
    """Set the process group of every module of a model that works over ranks, and return their number.

    None makes every rank compute its own tokens alone, as `ring_size=1` does.
    """
    modules = [module for module in model.modules() if isinstance(module, OverRanks)]
    for module in modules:
        module.process_group = process_group
    return len(modules)


class RingDilatedAttention(TakesRanks, DilatedAttention):
    """`DilatedAttention` for sequences sharded over ranks; on one rank, `DilatedAttention` itself.

    Every rank passes its tokens and receives its rows, and only the keys that its queries attend to.

    Args:
        args: arguments of `DilatedAttention`, as `options`: `segment_lengths`, `dilation_rates`, `softmax_scale`,
            `attention_dropout` and the rest.
        process_group: see `Ranks`, as `ring_size`, `layout` and `transfer`.
    """

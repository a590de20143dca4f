"""When a rank dies, stalls or runs out of memory: one error with a type on every rank, and ways to go on.

What to do about a fault is decided by all ranks together. A rank that tried again on its own would be one collective
behind the others for ever.
"""

from __future__ import annotations

import gc
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..errors import must
from .memory import relieve
from .transport import wire_device

Result = TypeVar("Result")


class RankFault(RuntimeError):
    """A step that cannot go on because of another rank."""


class RankLost(RankFault):
    """Another rank is gone: its process ended, or the link to it broke."""


class RankStalled(RankFault):
    """Another rank did not answer within the group's timeout."""


class StepFailed(RankFault):
    """Another rank raised, and said so."""

    def __init__(self, told: dict[int, str]) -> None:
        self.told = told
        """What was raised, by rank."""
        super().__init__("\n".join(["another rank raised:", *(f"  rank {r}: {text}" for r, text in told.items())]))


class LeftBehind(RankFault):
    """The others went on without this rank."""


# torch has no type of its own for these on gloo, and one for all of them on NCCL.
STALLED = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (refused|was|closed|reset|abort)|remote process exited"
    r"|socket|no error, likely|communicator was aborted|gloo",
    re.IGNORECASE,
)
MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory", re.IGNORECASE)


@contextmanager
def faults() -> Iterator[None]:
    """Give what torch raises about another rank a type: `with faults(): loss.backward()`."""
    try:
        yield
    except RankFault:
        raise
    except RuntimeError as error:
        kind = fault_of(error)
        if kind is None:
            raise
        what = "is gone" if kind is RankLost else "did not answer in time"
        advice = "This step is lost on every rank. Form a group of those that are left with regroup, or end."
        raise kind(f"another rank {what}: {error}\n{advice}") from error


def fault_of(error: BaseException) -> type[RankFault] | None:
    """Which fault of another rank an error of torch tells of, if any."""
    if out_of_memory(error) or not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if STALLED.search(text):
        return RankStalled
    return RankLost if isinstance(error, dist.DistError) or LOST.search(text) else None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error tells that memory ran out on this rank."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and MEMORY.search(str(error)) is not None


class Vote(NamedTuple):
    """What all ranks said of a step."""

    told: dict[int, str]
    """What was raised, by rank; empty where all went well."""
    memory: bool
    """Whether memory ran out, and nothing else happened."""


def vote(failure: BaseException | None = None, group: dist.ProcessGroup | None = None) -> Vote:
    """Tell all ranks whether this one failed, and learn of the others. Collective."""
    kind = 0 if failure is None else 1 if out_of_memory(failure) else 2
    own = torch.tensor([kind], device=wire_device(group))
    every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, own, group=group)
    kinds = torch.cat(every).tolist()
    if not any(kinds):
        return Vote({}, False)
    words: list[Any] = [None] * len(kinds)
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(words, text, group=group)
    return Vote({rank: told for rank, told in enumerate(words) if told is not None}, max(kinds) == 1)


def attempt(
    step: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    *,
    lighten: Callable[[], bool] = relieve,
    tries: int = 3,
) -> Result:
    """Run a step on all ranks; it succeeds on all or raises on all. Collective.

    Where a rank ran out of memory between collectives, all make themselves lighter and run the step again. A rank that
    fails between two collectives of the step leaves the others waiting: those raise `RankStalled` at the timeout.

    Args:
        step: what to do; must be able to run again.
        group: who takes part; the default group if None.
        lighten: makes the next run take less memory and says whether it could; called on every rank, and one that
            could is enough to try again.
        tries: how often to run it at most.
    """
    if tries < 1:
        raise must("tries must be >= 1", tries)
    for left in reversed(range(tries)):
        result, failure = None, None
        with faults():
            try:
                result = step()
            except Exception as error:
                # With the link broken there is no one to tell.
                if isinstance(error, RankFault) or fault_of(error) is not None:
                    raise
                failure = error
            found = vote(failure, group)
        if not found.told:
            return result  # pyrefly: ignore[bad-return]
        if not (found.memory and left and _somewhere(lighten(), group)):
            raise StepFailed(found.told) if failure is None else failure
    raise AssertionError("the last try returns or raises")


def _somewhere(true_here: bool, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([int(true_here)], device=wire_device(group))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


class Survivors(NamedTuple):
    """A group formed anew."""

    rank: int
    world: int
    members: tuple[int, ...]
    """Which rank each of them was before."""


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames that an error passed through hold; its message and lines stay."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def regroup(
    store: dist.Store,
    generation: int,
    rank: int,
    world: int,
    *,
    settle: float = 5.0,
    timeout: timedelta = timedelta(minutes=10),
    backend: str | None = None,
) -> Survivors:
    """Make the ranks that are left the default group. Collective among them.

    Afterwards give the modules their group with `set_process_group`, cut the sequence anew with a layout of as many
    ranks, and run the step again from the parameters: plans follow from the layout, and results are exact again.
    Before, take the broken group from them with `set_process_group(model, None)`: while something holds it, a rank
    that waits for this one learns of the fault at its timeout only, and may then come too late.

    Args:
        store: where the ranks meet. It must outlive the lost rank; so must the launcher let the others live, which
            torchrun does not.
        generation: a number no earlier call has used, the same on every rank: 1, then 2, ...
        rank: of this process in the group that broke; likewise `world`.
        settle: seconds to wait for others. Who comes later is left behind, and raises `LeftBehind`.
        timeout: of the new group.
        backend: of the new group; that of the old one, or gloo, if not given.
    """
    if dist.is_initialized():
        backend = backend or dist.get_backend()
        # Ranks that still wait for this one learn of the fault now, not at their timeout: gloo's connections close
        # with the last reference to the group, and an error that is being handled holds some in its frames.
        _forget_frames(sys.exception())
        dist.destroy_process_group()
        gc.collect()
    place = dist.PrefixStore(f"regroup/{generation}", store)
    place.set(f"alive/{rank}", "here")
    until = time.monotonic() + settle
    alive: list[int] = []
    while len(alive) < world and not place.check(["members"]):
        alive = [other for other in range(world) if place.check([f"alive/{other}"])]
        if time.monotonic() >= until:
            break
        time.sleep(min(0.05, settle / 20))
    # The first to ask decides for all.
    chosen = place.compare_set("members", "", ",".join(map(str, alive))).decode()
    members = tuple(map(int, chosen.split(",")))
    if rank not in members:
        raise LeftBehind(f"ranks {list(members)} went on without rank {rank}, which came after {settle} s")
    own = members.index(rank)
    dist.init_process_group(
        backend or "gloo",
        store=dist.PrefixStore(f"group/{generation}", store),
        rank=own,
        world_size=len(members),
        timeout=timeout,
    )
    return Survivors(own, len(members), members)

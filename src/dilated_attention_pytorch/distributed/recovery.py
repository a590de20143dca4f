"""Recovery from ranks that die, stall or run out of memory: typed errors on every rank, and ways to continue.

All ranks decide on recovery together: a rank that retried alone would stay one collective behind the others.
"""

from __future__ import annotations

import gc
import io
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..errors import must
from .receive_buffers import relieve
from .transport import error_text, gathered, group_of, is_on_every_rank, out_of_memory, wire_device

Result = TypeVar("Result")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class RankFault(RuntimeError):
    """A step that failed because of another rank."""


class RankLost(RankFault):
    """Another rank is lost: its process ended, or the connection to it broke."""


class RankStalled(RankFault):
    """Another rank did not respond within the group's timeout."""


class StepFailed(RankFault):
    """Another rank raised an exception and reported it."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        """Text of each exception, by rank."""
        super().__init__("\n".join(["another rank raised:", *(f"  rank {r}: {text}" for r, text in errors.items())]))


class LeftBehind(RankFault):
    """The other ranks formed a group without this one."""


# torch has no type of its own for these on gloo, and one for all of them on NCCL.
STALLED = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (refused|was|closed|reset|abort)|remote process exited"
    r"|socket|no error, likely|communicator was aborted|gloo",
    re.IGNORECASE,
)


@contextmanager
def faults() -> Iterator[None]:
    """Convert torch's errors about other ranks to `RankFault`s: `with faults(): loss.backward()`."""
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
    """Type of the fault of another rank that an error of torch reports, if any."""
    if out_of_memory(error) or not isinstance(error, RuntimeError):
        return None
    text = str(error)
    if STALLED.search(text):
        return RankStalled
    return RankLost if isinstance(error, dist.DistError) or LOST.search(text) else None


class Vote(NamedTuple):
    """Outcome of a step on all ranks."""

    errors: dict[int, str]
    """Errors by rank, empty after success. Faults of a link are listed only if no rank raised anything else."""
    memory: bool
    """Whether memory ran out and no other error occurred."""


SLACK = timedelta(seconds=30)
"""Timeout of a vote beyond that of the step's collectives."""
AFTER_FAULT = timedelta(seconds=5)
"""Wait of a rank whose link failed for the errors of other ranks."""
TEXT = 4096
"""Most bytes of an error text that are sent."""

_voters: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
"""Voting group of each group."""


def voters_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Separate CPU group for votes: members of `group` may still wait in a collective of the step."""
    members = group_of(group)
    if members not in _voters:
        backend = dist.get_backend(members)
        voters = dist.new_group(
            dist.get_process_group_ranks(members),
            timeout=_timeout_of(members) + SLACK,
            backend=backend if backend in ("fake", "threaded") else "gloo",
            use_local_synchronization=True,
        )
        assert isinstance(voters, dist.ProcessGroup)
        _voters[members] = voters
    return _voters[members]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a group's collectives; torch's default where its backend has none."""
    options = getattr(group._get_backend(wire_device(group)), "options", None)
    return getattr(options, "_timeout", None) or dist.default_pg_timeout


def vote(failure: BaseException | None = None, group: dist.ProcessGroup | None = None) -> Vote:
    """Exchange the outcome of a step with all ranks. Collective.

    Votes use a separate group, created by the first vote. A rank that votes while others are still in a collective of
    the step waits for them until their timeout.
    """
    voters = voters_of(group)
    fault = isinstance(failure, RankFault) or (failure is not None and fault_of(failure) is not None)
    kind = 0 if failure is None else 3 if fault else 1 if out_of_memory(failure) else 2
    patience = AFTER_FAULT if fault else None
    kinds = torch.cat(gathered(torch.tensor([kind], device="cpu"), voters, patience)).tolist()
    if not any(kinds):
        return Vote({}, False)
    text = b"" if failure is None else error_text(failure).encode()[:TEXT]
    padded = torch.frombuffer(bytearray(text.ljust(TEXT, b"\0")), dtype=torch.uint8)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in gathered(padded, voters, patience)]
    raised = [rank for rank, kind in enumerate(kinds) if kind in (1, 2)]
    listed = raised or [rank for rank, kind in enumerate(kinds) if kind]
    return Vote({rank: texts[rank] for rank in listed}, max(kinds) == 1)


def attempt(
    step: Callable[[], Result],
    group: dist.ProcessGroup | None = None,
    *,
    lighten: Callable[[], bool] = relieve,
    tries: int = 3,
) -> Result:
    """Run a step on all ranks, and raise on all of them if one failed. Collective.

    A rank that fails raises its own error; the others raise `StepFailed` with the text of it, at once if they finished
    the step, or at the group's timeout if they wait for that rank in a collective (the group is then unusable). If
    memory ran out and no other error occurred, all ranks call `lighten` and run the step again.

    The update of the parameters belongs after `attempt`, not in it: no vote is safe from a rank that dies while it
    votes, so some of the others may return and some raise. `regroup(step=..., state=...)` then makes them agree.

    Args:
        step: work up to the gradients, without the update; must be able to run again.
        group: ranks that take part; the default group if None.
        lighten: reduces the memory of the next run and returns whether it did; called on every rank. The step is run
            again if one rank returned True.
        tries: most runs of the step.
    """
    if tries < 1:
        raise must("tries must be >= 1", tries)
    voters_of(group)
    for left in reversed(range(tries)):
        result, failure = None, None
        try:
            with faults():
                result = step()
        except Exception as error:
            if is_on_every_rank(error, group):
                raise
            failure = error
        ballot = _voted(failure, group)
        if not ballot.errors:
            return result  # pyrefly: ignore[bad-return]
        if not (ballot.memory and left and _somewhere(lighten(), group)):
            if failure is not None and dist.get_rank(group) in ballot.errors:
                raise failure
            raise StepFailed(ballot.errors) from failure
    raise AssertionError("the last try returns or raises")


def _voted(failure: Exception | None, group: dist.ProcessGroup | None) -> Vote:
    """`vote`; if the vote fails, raise this rank's own error."""
    try:
        with faults():
            return vote(failure, group)
    except RankFault as fault:
        if failure is None:
            raise
        if not isinstance(failure, RankFault):
            failure.add_note(f"The error was not reported to the other ranks: {fault}")
    raise failure


def _somewhere(true_here: bool, group: dist.ProcessGroup | None) -> bool:
    flag = torch.tensor([int(true_here)], device="cpu")
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=voters_of(group))
    return bool(flag)


class Survivors(NamedTuple):
    """The new group."""

    rank: int
    world: int
    members: tuple[int, ...]
    """Former rank of each member."""
    step: int
    """Most steps that a member had completed; all members have its state."""


class Stateful(Protocol):
    """A model, an optimizer, a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def _forget_frames(error: BaseException | None) -> None:
    """Release the objects that the frames of an error and of those before it hold; messages and lines stay."""
    errors, seen = [error], set[int]()
    while errors:
        error = errors.pop()
        if error is None or id(error) in seen:
            continue
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        errors += [error.__cause__, error.__context__]


def regroup(
    store: dist.Store,
    generation: int,
    rank: int,
    world: int,
    *,
    settle: float = 5.0,
    timeout: timedelta = timedelta(minutes=10),
    backend: str | None = None,
    step: int = 0,
    state: Sequence[Stateful] = (),
) -> Survivors:
    """Make the ranks that are left the default group, with the same state. Collective among them.

    A rank that dies during a step may leave others one step apart. All of them take the `state` of one that completed
    the most steps, unless it is the same everywhere, and `Survivors.step` is the number of its steps.

    Afterwards give the modules their group with `set_process_group`, cut the sequence anew with a layout of as many
    ranks, and run the step again from the parameters: plans follow from the layout, and results are exact again.
    Before, remove the broken group with `set_process_group(model, None)`: while a reference to it exists, a rank that
    waits for this one is released at its timeout only, which may be too late.

    Args:
        store: rendezvous of the ranks. It must outlive the lost rank, and the launcher must not end the other ranks,
            as torchrun does.
        generation: a number no earlier call has used, the same on every rank: 1, then 2, ...
        rank: of this process in the group that broke; likewise `world`.
        settle: seconds to wait for other ranks. A rank that arrives later raises `LeftBehind`.
        timeout: of the new group.
        backend: of the new group; that of the old one, or gloo, if not given.
        step: updates of the parameters that this rank has completed.
        state: replicated state: the model, the optimizer, a schedule, in the same order on every rank.
            Not the state of a `Compression`, which differs from rank to rank.
    """
    if dist.is_initialized():
        backend = backend or dist.get_backend()
        # Ranks that still wait for this one are released now, not at their timeout: gloo's connections close
        # with the last reference to the group, and an error that is being handled holds some in its frames.
        _forget_frames(sys.exception())
        _voters.clear()
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
    # The first rank decides for all.
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
    return Survivors(own, len(members), members, _caught_up(step, state, own))


def _caught_up(step: int, state: Sequence[Stateful], rank: int) -> int:
    """Load the state of a rank that completed the most steps where ranks differ; returns its steps. Collective."""
    own = step, [_fingerprint(holder.state_dict()) for holder in state]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    source = max(range(len(every)), key=lambda rank: every[rank][0])
    if any(len(other[1]) != len(own[1]) for other in every):
        raise must("expected the state of the same number of objects on every rank", [len(other[1]) for other in every])
    if any(other != every[source] for other in every):
        sent = [None]
        if rank == source:
            file = io.BytesIO()
            torch.save([holder.state_dict() for holder in state], file)
            sent = [file.getvalue()]
        dist.broadcast_object_list(sent, source)
        if rank != source:
            assert sent[0] is not None
            loaded = torch.load(io.BytesIO(sent[0]), map_location="cpu", weights_only=True)
            for holder, taken in zip(state, loaded, strict=True):
                holder.load_state_dict(taken)
    return every[source][0]


def _fingerprint(state: Any) -> str:
    """Digest of a nested state; of a tensor, its shape, its dtype and the sum of its bits."""
    if isinstance(state, dict):
        facts = [(str(key), _fingerprint(value)) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        facts = [_fingerprint(value) for value in state]
    elif isinstance(state, torch.Tensor):
        size = min(state.element_size(), 8)
        bits = state.detach().reshape(-1).contiguous().view(INTEGERS[size])
        facts = (tuple(state.shape), str(state.dtype), int(bits.sum(dtype=torch.int64)))
    else:
        facts = state
    return sha256(repr(facts).encode()).hexdigest()

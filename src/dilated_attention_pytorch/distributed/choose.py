"""Which exchange and which layout: by predicted time, under stated assumptions about the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import must
from .comm import Traffic

Overlap = Literal["none", "local"]
Exchange = Literal["auto", "direct", "butterfly", "ring"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What predictions assume of one rank and its link. They are a model, not a measurement."""

    latency: float = 20e-6
    """Seconds a message."""
    bandwidth: float = 25e9
    """Bytes a second into a rank."""
    flops: float = 200e12
    """Floating-point operations a second of a rank, reached in attention."""

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops"):
            if not getattr(self, name) > 0:
                raise must(f"{name} must be positive", getattr(self, name))
        if self.latency < 0:
            raise must("latency must not be negative", self.latency)

    def transfer(self, nbytes: float, messages: float) -> float:
        """Seconds to receive."""
        return messages * self.latency + nbytes / self.bandwidth

    def __str__(self) -> str:
        return (
            f"{self.bandwidth / 1e9:.3g} GB/s, {self.latency * 1e6:.3g} us a message, "
            f"{self.flops / 1e12:.3g} TFLOP/s a rank"
        )


class Work(NamedTuple):
    """Floating-point operations of one rank."""

    near: float
    """On keys it holds itself."""
    far: float


def predicted(traffic: Traffic, work: Work, world: int, overlap: Overlap, machine: Machine) -> dict[str, float]:
    """Seconds of one rank's forward pass with each exchange, apart from the butterfly's.

    A ring hides its hops behind the work on the shard that is here; a fetch hides behind nothing, or behind the work
    on own keys.
    """
    near, far = work.near / machine.flops, work.far / machine.flops
    fetch = machine.transfer(traffic.bytes_received, traffic.messages)
    hops = machine.transfer(traffic.ring_bytes, world - 1)
    direct = max(fetch, near) + far if overlap == "local" else fetch + near + far
    return {"direct": direct, "ring": max(hops, near + far)}


def chosen(seconds: dict[str, float], asked: Exchange, against: dict[str, str], machine: Machine) -> tuple[str, str]:
    """The exchange to use, and why; `against` names what cannot be used, with the reason."""
    if asked != "auto":
        if asked in against:
            raise must(f'exchange="{asked}" must be possible here', against[asked], 'Use exchange="auto".')
        return asked, "asked for"
    possible = {name: time for name, time in seconds.items() if name not in against}
    best = min(possible, key=lambda name: possible[name])
    times = ", ".join(f"{name} {time * 1e3:.3g} ms" for name, time in possible.items())
    others = "".join(f"; not {name}: {why}" for name, why in against.items())
    return best, f"predicted {times} ({machine}){others}"

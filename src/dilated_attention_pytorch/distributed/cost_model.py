"""Predicted time of an exchange, under stated assumptions about the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import must
from .exchange import Traffic

Overlap = Literal["none", "local"]
Exchange = Literal["auto", "direct", "butterfly", "ring"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Assumptions about one rank and its link. Predictions are a model, not a measurement."""

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


class RankFlops(NamedTuple):
    """Floating-point operations of one rank."""

    near: float
    """On keys of its shard."""
    far: float
    """On keys of other ranks."""


def predict(traffic: Traffic, flops: RankFlops, world: int, overlap: Overlap, machine: Machine) -> dict[str, float]:
    """Seconds of one rank's forward pass by a direct exchange and by a ring.

    A ring overlaps its hops with the work on the present shard; a direct exchange overlaps with the work on own keys,
    or with nothing.
    """
    near, far = flops.near / machine.flops, flops.far / machine.flops
    fetch = machine.transfer(traffic.bytes_received, traffic.messages)
    hops = machine.transfer(traffic.ring_bytes, world - 1)
    direct = max(fetch, near) + far if overlap == "local" else fetch + near + far
    return {"direct": direct, "ring": max(hops, near + far)}


def choose_exchange(
    seconds: dict[str, float], requested: Exchange, against: dict[str, str], machine: Machine
) -> tuple[str, str]:
    """The exchange to use and the reason; `against` has the reasons against exchanges that cannot be used."""
    if requested != "auto":
        if requested in against:
            raise must(f'exchange="{requested}" must be possible here', against[requested], 'Use exchange="auto".')
        return requested, "requested"
    possible = {name: time for name, time in seconds.items() if name not in against}
    best = min(possible, key=lambda name: possible[name])
    times = ", ".join(f"{name} {time * 1e3:.3g} ms" for name, time in possible.items())
    others = "".join(f"; not {name}: {why}" for name, why in against.items())
    return best, f"predicted {times} ({machine}){others}"

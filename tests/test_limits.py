"""Time limits follow the machine: at least as written, longer where it is slow or busy."""

from __future__ import annotations

import os

import limits
import pytest


@pytest.fixture
def machine(monkeypatch):
    """A machine of two cores by the seconds of a burst and its load."""

    def set_up(seconds: float, load: float) -> None:
        clock = iter([0.0, seconds])
        monkeypatch.setattr(limits, "_measured", None)
        monkeypatch.setattr(limits, "burst", lambda: 0)
        monkeypatch.setattr(limits.time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load), raising=False)
        monkeypatch.setattr(os, "cpu_count", lambda: 2)

    return set_up


@pytest.mark.parametrize(
    ("seconds", "load", "factor"),
    [(0.02, 0.0, 1.0), (0.01, 2.0, 1.0), (0.06, 0.0, 3.0), (0.02, 8.0, 4.0), (0.1, 6.0, 5.0), (60.0, 0.0, limits.MOST)],
    ids=["quiet", "fast", "slow", "busy", "slow and busy", "stalled"],
)
def test_limits_follow_speed_and_load(machine, seconds, load, factor):
    machine(seconds, load)
    assert limits.scaled(10.0) == pytest.approx(10 * factor)


def test_a_measurement_is_used_again_for_a_while(machine):
    machine(0.06, 0.0)
    assert limits.slowdown() == limits.slowdown() == pytest.approx(3.0)


@pytest.mark.timeout(50)
def test_the_limit_of_a_test_is_scaled(request):
    if not request.config.pluginmanager.has_plugin("timeout") or request.config.getoption("timeout") is not None:
        pytest.skip("the command line sets the limit, or pytest-timeout is missing")
    assert 50 <= request.node.get_closest_marker("timeout").args[0] <= 50 * limits.MOST
    written = [marker.args[0] for marker in request.node.iter_markers("timeout")]
    assert written[-1] == 50 and len(written) == 2

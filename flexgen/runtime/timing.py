"""Times calls on a GPU: contenders in interleaved rounds, by device events, with a cold cache or a warm one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Contender = Callable[[], object]
_FLUSH_BYTES = 1 << 28  # written before a call, so that nothing of an earlier one is in L2; several times its size
_LEAST_CALLS, _MOST_CALLS = 2, 2000


class Stopwatch(Protocol):
    """Measures how long calls take."""

    def __call__(self, call: Contender, count: int) -> list[float]:
        """Return milliseconds of one call, measured once or up to `count` times, over `count` calls."""


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds of one call of a contender: the median of its rounds, the least, and the greatest."""

    median: float
    least: float
    greatest: float


class DeviceStopwatch:
    """Measures with events of the device, so that what the host does beside it does not count.

    Args:
        device: a CUDA device.
        cold: before each call L2 is filled with something else, as in a program where other kernels run between;
            otherwise calls run back to back and find their inputs in L2 where these fit.
    """

    def __init__(self, device: torch.device, *, cold: bool) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device) if cold else None

    def __call__(self, call: Contender, count: int) -> list[float]:
        """Return milliseconds of each call, or with a warm cache the mean of all, after one that is not measured."""
        call()
        if self._flush is None:
            start, stop = _event(), _event()
            torch.cuda.synchronize()
            start.record()
            for _ in range(count):
                call()
            stop.record()
            stop.synchronize()
            return [start.elapsed_time(stop) / count]
        events = [(_event(), _event()) for _ in range(count)]
        for start, stop in events:
            self._flush.zero_()  # takes long enough for the host to enqueue what is measured behind it
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def interleaved(
    contenders: Mapping[str, Contender], rounds: int, stopwatch: Stopwatch, target_ms: float = 60.0
) -> dict[str, Times]:
    """Return the times of one call of each contender.

    In each round every contender runs for about `target_ms`; so whatever changes the clock of the device in the
    meantime is the same for all of them.
    """
    counts = {name: _count(min(stopwatch(call, 2)), target_ms) for name, call in contenders.items()}
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            found[name].append(statistics.median(stopwatch(call, counts[name])))
    return {name: Times(statistics.median(times), min(times), max(times)) for name, times in found.items()}


def _count(milliseconds: float, target_ms: float) -> int:
    return min(max(_LEAST_CALLS, int(target_ms / max(milliseconds, 1e-3))), _MOST_CALLS)

"""Timing on a GPU: contenders in interleaved rounds, medians of device-event times."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

Contender = Callable[[], object]


def interleaved(contenders: Mapping[str, Contender], rounds: int, target_ms: float = 60.0) -> dict[str, float]:
    """Return the median milliseconds of one call of each contender, over interleaved rounds."""
    counts = {name: max(2, int(target_ms / max(_time(call, 2), 1e-3))) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            times[name].append(_time(call, counts[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _time(call: Contender, count: int) -> float:
    """Return the milliseconds of one call, from device events around `count` calls."""
    call()
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count

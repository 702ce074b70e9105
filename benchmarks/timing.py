"""Timing for the benchmarks: medians over interleaved rounds, of calls that run back to back."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flexgen.runtime.timing import Contender, DeviceStopwatch
from flexgen.runtime.timing import interleaved as times_of

__all__ = ["Contender", "interleaved"]


def interleaved(contenders: Mapping[str, Contender], rounds: int, target_ms: float = 60.0) -> dict[str, float]:
    """Return the median milliseconds of one call of each contender, over interleaved rounds."""
    stopwatch = DeviceStopwatch(torch.device("cuda"), cold=False)
    return {name: times.median for name, times in times_of(contenders, rounds, stopwatch, target_ms).items()}

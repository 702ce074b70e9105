"""Host time of one warm call, by replacing the launch with nothing: what flexgen's own Python costs. Runs anywhere.

python -m benchmarks.call_overhead
"""

from __future__ import annotations

import statistics
import time

import torch

import flexgen
from flexgen.runtime import kernel as kernels


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def microseconds(call, rounds: int = 30, count: int = 300) -> float:
    """Return the median microseconds of a call over rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def main() -> None:
    kernels.executor = lambda *_: lambda grid, values: None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = (torch.randn(1, 8, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    slopes, table = torch.rand(8, device=device), torch.rand(256, device=device)

    def biased(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * table[q_idx - kv_idx + 127]

    for name, attention in {
        "no mods": flexgen.compile(),
        "causal": flexgen.compile(None, causal),
        "two captured tensors": flexgen.compile(biased, causal),
    }.items():
        attention(query, key, value)
        print(f"{name:<24}{microseconds(lambda attention=attention: attention(query, key, value)):8.2f} us")
    print(f"{'torch.empty_like':<24}{microseconds(lambda: torch.empty_like(query)):8.2f} us, to compare")


if __name__ == "__main__":
    main()

"""Host time of one warm call, by replacing the launch with nothing: what flexgen's own Python costs. Runs anywhere.

python -m benchmarks.call_overhead
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

import flexgen
from flexgen.runtime import kernel, split_kernel


class Nothing:
    """Launches nothing, as quickly as a launcher does the rest."""

    def __init__(self, *_: object) -> None: ...

    def __call__(self, grid: object, values: object) -> None: ...

    def bound(self, grid: object, values: object) -> Callable[[Sequence[object]], None]:
        return lambda values: None


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def microseconds(call: Callable[[], object], rounds: int = 200, count: int = 50) -> float:
    """Return the microseconds of a call in the best of many short rounds, which others have disturbed the least."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return min(times)


def calls(device: str) -> dict[str, Callable[[], object]]:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    query, key, value = randn(1, 8, 128, 64), randn(1, 8, 128, 64), randn(1, 8, 128, 64)
    slopes, table = torch.rand(8, device=device), torch.rand(256, device=device)

    def biased(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * table[q_idx - kv_idx + 127]

    one, (key_cache, value_cache) = randn(2, 8, 1, 64), randn(2, 2, 2, 1024, 64)
    lengths = torch.full((2,), 1000, dtype=torch.int32, device=device)
    pages, page_table = randn(2, 32, 2, 64, 64), torch.arange(32, device=device, dtype=torch.int32).view(2, 16)
    plain, both, decode = flexgen.compile(), flexgen.compile(biased, causal), flexgen.compile(options={"SPLIT_KV": 4})
    masked = flexgen.compile(None, causal)
    return {
        "no mods": lambda: plain(query, key, value),
        "causal": lambda: masked(query, key, value),
        "two captured tensors": lambda: both(query, key, value),
        "with the logsumexp": lambda: plain(query, key, value, return_aux=flexgen.AuxRequest(lse=True)),
        "decode, 4 splits": lambda: decode(one, key_cache, value_cache),
        "decode, kv_lengths": lambda: decode(one, key_cache, value_cache, kv_lengths=lengths),
        "decode, pages": lambda: decode(one, *pages, kv_lengths=lengths, page_table=page_table),
        "torch.empty_like": lambda: torch.empty_like(query),
    }


@torch.no_grad()
def main() -> None:
    kernel.executor = split_kernel.executor = Nothing
    for name, call in calls("cuda" if torch.cuda.is_available() else "cpu").items():
        for _ in range(3):
            call()
        print(f"{name:<24}{microseconds(call):8.2f} us")


if __name__ == "__main__":
    main()

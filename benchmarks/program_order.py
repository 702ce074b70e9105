"""In which order programs of packed documents should start: a simulation of their schedule, which needs no GPU.

    python -m benchmarks.program_order --out benchmarks/results

A GPU starts programs in order, each as soon as a place is free. A program takes one unit of time for each tile of keys
and two more; one without a token takes a third of a unit. Each order is compared with the least time possible: all
work, spread evenly over all places.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
from collections.abc import Iterable
from pathlib import Path

from benchmarks.about import environment
from benchmarks.varlen import partition

TOKENS, BLOCK = 32768, 64
PLACES = {16: 264, 32: 396}  # by heads, of head dims 128 and 64: two and three programs on each of 132 multiprocessors
COUNTS = (4, 16, 64, 256)
SEEDS = 6
ORDERS = ("head after head", "heads together", "longest first")


def costs(lengths: Iterable[int], *, causal: bool) -> list[float]:
    """Return what the programs of one head cost, in the order of their tiles."""
    found, begin = [], 0
    for length in lengths:
        for tile in range((begin + length) // BLOCK - begin // BLOCK + 1):
            keys = min(tile * BLOCK + BLOCK, length) if causal else length
            found.append(2 + -(-keys // BLOCK) if tile * BLOCK < length else 1 / 3)
        begin += length
    return found


def makespan(programs: Iterable[float], places: int) -> float:
    """Return when the last program ends."""
    free = [0.0] * places
    for cost in programs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def ratios(count: int, heads: int, *, causal: bool, seed: int) -> list[float]:
    """Return the time of each order over the least possible."""
    tiles = costs(partition(TOKENS, count, seed), causal=causal)
    order = tiles[::-1] if causal else tiles
    together = [cost for cost in order for _ in range(heads)]
    best = sum(together) / PLACES[heads]
    schedules = (order * heads, together, sorted(together, reverse=True))
    return [makespan(schedule, PLACES[heads]) / best for schedule in schedules]


def measure() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for count in COUNTS:
        for heads in PLACES:
            for causal in (True, False):
                drawn = [ratios(count, heads, causal=causal, seed=seed) for seed in range(SEEDS)]
                means = dict(zip(ORDERS, map(statistics.mean, zip(*drawn, strict=True)), strict=True))
                rows.append({"documents": count, "heads": heads, "causal": causal, **means})
    return rows


def report(rows: list[dict[str, object]], about: dict[str, str]) -> str:
    lines = ["# Order of programs over packed documents, simulated", "", *(f"- {k}: {v}" for k, v in about.items()), ""]
    lines += [
        f"{TOKENS} tokens in documents of random lengths, tiles of {BLOCK}; time over the least possible, means of "
        f"{SEEDS} draws. Causal programs start with each document's last tile.",
        "",
        "| documents | heads | causal | " + " | ".join(ORDERS) + " |",
        "| --- | --- | --- | " + " | ".join("---:" for _ in ORDERS) + " |",
    ]
    for row in rows:
        cells = [str(row["documents"]), str(row["heads"]), "yes" if row["causal"] else "no"]
        lines.append("| " + " | ".join([*cells, *(f"{row[order]:.3f}" for order in ORDERS)]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to write program_order.json and program_order.md to")
    args = parser.parse_args()
    rows, about = measure(), environment("program_order", gpu=False)
    print(report(rows, about))
    if args.out:
        (args.out / "program_order.md").write_text(report(rows, about), encoding="utf-8")
        data = {"environment": about, "rows": rows}
        (args.out / "program_order.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""How long flexgen itself takes, without Triton: capture, analysis, planning and emission of every mod of the tests.

    python -m benchmarks.compile_time --out benchmarks/results

Needs no GPU. "first" lowers a new Attention, so it captures, analyses, plans and emits; "again" lowers it once more,
which plans and emits anew. Both in a process that has compiled other mods before, for sm_90, bfloat16, head dims of 64.
Processor time, so that other work on the machine counts less. Writes compile_time.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import flexgen
from benchmarks.about import environment
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES

ROUNDS = 5
TARGET = "sm_90"
SHAPE = Shape(2, 4, 4, 1024, 1024)
HEAD_DIM = 64
STEPS = ("first", "again", "with backward, first", "with backward, again")


@dataclass(frozen=True, slots=True)
class Row:
    """Milliseconds of processor time of one mod: medians, in the order of `STEPS`."""

    kind: str
    mod: str
    milliseconds: tuple[float, ...]


def measure(kind: str, case: Case) -> Row:
    mod = case.build(SHAPE, torch.device("cpu"))
    score, mask = (mod, None) if kind == "score" else (None, mod)

    def lowering(backward: bool) -> Callable[[], object]:
        sizes = ((SHAPE.B, SHAPE.Hq, SHAPE.Lq, HEAD_DIM), *2 * [(SHAPE.B, SHAPE.Hkv, SHAPE.Lk, HEAD_DIM)])
        inputs = [
            torch.empty(size, dtype=torch.bfloat16, device="meta", requires_grad=backward)  # no storage
            for size in sizes
        ]
        attention = flexgen.compile(score, mask)
        return lambda: attention.lower(*inputs, target=TARGET).source

    rounds = []
    for _ in range(ROUNDS + 1):  # the first warms up
        forward, backward = lowering(False), lowering(True)
        rounds.append([timed(step) for step in (forward, forward, backward, backward)])
    return Row(kind, case.name, tuple(statistics.median(times) for times in zip(*rounds[1:], strict=True)))


def timed(step: Callable[[], object]) -> float:
    start = time.process_time()
    step()
    return (time.process_time() - start) * 1e3


def report(rows: Sequence[Row], about: dict[str, str]) -> str:
    columns = list(zip(*(row.milliseconds for row in rows), strict=True))
    lines = ["# Compile time without Triton", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        'Milliseconds of processor time in a warm process, medians of each mod. "first" captures, analyses, plans and',
        'emits; "again" plans and emits. A backward is up to three kernels more.',
        "",
        "| of all mods | " + " | ".join(STEPS) + " |",
        "| --- | " + " | ".join("---" for _ in STEPS) + " |",
        "| median | " + " | ".join(f"{statistics.median(column):.1f}" for column in columns) + " |",
        "| largest | " + " | ".join(f"{max(column):.1f}" for column in columns) + " |",
        "",
        "| kind | mod | " + " | ".join(STEPS) + " |",
        "| --- | --- | " + " | ".join("---" for _ in STEPS) + " |",
    ]
    lines += [f"| {r.kind} | {r.mod} | " + " | ".join(f"{ms:.1f}" for ms in r.milliseconds) + " |" for r in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder to write the results to")
    arguments = parser.parse_args()
    rows = []
    for kind, corpus in (("mask", MASKS), ("score", SCORES)):
        for case in corpus:
            if case.fits(SHAPE):
                rows.append(measure(kind, case))
                print(f"{kind} {case.name}: " + ", ".join(f"{ms:.1f}" for ms in rows[-1].milliseconds), file=sys.stderr)
    about = environment("compile_time", gpu=False)
    text = report(rows, about)
    print(text)
    if arguments.out:
        (arguments.out / "compile_time.md").write_text(text, encoding="utf-8")
        data = {"environment": about, "steps": STEPS, "rows": [asdict(row) for row in rows]}
        (arguments.out / "compile_time.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

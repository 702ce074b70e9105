"""`flexgen bench`: times of the kernels on this machine's GPU, beside what else computes the same."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flexgen import __version__
from flexgen.commands.arguments import add_file, add_problem
from flexgen.commands.bench_plot import save_bars
from flexgen.commands.bench_rows import BenchRow, bench
from flexgen.commands.compile_times import compile_times
from flexgen.commands.console import Console, Span
from flexgen.commands.contenders import DIRECTIONS, FLEXGEN
from flexgen.commands.mask_plot import format_of, require_matplotlib
from flexgen.commands.subject import Subject, choose_target, load_subject
from flexgen.errors import FlexgenError, OptionError
from flexgen.explain_work import duration
from flexgen.runtime.apart import MOST_APART
from flexgen.runtime.device_target import target_of
from flexgen.runtime.timing import DeviceStopwatch

EXAMPLES = """\
  flexgen bench causal.py --shape 2,16,16,8192,8192,128,128
  flexgen bench causal.py --only forward --warm -o bench.png
  flexgen bench causal.py --json results.json    for machines; - for standard output
  flexgen bench causal.py --compile              how long compiling takes; needs no GPU"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16", target=False, dropout=False)
    parser.add_argument(
        "--only",
        choices=DIRECTIONS,
        action="append",
        help="time this direction alone; may be repeated. decode is one query, the last of the sequence, over all keys",
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="interleaved rounds (default: 5)")
    parser.add_argument(
        "--warm",
        action="store_true",
        help="calls back to back: what fits in L2 is found there (default: L2 is flushed)",
    )
    parser.add_argument(
        "--compile", action="store_true", help="time what compiling takes instead; without a GPU this is what is timed"
    )
    parser.add_argument("--json", metavar="FILE", help="write the times as JSON; - for standard output, alone")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="draw the speeds into a .png or .svg file (needs matplotlib)"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.rounds < 1:
        raise OptionError(f"--rounds {arguments.rounds} is none", fix="give 1 or more")
    if arguments.output is not None:
        format_of(arguments.output)
        require_matplotlib()
    if arguments.compile or not torch.cuda.is_available():
        return _compile(arguments, console)
    device = torch.device("cuda")
    with device:  # tensors that the file makes are captured there by every contender
        subject = load_subject(arguments)
    stopwatch = DeviceStopwatch(device, cold=not arguments.warm)
    rows: list[BenchRow] = []
    for direction in console.track(arguments.only or DIRECTIONS, "timing"):
        rows += bench(subject, direction, target_of(device).name, device, stopwatch, arguments.rounds)
    _write_json(arguments.json, _results(subject, arguments, [row_json(row) for row in rows], "calls"), console)
    if arguments.json != "-":
        cache = "L2 warm" if arguments.warm else "L2 flushed before each call"
        _write_head(subject, f"{torch.cuda.get_device_name()}, {cache}", console)
        write_rows(rows, subject.dtype, console)
    if arguments.output is not None:
        save_bars(rows, _title(subject), arguments.output)
        console.note(f"wrote {arguments.output}")
    return 0


def _title(subject: Subject) -> str:
    return f"{subject.name}  {subject.shape}  {str(subject.dtype).removeprefix('torch.')}"


def _write_head(subject: Subject, where: str, console: Console) -> None:
    console.line(Span(_title(subject), "bold"), Span(f"  on {where}", "dim"))


def write_rows(rows: Sequence[BenchRow], dtype: torch.dtype, console: Console) -> None:
    """Write a table of the times, and remarks on what did not run."""
    header = ("direction", "contender", "time", "from", "to", "TFLOP/s", "flexgen is", "bound", "apart")
    cells: list[list[Span | str]] = []
    own = {row.direction: row.times for row in rows if row.contender == FLEXGEN}
    for row in rows:
        flexgen = own.get(row.direction)
        if row.times is None or row.tflops is None or flexgen is None:
            continue
        ratio = row.times.median / flexgen.median
        is_own = row.contender == FLEXGEN
        wrong = row.apart > MOST_APART[dtype.itemsize]
        cells.append(
            [
                row.direction,
                Span(row.contender, "bold" if is_own else ""),
                *(_ms(each) for each in (row.times.median, row.times.least, row.times.greatest)),
                f"{row.tflops:.3g}",
                "" if is_own else Span(f"{ratio:.2f}x", "green" if ratio >= 1 else "red"),
                f"{row.least_ms / row.times.median:.0%}" if is_own and row.least_ms else "",
                Span("" if is_own else f"{row.apart:.1e}", "red" if wrong else ""),
            ]
        )
    console.table(header, cells, left=2)
    console.line(
        Span("medians of the rounds, the least and the greatest; TFLOP/s over live pairs; how many times as", "dim")
    )
    console.line(
        Span("fast flexgen is; the share of the time that the chip's units need at least (`flexgen explain`", "dim")
    )
    console.line(Span("says which); how far the result is from flexgen's, relative", "dim"))
    for row in rows:
        if row.times is None:
            console.note(f"{row.direction}: {row.contender} was left out: {row.remark}", "yellow")


_LEGEND = (
    "time is the median of the rounds; TFLOP/s count live pairs; flexgen is so many times as fast; bound is the share "
    "of its time that the chip needs at least, as `flexgen explain` says; apart is the relative difference of results"
)


def _ms(milliseconds: float) -> str:
    return duration(milliseconds / 1e3)


# Compile times.


def _compile(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.compile:
        if arguments.only or arguments.output is not None or arguments.warm:
            raise FlexgenError(
                "there is no GPU here to time calls on",
                why="on the CPU kernels are interpreted: those times say nothing about a GPU's",
                fix="run this on a machine with one; `flexgen bench FILE` alone times what compiling takes, and "
                "`flexgen explain FILE` predicts what bounds the kernel",
            )
        console.note("no GPU here: times of calls would mean nothing; these are what compiling takes")
    subject = load_subject(arguments)
    target = choose_target(None, console)
    times = compile_times(subject, target, arguments.rounds)
    rows = [{"step": step.name, "ms": step.milliseconds, "of": step.what} for step in times]
    _write_json(arguments.json, _results(subject, arguments, rows, "compilation"), console)
    if arguments.json != "-":
        _write_head(subject, f"this machine's processor, for {target}", console)
        console.table(
            ("step", "what", "time"), [(step.name, step.what, _ms(step.milliseconds)) for step in times], left=2
        )
    return 0


# For machines.


def row_json(row: BenchRow) -> dict[str, Any]:
    """Return a row as JSON values; times in milliseconds."""
    times = row.times and {"median": row.times.median, "least": row.times.least, "greatest": row.times.greatest}
    return {
        "direction": row.direction,
        "contender": row.contender,
        "ms": times,
        "tflops": row.tflops,
        "least_ms": row.least_ms,
        "apart": row.apart,
        "remark": row.remark,
    }


def _results(subject: Subject, arguments: argparse.Namespace, rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {
        "of": kind,
        "file": subject.name,
        "shape": subject.shape._asdict(),
        "dtype": str(subject.dtype).removeprefix("torch."),
        "options": dict(arguments.set),
        "cache": "warm" if arguments.warm else "cold",
        "environment": {
            "device": device,
            "date": time.strftime("%Y-%m-%d"),
            "flexgen": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "rows": rows,
    }


def _write_json(where: str | None, results: dict[str, Any], console: Console) -> None:
    if where is None:
        return
    text = json.dumps(results, indent=1) + "\n"
    if where == "-":
        console.text(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FlexgenError(f"cannot write {where}: {error.strerror}", fix="give --json a file of your own") from error
    console.note(f"wrote {where}")

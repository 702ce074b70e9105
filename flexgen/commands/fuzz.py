"""`flexgen fuzz`: drawn cases against float64 until the time is over; what fails becomes a small script."""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flexgen.commands.console import Console, Span, counted, wrapped
from flexgen.commands.offline import triton_is_installed
from flexgen.errors import FlexgenError, OptionError
from flexgen.runtime.compile_pool import usual_workers

if TYPE_CHECKING:
    from flexgen.fuzzing.hunt import Failure
    from flexgen.fuzzing.tally import Tally

EXAMPLES = """\
  flexgen fuzz --seconds 600                     on this machine's GPU, or interpreted on the CPU
  flexgen fuzz --seconds 60 --seed 7 --backward  the same cases each time, all with gradients
  flexgen fuzz --seconds 600 --out found         what fails, one test for each"""

REPORT_SECONDS = 30.0  # between lines that say how far it is, where no person is watching


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=60.0, metavar="N", help="how long to draw cases (default: 60)")
    parser.add_argument("--cases", type=int, metavar="N", help="how many cases at most")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed draws other cases (default: 0)")
    parser.add_argument("--backward", action="store_true", help="check gradients in every case, not in one of five")
    parser.add_argument("--target", choices=("interpret", "cuda"), help="where to run (default: the GPU, if any)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a processor, 16 at most)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write each failure there, as a test (default: print)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    on_gpu = _runs_on_gpu(arguments.target)
    for name in ("seconds", "cases", "jobs"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise OptionError(f"--{name} {value} is none", fix="give more than 0")
    from flexgen.fuzzing.cases import Scope
    from flexgen.fuzzing.hunt import Failure, Plan
    from flexgen.fuzzing.pool import FuzzPool
    from flexgen.fuzzing.tally import Tally

    plan = Plan(Scope(arguments.backward, on_gpu), arguments.seed, arguments.seconds, arguments.cases)
    total, failures = Tally(), list[Failure]()
    place = torch.cuda.get_device_name() if on_gpu else "the CPU, in Triton's interpreter"
    console.note(f"seed {plan.seed}, {arguments.seconds:g} seconds at most, on {place}")
    with FuzzPool(plan, arguments.jobs or usual_workers()) as pool:
        for event in _told(pool.events(), total, arguments.seconds, console):
            failures.append(event)
            _write_failure(event, len(failures), arguments.out, console)
    _write_tally(total, console)
    verdict = f"{counted(len(failures), 'failure')}" if failures else "no failure"
    console.line(Span(verdict, "red" if failures else "green"))
    return 1 if failures else 0


def _runs_on_gpu(target: str | None) -> bool:
    """Return whether to run on a GPU.

    Raises:
        FlexgenError: what is needed is not there.
    """
    if importlib.util.find_spec("hypothesis") is None:
        raise FlexgenError(
            "fuzzing needs hypothesis, which is not installed",
            why="it draws the cases, and makes those that fail small",
            fix="pip install 'flexgen[fuzz]'",
        )
    if not triton_is_installed():
        raise FlexgenError(
            "running a kernel needs triton, which is not installed",
            why="triton runs it on a GPU, and its interpreter on the CPU; it has wheels for Linux",
            fix="fuzz on Linux",
        )
    if target == "cuda" and not torch.cuda.is_available():
        raise OptionError("--target cuda needs a GPU, and there is none here", fix="leave --target out")
    return torch.cuda.is_available() if target is None else target == "cuda"


def _told(events: Iterator[Tally | Failure], total: Tally, seconds: float, console: Console) -> Iterator[Failure]:
    """Add up what is counted, say how far it is, and yield the failures."""
    from flexgen.fuzzing.tally import Tally

    start = last = time.monotonic()
    with console.status("starting") as tell:
        for event in events:
            if not isinstance(event, Tally):
                yield event
                continue
            total.add(event)
            now = time.monotonic()
            progress = f"{now - start:.0f} of {seconds:g} s: {_progress(total, now - start)}"
            tell(progress)
            if now - last > REPORT_SECONDS and not console.is_watched:
                console.note(progress)
                last = now


def _progress(total: Tally, elapsed: float) -> str:
    rate = total.forward / max(elapsed, 1e-9)
    return f"{counted(total.forward, 'forward')}, {counted(total.backward, 'backward')}, {rate:.1f} a second"


def _write_failure(failure: Failure, number: int, out: Path | None, console: Console) -> None:
    console.line(Span(f"failure {number}", "red"))
    for line in failure.error.splitlines():
        console.line(f"  {line}")
    if out is None:
        console.code(failure.script)
        return
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"test_found_{number}.py"
    path.write_text(failure.script, encoding="utf-8")
    console.line(f"  written to {path}")


def _write_tally(total: Tally, console: Console) -> None:
    rows = [
        ("cases", f"{total.cases:,}, refused with a reason {sum(total.refused.values()):,}"),
        ("checked", f"{counted(total.forward, 'forward')} and {counted(total.backward, 'backward')} against float64"),
        ("at an edge", f"{counted(total.excused, 'result')} that errors of rounding may move as far as they are off"),
        ("masks", _shares(total.tiers)),
        ("dtypes", _shares(total.dtypes)),
        ("also", _shares(total.ways)),
        ("ops", _shares(total.ops)),
        ("refused", _shares(total.refused)),
    ]
    rows += (
        [("repeated", f"{counted(total.repeated, 'case')} that failed as earlier ones did")] if total.repeated else []
    )
    for label, text in rows:
        for line in wrapped(f"  {label:<11} {text}" if text else ""):
            console.line(line)


def _shares(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common())

"""`flexgen compile`: emit a kernel, and print it, write every stage, or compile it offline and sum it up."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from flexgen.commands.arguments import STDOUT, add_backward, add_diff, add_dump_code, add_file, add_problem
from flexgen.commands.console import Console, Span, wrapped
from flexgen.commands.diff import write_diff
from flexgen.commands.offline import Built, build_offline, triton_is_installed
from flexgen.commands.resource_report import instruction_lines, resource_lines
from flexgen.commands.subject import Subject, choose_target, load_subject
from flexgen.errors import FlexgenError, OptionError
from flexgen.lowered import Lowered
from flexgen.lowering.plans import RowPlan, WalkPlan

EXAMPLES = """\
  flexgen compile causal.py                      compile for this machine's GPU, or sm_90
  flexgen compile causal.py --dump-code          print the kernel
  flexgen compile causal.py --dump-code out      write each stage into out/
  flexgen compile causal.py --diff USE_SUBTILING=1 num_warps=8
                                                 what these options change: decisions, then text
  flexgen compile mods.py:softcap,causal --target gfx942 --dtype fp16
  flexgen compile causal.py --set BLOCK_M=64 num_warps=4 --shape 2,32,8,4096,4096,128,128"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_dump_code(parser)
    add_diff(parser)
    add_backward(parser)
    add_problem(parser, dtype="bf16")


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.diff and arguments.dump_code is not None:
        raise OptionError(
            "--diff and --dump-code exclude each other",
            why="one prints what changes, the other everything",
            fix="give one of them; --set with --dump-code prints the text with options set",
        )
    subject = load_subject(arguments)
    target = choose_target(arguments.target, console)
    if arguments.diff:
        write_diff(subject, target, dict(arguments.diff), arguments.backward, console)
        return 0
    lowered = subject.lower(target, backward=arguments.backward)
    match arguments.dump_code:
        case None:
            built = [build_offline(lowered, entry) for entry in lowered.entries]
            console.line(Span(f"{subject.name} for {lowered.plan.target.name}", "bold"))
            for each in built:
                _sum_up(subject, each, console)
        case where if where == STDOUT:
            for source in lowered.source.values():
                console.code(source)
        case directory:
            _write_stages(lowered, Path(directory), console)
    return 0


def _write_stages(lowered: Lowered, directory: Path, console: Console) -> None:
    """Write every stage; the compiled ones last, so that a kernel that does not compile can be read."""
    for name, text in _stages(lowered, console):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise FlexgenError(
                f"cannot write {directory / name}: {error.strerror}", fix="give --dump-code a directory of your own"
            ) from error
        console.line(str(directory / name))


def _stages(lowered: Lowered, console: Console) -> Iterator[tuple[str, str]]:
    yield from lowered.stages
    target = lowered.plan.target
    if target.backend == "interpret":
        return
    if not triton_is_installed():
        console.note("triton is not installed: there is no machine code to write")
        return
    reports = []
    for entry in lowered.entries:
        built = build_offline(lowered, entry)
        kind, text = built.assembly
        name = target.name if entry == "forward" else f"{entry}.{target.name}"
        yield f"06_{name}.{kind}", text
        report = [f"{label:<20}{value}" for label, value in resource_lines(built)]
        reports.append("\n".join([entry, *report, "", *instruction_lines(built), ""]))
    yield "06_resources.txt", "\n".join(reports)


def _sum_up(subject: Subject, built: Built, console: Console) -> None:
    plan = built.plan
    rows = [("kernel", built.entry), ("shape", f"{subject.sizes} {str(subject.dtype).removeprefix('torch.')}")]
    if not isinstance(plan, RowPlan):
        rows += [
            ("tile", tile_text(plan)),
            ("walks", f"{plan.schedule.walk.value}: {plan.schedule.because}"),
        ]
    for label, value in [*rows, *resource_lines(built)]:
        for number, line in enumerate(wrapped(value, 80)):
            console.line(Span(f"  {label if number == 0 else '':<18}", "cyan"), line)


def tile_text(plan: WalkPlan) -> str:
    return f"{plan.BLOCK_M} queries x {plan.BLOCK_N} keys, {plan.num_warps} warps, {plan.num_stages} stages"

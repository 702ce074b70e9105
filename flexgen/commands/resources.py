"""`flexgen resources`: what compiled kernels cost, on several targets and with several options side by side."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from flexgen.commands.arguments import add_backward, add_file, add_problem
from flexgen.commands.console import Console
from flexgen.commands.offline import Built, build_offline
from flexgen.commands.resource_table import Row, write_tables
from flexgen.commands.spills import spills, steps, write_spills, write_steps
from flexgen.commands.subject import Subject, choose_target, load_subject
from flexgen.commands.sweep import parse_sweep, settings_of, settings_text
from flexgen.errors import FlexgenError
from flexgen.lowered import Lowered
from flexgen.lowering.targets import TARGETS, target_named
from flexgen.runtime.compile_ahead import PROGRAM
from flexgen.runtime.compile_pool import CompilePool, usual_workers
from flexgen.tuning.settings import Settings

EXAMPLES = """\
  flexgen resources causal.py --target sm_80 --target sm_90
  flexgen resources causal.py --target all --shape 1,8,8,4096,4096,128,128
  flexgen resources causal.py --backward         each backward kernel too
  flexgen resources causal.py --compare num_stages=2,3 BLOCK_M=64,128
  flexgen resources causal.py --set BLOCK_N=128 num_warps=4 --steps
                                                 which option changes what it spills?"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16", target=False)
    parser.add_argument(
        "--target",
        metavar="TARGET",
        action="append",
        help="a chip to compile for, several times or separated by commas, or all "
        "(default: this machine's GPU; without one, sm_90)",
    )
    add_backward(parser)
    parser.add_argument(
        "--compare",
        type=parse_sweep,
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="a row for each value of an option, and for each combination of several; `default` leaves it to flexgen",
    )
    parser.add_argument(
        "--steps",
        action="store_true",
        help="compile each kernel again with each option changed by one step, and compare what spills",
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """A lowering to compile: a target and the options set for it."""

    target: str
    settings: Settings


def run(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments)
    targets = _targets(arguments.target, console)
    wanted = [Wanted(*each) for each in itertools.product(targets, settings_of(arguments.compare))]
    rows: list[Row] = []
    refused: list[str] = []
    errors: list[FlexgenError] = []
    for each in console.track(wanted, "compiling"):
        setting = settings_text(each.settings) if arguments.compare else ""
        try:
            rows += [Row(built, setting) for built in _build(subject, each, arguments.backward)]
        except FlexgenError as error:
            errors.append(error)
            refused.append(f"{each.target}{' ' if setting else ''}{setting}: {error.what}")
    if errors and not rows:
        raise errors[0]
    if rows:
        write_tables(rows, console)
    for row in rows:
        if spills(row.built):
            console.line()
            write_spills(row.built, row.setting, console)
    _write_notes(rows, refused, arguments.steps, console)
    if arguments.steps:
        _write_steps(subject, wanted, rows, console)
    return 0


def _build(subject: Subject, wanted: Wanted, backward: bool) -> Iterator[Built]:
    lowered = subject.having(wanted.settings).lower(wanted.target, backward=backward)
    for entry in lowered.entries:
        yield build_offline(lowered, entry)


def _write_notes(rows: list[Row], refused: list[str], has_steps: bool, console: Console) -> None:
    """Write what the assembler warned of, what could not be compiled, and how to go on."""
    for row in rows:
        for warning in row.built.resources.warnings:
            console.note(f"{row.built.plan.target.name} {row.built.entry}: {warning}", "yellow")
    for line in refused:
        console.note(line, "yellow")
    if not has_steps and any(spills(row.built) for row in rows):
        console.note("--steps compiles again with each option changed by one step, to see which helps")


def _write_steps(subject: Subject, wanted: list[Wanted], rows: list[Row], console: Console) -> None:
    """Compile every kernel with one option changed at a time."""
    settings = {(each.target, settings_text(each.settings)): each.settings for each in wanted}
    for row in rows:
        plan = row.built.plan
        own = settings[plan.target.name, row.setting or settings_text({})]
        entry = row.built.entry
        has_tanh = "tanh" in row.built.lowered.sources[entry].text
        tried = [step for step in steps(plan) if has_tanh or not any(name.endswith("FAST_TANH") for name in step)]
        lowered = [(step, _lower(subject, Wanted(plan.target.name, {**own, **step}), entry)) for step in tried]
        if not lowered:
            continue
        _compile_at_once([low for _, low in lowered if isinstance(low, Lowered)], entry, console)
        console.line()
        write_steps(row.built, [(step, _built(low, entry)) for step, low in lowered], console)


def _lower(subject: Subject, wanted: Wanted, entry: str) -> Lowered | str:
    """Return a lowering, or why there is none."""
    try:
        return subject.having(wanted.settings).lower(wanted.target, backward=entry != "forward")
    except FlexgenError as error:
        return error.what


def _compile_at_once(lowered: list[Lowered], entry: str, console: Console) -> None:
    """Fill Triton's cache with a kernel of each lowering, in as many processes as there are processors."""
    jobs = [low.compile_job(entry) for low in lowered]
    with CompilePool(usual_workers(), PROGRAM, bool) as pool:
        for _ in console.progress(pool.compile(jobs), len(jobs), f"compiling {entry}"):
            pass


def _built(lowered: Lowered | str, entry: str) -> Built | str:
    try:
        return lowered if isinstance(lowered, str) else build_offline(lowered, entry)
    except FlexgenError as error:
        return error.what


def _targets(asked: list[str] | None, console: Console) -> list[str]:
    if not asked:
        return [choose_target(None, console)]
    names = [name for part in asked for name in part.split(",")]
    chips = [row.name for row in TARGETS.values() if row.backend != "interpret"]
    expanded = [chip for name in names for chip in (chips if name == "all" else [target_named(name).name])]
    return list(dict.fromkeys(expanded))

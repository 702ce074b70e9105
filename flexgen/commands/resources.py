"""`flexgen resources`: what the compiled kernel costs on one or several targets."""

from __future__ import annotations

import argparse

from flexgen.commands.arguments import add_file, add_problem
from flexgen.commands.console import Console, Span
from flexgen.commands.offline import Built, build_offline
from flexgen.commands.resource_report import exponentials
from flexgen.commands.subject import choose_target, load_subject
from flexgen.errors import FlexgenError
from flexgen.lowering.targets import TARGETS, target_named

EXAMPLES = """\
  flexgen resources causal.py --target sm_80 --target sm_90
  flexgen resources causal.py --target all --shape 1,8,8,4096,4096,128,128"""

_HEADER = (
    "target",
    "tile",
    "warps",
    "stages",
    "regs",
    "spilled",
    "shared",
    "planned",
    "matrix",
    "exp2",
    "local",
    "all",
)


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


def run(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments)
    targets = _targets(arguments.target, console)
    rows: list[list[Span | str]] = []
    warnings: list[str] = []
    for target in console.track(targets, "compiling"):
        try:
            built = build_offline(subject.lower(target))
        except FlexgenError as error:
            if len(targets) == 1:
                raise
            warnings.append(f"{target}: {error.what}")
            continue
        rows.append(_row(built))
        warnings += [f"{target}: {warning}" for warning in built.resources.warnings]
    console.table(_HEADER, rows, left=2)
    console.line(Span("regs a thread; spilled bytes a thread; shared memory in bytes; instructions by kind", "dim"))
    for warning in warnings:
        console.note(warning, "yellow")
    return 0


def _targets(asked: list[str] | None, console: Console) -> list[str]:
    if not asked:
        return [choose_target(None, console)]
    names = [name for part in asked for name in part.split(",")]
    chips = [row.name for row in TARGETS.values() if row.backend != "interpret"]
    expanded = [chip for name in names for chip in (chips if name == "all" else [target_named(name).name])]
    return list(dict.fromkeys(expanded))


def _row(built: Built) -> list[Span | str]:
    costs, plan = built.resources, built.lowered.plan
    spilled = costs.spill_stores + costs.spill_loads
    numbers = (
        costs.shared_bytes,
        plan.shared_bytes,
        costs.matrix_instructions,
        exponentials(built),
        costs.local_memory_instructions,
        sum(costs.instructions.values()),
    )
    return [
        plan.target.name,
        f"{plan.BLOCK_M}x{plan.BLOCK_N}",
        str(plan.num_warps),
        str(plan.num_stages),
        str(costs.registers),
        Span(str(spilled), "red" if spilled else ""),
        *map(str, numbers),
    ]

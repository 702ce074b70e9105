"""Why a kernel spills, at which lines, and which option changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from flexgen.commands.console import Console, Span, wrapped
from flexgen.commands.offline import Built
from flexgen.commands.resource_report import tile_sizes
from flexgen.commands.sweep import settings_text
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS, GluonPlan
from flexgen.lowering.plans import AnyBackwardPlan, RowPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton.backward_tiles import TILE_OPTIONS
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.machine_code import LOCAL, MATRIX
from flexgen.tuning.settings import Settings

LINES_SHOWN = 5
_ADDRESSABLE = {"cuda": 255, "hip": 512}  # registers of a thread that instructions can name


def spills(built: Built) -> bool:
    """Whether a kernel keeps values in local memory."""
    costs = built.resources
    return costs.spill_stores + costs.spill_loads + costs.local_memory_instructions > 0


def write_spills(built: Built, setting: str, console: Console) -> None:
    """Write why a kernel that spills does, and at which lines."""
    plan, costs = built.plan, built.resources
    with_setting = f" with {setting}" if setting else ""
    console.line(Span(f"why {built.entry} spills on {plan.target.name}{with_setting}", "bold"))
    for label, text in spill_reasons(built):
        for number, part in enumerate(wrapped(text, 80)):
            console.line(Span(f"  {label if number == 0 else '':<16}", "cyan"), part)
    source = built.lowered.sources[built.entry]
    emitted = source.text.splitlines()
    shown = [(line, number) for line, number in costs.spilled_lines.items() if line <= len(emitted)][:LINES_SHOWN]
    for place, (line, number) in enumerate(shown):
        label = "most of it at" if place == 0 else ""
        console.line(Span(f"  {label:<16}", "cyan"), f"{number:>5} x  {emitted[line - 1].strip()[:74]}")
        console.line(Span(f"  {'':<16}{'':>7}  line {line}, from {source.line_map[line - 1]}"[:100], "dim"))


def spill_reasons(built: Built) -> Iterator[tuple[str, str]]:
    """Yield label and text of why a kernel that spills does, and what would leave a thread fewer values."""
    plan, costs = built.plan, built.resources
    limit = _register_limit(built)
    if not isinstance(plan, RowPlan):
        held = held_values(plan)
        parts = ", ".join(f"{name} {number}" for name, number in held.items())
        total = sum(held.values())
        yield "a thread holds", f"{parts}: {total} values of 32 bits, besides addresses and row statistics"
        yield "it has", _registers_text(built, limit)
        if multiplies_without_matrix_unit(built):
            yield (
                "besides",
                (
                    "operands of the products: without the matrix unit (FLOAT32_PRECISION=ieee) threads load them into "
                    "registers too; tf32x3 and tf32 take the matrix unit"
                ),
            )
        if lighter := lighter_steps(plan):
            shown = ", ".join(f"{number} with {settings_text(step)}" for step, number in lighter)
            yield "it would hold", f"{shown}; --steps compiles these and others"
    loop = costs.main_loop
    in_loop = f"the main loop has {loop.count(*LOCAL)} of them" if loop else "there is no main loop"
    number = costs.local_memory_instructions
    yield "local memory", f"{number} loads and stores, {costs.stack_bytes} bytes a thread; {in_loop}"


def multiplies_without_matrix_unit(built: Built) -> bool:
    """Whether the products of the main loop are multiply-adds of threads."""
    loop = built.resources.main_loop
    return loop is not None and not loop.count(*MATRIX)


def held_values(plan: WalkPlan) -> Mapping[str, int]:
    """Return the 32-bit values that a thread holds of each tile that stays in registers, by the tile's name."""
    return {name: number for name, number in _held(plan).items() if number}


def _held(plan: WalkPlan) -> Mapping[str, int]:
    if isinstance(plan, GluonPlan):
        threads, rows = 4 * plan.target.warp_size, WARPGROUP_ROWS
        return {"acc": rows * plan.V_HEAD_DIM_ROUNDED // threads, "score": rows * plan.BLOCK_N // threads}
    warps = 4 * plan.CONSUMERS if isinstance(plan, GluonBackwardPlan) else plan.num_warps  # of them that compute
    threads = warps * plan.target.warp_size
    score = plan.BLOCK_M * plan.BLOCK_N // threads
    if isinstance(plan, ForwardPlan):
        return {"acc": plan.BLOCK_M * plan.V_HEAD_DIM_ROUNDED // threads, "score": score}
    if plan.kernel is BackwardKernel.DQ:
        sums = {"grad_query": plan.BLOCK_M * plan.QK_HEAD_DIM_ROUNDED // threads}
    else:
        sums = {
            "grad_key": plan.BLOCK_N * plan.QK_HEAD_DIM_ROUNDED // threads * plan.WRITE_GRAD_KEY,
            "grad_value": plan.BLOCK_N * plan.V_HEAD_DIM_ROUNDED // threads * plan.WRITE_GRAD_VALUE,
        }
    return sums | {"weight": score} | ({"grad_score": score} if plan.differentiates_scores else {})


def lighter_steps(plan: WalkPlan) -> list[tuple[Settings, int]]:
    """Return the steps of one option that leave a thread fewer values of its tiles, with how many, the fewest first."""
    own = sum(held_values(plan).values())
    blocks = TILE_OPTIONS[plan.kernel] if isinstance(plan, AnyBackwardPlan) else {}
    found = []
    for step in steps(plan):
        ((option, value),) = step.items()
        name = option[len("fwd_") :]
        field = blocks.get(name, name)
        if field not in _fields_of_weight(plan):
            continue
        number = sum(held_values(dataclasses.replace(plan, **{field: value})).values())  # type: ignore[arg-type]
        found += [(step, number)] if number < own else []
    return sorted(found, key=lambda one: one[1])


def _fields_of_weight(plan: WalkPlan) -> frozenset[str]:
    """Return the fields that decide how much a thread holds, and that an option may change in this kind of kernel."""
    if isinstance(plan, GluonPlan):
        return frozenset({"BLOCK_N"})
    if isinstance(plan, GluonBackwardPlan):  # each consumer owns a fixed number of rows
        return frozenset({"BLOCK_N" if plan.kernel is BackwardKernel.DQ else "BLOCK_M"})
    return frozenset({"BLOCK_M", "BLOCK_N", "num_warps"})


def _registers_text(built: Built, limit: int) -> str:
    plan, registers = built.plan, built.resources.registers
    if isinstance(plan, GluonPlan | GluonBackwardPlan) and plan.maxnreg != plan.CONSUMER_REGISTERS:
        shared_out = f"{registers} at launch, which the partitions then share out (maxnreg)"
        return f"{plan.CONSUMER_REGISTERS} registers where it computes; {shared_out}"
    return f"{registers} registers, {limit} at most: {_limit_reason(built, limit)}"


def _register_limit(built: Built) -> int:
    """Return how many registers a thread can get: what instructions can name, or its share of the multiprocessor."""
    plan = built.plan
    held = plan.target.multiprocessor
    asked = plan.compile_options.get("maxnreg")
    most = _ADDRESSABLE.get(plan.target.backend, 255)
    if held is not None:
        share = held.registers // (built.resources.num_warps * plan.target.warp_size)
        most = min(most, share // 8 * 8 if share < most else most)
    return min(most, asked) if asked else most


def _limit_reason(built: Built, limit: int) -> str:
    plan, warps = built.plan, built.resources.num_warps
    if plan.compile_options.get("maxnreg") == limit:
        return "the plan shares out the multiprocessor's over the warps (maxnreg)"
    if limit == _ADDRESSABLE.get(plan.target.backend, 255):
        return "instructions can name no more; more warps, or a smaller tile, leave a thread fewer values"
    return f"{warps} warps share the multiprocessor's; fewer warps get more each, and hold more each"


# Which option changes it.

_SIZES = (16, 512)


def steps(plan: WalkPlan | RowPlan) -> list[Settings]:
    """Return settings that change one option of a kernel by one step."""
    if isinstance(plan, RowPlan):
        return []
    prefix = "bwd_" if isinstance(plan, AnyBackwardPlan) else "fwd_"
    own = {"BLOCK_M": "BLOCK_M", "BLOCK_N": "BLOCK_N"}
    blocks = TILE_OPTIONS[plan.kernel] if isinstance(plan, AnyBackwardPlan) else own
    found: list[Settings] = []
    for option, block in blocks.items():
        size = getattr(plan, block)
        found += [{prefix + option: other} for other in (size // 2, size * 2) if _SIZES[0] <= other <= _SIZES[1]]
    found += [{f"{prefix}num_warps": warps} for warps in (plan.num_warps // 2, plan.num_warps * 2) if 1 <= warps <= 16]
    stages = (plan.num_stages - 1, plan.num_stages + 1)
    found += [{f"{prefix}num_stages": number} for number in stages if 1 <= number <= 8]
    if plan.query_dtype == torch.float32 and getattr(plan, "FLOAT32_PRECISION", "") == "ieee":
        found.append({f"{prefix}FLOAT32_PRECISION": "tf32x3"})
    flags = ("USE_SUBTILING", "PRESCALE_QK", "USE_TMA", "FAST_TANH") if prefix == "fwd_" else ("FAST_TANH",)
    return found + [{prefix + flag: not getattr(plan, flag)} for flag in flags]


def write_steps(usual: Built, changed: Sequence[tuple[Settings, Built | str]], console: Console) -> None:
    """Write what each option changed by one step makes of a kernel, the fewest spills first, and what was refused."""
    console.line(Span(f"{usual.entry} on {usual.plan.target.name} with one option changed by one step", "bold"))
    compiled = [(settings_text(settings), built) for settings, built in changed if isinstance(built, Built)]
    compiled.sort(key=lambda row: _badness(row[1]))
    rows = [_step_row("as it is", usual), *(_step_row(text, built) for text, built in compiled)]
    console.table(("option", "tile", "regs", "spilled", "local in loop", "loop", "programs"), rows, left=1)
    for settings, refusal in changed:
        if isinstance(refusal, str):
            console.line(Span(f"{settings_text(settings)}: {refusal}", "dim"))


def _badness(built: Built) -> tuple[int, int, int]:
    loop = built.resources.main_loop
    fits = built.occupancy
    local = built.resources.local_memory_instructions
    return (loop.count(*LOCAL) if loop else 0, local, -fits.warps if fits else 0)


def _step_row(text: str, built: Built) -> list[Span | str]:
    costs, plan, fits = built.resources, built.plan, built.occupancy
    loop = costs.main_loop
    spilled = costs.spill_loads + costs.spill_stores
    return [
        text,
        "" if isinstance(plan, RowPlan) else tile_sizes(plan),
        str(costs.registers),
        Span(str(spilled), "red" if spilled else "green"),
        str(loop.count(*LOCAL)) if loop else "-",
        str(loop.total) if loop else "-",
        f"{fits.programs} by {fits.limit}" if fits else "",
    ]

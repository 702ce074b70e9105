"""Say what a compiled kernel costs, in words."""

from __future__ import annotations

from flexgen.commands.offline import Built
from flexgen.lowering.plans import RowPlan, WalkPlan
from flexgen.runtime.machine_code import EXPONENTIAL, LOAD, LOCAL, MATRIX, STORE, Opcodes


def resource_lines(built: Built) -> list[tuple[str, str]]:
    """Return label and value of each cost."""
    costs, plan = built.resources, built.plan
    rows = [
        ("registers", f"{costs.registers} a thread"),
        ("spills", spill_text(built)),
        (
            "shared memory",
            f"{costs.shared_bytes} bytes, planned at most {planned_bytes(built)} of {plan.target.shared_bytes}",
        ),
        ("occupancy", occupancy_text(built)),
        ("instructions", _instruction_text(costs.code)),
        ("main loop", _instruction_text(costs.main_loop) if costs.main_loop else "none with matrix instructions"),
    ]
    return rows + [("the assembler says", warning) for warning in costs.warnings]


def tile_sizes(plan: WalkPlan) -> str:
    """Return a tile's queries and keys, as `128x64`."""
    return f"{plan.BLOCK_M}x{plan.BLOCK_N}"


def planned_bytes(built: Built) -> str:
    """Return the shared memory that the plan computed as the most; of a kernel that is not planned so, a dash."""
    plan = built.plan
    return "-" if isinstance(plan, RowPlan) else str(plan.shared_bytes)


def occupancy_text(built: Built) -> str:
    """Return how many programs a multiprocessor holds at a time, and why no more."""
    fits = built.occupancy
    if fits is None:
        return "unknown"
    programs = f"{fits.programs} program{'' if fits.programs == 1 else 's'} a multiprocessor"
    return f"{programs}, {fits.warps} of {fits.most_warps} warps, limited by {fits.limit}"


def spill_text(built: Built) -> str:
    costs = built.resources
    if not costs.spill_stores + costs.spill_loads:
        return "none"
    return f"{costs.spill_stores} bytes stored, {costs.spill_loads} bytes loaded a thread"


def _instruction_text(code: Opcodes) -> str:
    parts = [
        f"{code.total} in all",
        f"{code.count(*MATRIX)} matrix",
        f"{code.count(*EXPONENTIAL)} exponentials",
        f"{code.count(*LOAD)} loads",
        f"{code.count(*STORE)} stores",
        f"{code.count(*LOCAL)} of local memory",
    ]
    return ", ".join(parts)


def instruction_lines(built: Built) -> list[str]:
    """Return the instructions of the machine code, the most frequent first."""
    ordered = sorted(built.resources.instructions.items(), key=lambda item: (-item[1], item[0]))
    return [f"{number:>6}  {name}" for name, number in ordered]

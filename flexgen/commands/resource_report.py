"""Say what a compiled kernel costs, in words."""

from __future__ import annotations

from flexgen.commands.offline import Built
from flexgen.runtime.machine_code import EXPONENTIAL


def resource_lines(built: Built) -> list[tuple[str, str]]:
    """Return label and value of each cost."""
    costs, plan = built.resources, built.lowered.plan
    rows = [
        ("registers", f"{costs.registers} a thread"),
        ("spills", spill_text(built)),
        (
            "shared memory",
            f"{costs.shared_bytes} bytes, planned at most {plan.shared_bytes} of {plan.target.shared_bytes}",
        ),
        ("instructions", _instruction_text(built)),
    ]
    return rows + [("the assembler says", warning) for warning in costs.warnings]


def spill_text(built: Built) -> str:
    costs = built.resources
    if not costs.spill_stores + costs.spill_loads:
        return "none"
    return f"{costs.spill_stores} bytes stored, {costs.spill_loads} bytes loaded a thread"


def _instruction_text(built: Built) -> str:
    costs = built.resources
    parts = [
        f"{sum(costs.instructions.values())} in all",
        f"{costs.matrix_instructions} matrix",
        f"{exponentials(built)} exponentials",
        f"{costs.local_memory_instructions} of local memory",
    ]
    return ", ".join(parts)


def exponentials(built: Built) -> int:
    """Return how many instructions compute 2**x."""
    return built.resources.count(*EXPONENTIAL)


def instruction_lines(built: Built) -> list[str]:
    """Return the instructions of the machine code, the most frequent first."""
    ordered = sorted(built.resources.instructions.items(), key=lambda item: (-item[1], item[0]))
    return [f"{number:>6}  {name}" for name, number in ordered]

"""What a compiled candidate costs: a few numbers that pass between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen.lowering.occupancy import Limit, occupancy
from flexgen.lowering.targets import Target
from flexgen.runtime.machine_code import LOCAL

if TYPE_CHECKING:
    from flexgen.runtime.resources import Resources


@dataclass(frozen=True, slots=True)
class CompiledCost:
    """One kernel's costs.

    Attributes:
        registers: of a thread.
        spilled_bytes: stored and loaded, of a thread.
        local_in_loop, loop: instructions of local memory in the main loop, and all of its instructions.
        shared_bytes: of a program.
        programs: that a multiprocessor holds at a time, and what limits them.
        issued: instructions that warps issue in the main loop for 1000 pairs of a tile; 0 where that is not known.
    """

    registers: int
    spilled_bytes: int
    local_in_loop: int
    loop: int
    shared_bytes: int
    programs: int
    limit: Limit | None
    issued: float = 0.0


def cost_of(resources: Resources, target: Target) -> CompiledCost:
    """Return the costs in short."""
    loop = resources.main_loop
    fits = occupancy(target, resources.registers, resources.num_warps, resources.shared_bytes)
    return CompiledCost(
        resources.registers,
        resources.spill_stores + resources.spill_loads,
        loop.count(*LOCAL) if loop else 0,
        loop.total if loop else 0,
        resources.shared_bytes,
        fits.programs if fits else 0,
        fits.limit if fits else None,
    )

"""How many programs of a kernel a multiprocessor holds at a time, and which of its resources limits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexgen.lowering.targets import Target

Limit = Literal["registers", "shared memory", "warps", "programs"]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What fits on one multiprocessor.

    Attributes:
        programs: at a time; 0 where a kernel does not fit at all.
        warps: of those programs.
        most_warps: what the multiprocessor could hold.
        limit: the resource that leaves no room for one more program.
    """

    programs: int
    warps: int
    most_warps: int
    limit: Limit

    @property
    def share(self) -> float:
        """The share of the multiprocessor's warps that is in use at most."""
        return self.warps / self.most_warps


def occupancy(target: Target, registers: int, warps: int, shared_bytes: int) -> Occupancy | None:
    """Return the occupancy of a kernel; None for the interpreter.

    Args:
        registers: of one thread.
        warps: of one program.
        shared_bytes: of one program.
    """
    held = target.multiprocessor
    if held is None:
        return None
    of_a_warp = -(-max(registers, 1) * target.warp_size // held.register_unit) * held.register_unit
    warps_by_registers = held.registers // held.simds // of_a_warp * held.simds
    taken = shared_bytes + held.shared_reserved
    room: dict[Limit, int] = {
        "registers": warps_by_registers // warps,
        "shared memory": held.shared_bytes // taken if taken else held.programs,
        "warps": held.warps // warps,
        "programs": held.programs,
    }
    limit = min(room, key=lambda name: room[name])
    return Occupancy(room[limit], room[limit] * warps, held.warps, limit)

"""Compile a lowered kernel to machine code without a GPU, and measure it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen.errors import FlexgenError, OptionError
from flexgen.lowered import Lowered
from flexgen.lowering.occupancy import Occupancy, occupancy
from flexgen.lowering.plans import RowPlan, WalkPlan

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary
    from flexgen.runtime.resources import Resources


@dataclass(frozen=True, slots=True)
class Built:
    """A compiled kernel and what it costs; `entry` is its name in `lowered.source`."""

    lowered: Lowered
    entry: str
    binary: Binary
    resources: Resources

    @property
    def plan(self) -> WalkPlan | RowPlan:
        return self.lowered.plan_of(self.entry)

    @property
    def occupancy(self) -> Occupancy | None:
        costs = self.resources
        return occupancy(self.plan.target, costs.registers, costs.num_warps, costs.shared_bytes)

    @property
    def assembly(self) -> tuple[str, str]:
        """Return the name and the text of the last stage that people read: ptx or amdgcn."""
        name = "ptx" if "ptx" in self.binary.stages else "amdgcn"
        return name, str(self.binary.stages[name])


def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def build_offline(lowered: Lowered, entry: str = "forward") -> Built:
    """Compile a kernel for its plan's target.

    Raises:
        FlexgenError: triton is not installed, the target has no machine code, or the kernel does not compile.
    """
    target = lowered.plan.target.name
    if lowered.plan.target.backend == "interpret":
        raise OptionError(
            "the target interpret has no machine code",
            why="it runs the emitted source on the CPU",
            fix="choose a chip with --target, or read the source with --dump-code, or run it with `flexgen check`",
        )
    if not triton_is_installed():
        raise FlexgenError(
            f"compiling for {target} needs triton, which is not installed",
            why="triton turns the emitted source into machine code; it has wheels for Linux",
            fix="install triton; --dump-code, explain and mask work without it",
        )
    from flexgen.runtime.resources import measure  # triton is absent on some systems

    binary = lowered.binary(entry)
    return Built(lowered, entry, binary, measure(binary))

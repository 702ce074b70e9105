"""What to do when a compiled kernel does not fit the device: plan again for less of it, and remember."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from flexgen.errors import NoFeasiblePlanError, OutOfResourcesError
from flexgen.lowering.targets import Target
from flexgen.options import KernelOptions


class Fitting:
    """What is known of a device that has less than its kind, and of kernels that take more than their plans say.

    Plans are made by a model of what a kernel takes. Where a kernel did not fit, the next plan of its configuration is
    made for a device as much smaller as the kernel was too large, and all others for what the device turns out to have.
    """

    def __init__(self) -> None:
        self._available: dict[str, int] = {}  # bytes of shared memory, by target
        self._less: dict[Hashable, int] = {}  # the same, by configuration

    def target(self, key: Hashable, target: Target) -> Target:
        """Return what to plan a configuration for."""
        shared = min(
            target.shared_bytes,
            self._available.get(target.name, target.shared_bytes),
            self._less.get(key, target.shared_bytes),
        )
        return target if shared == target.shared_bytes else replace(target, shared_bytes=shared)

    def take_less(self, key: Hashable, plan: Any, error: OutOfResourcesError) -> None:
        """Plan a configuration for less from now on; the first time, a warning says so.

        Args:
            plan: what did not fit.

        Raises:
            OutOfResourcesError: the error itself, where a plan does not say what it takes.
        """
        counted = [decision.value for decision in getattr(plan, "decisions", ()) if decision.name == "shared_bytes"]
        if not counted:
            raise error
        if not self._less:
            warnings.warn(
                f"{error.what}: flexgen takes a smaller plan, and keeps to it. Please report this, with the device and "
                "the shapes: plans are meant to fit at once.",
                RuntimeWarning,
                stacklevel=4,
            )
        less = counted[0] - 1
        if error.is_of_shared_memory:
            self._available[plan.target.name] = error.available
            less = min(less, counted[0] * error.available // error.required)
        self._less[key] = less


def nothing_smaller(error: OutOfResourcesError, options: KernelOptions) -> NoFeasiblePlanError:
    """Return the error for a kernel that does not fit, and to which there is no smaller one."""
    tiles = ("BLOCK_", "num_", "BACKEND")
    forced = ", ".join(f"{name}={value}" for name, value in options.given().items() if name.startswith(tiles))
    return NoFeasiblePlanError(
        error.what,
        why=f"with {forced} there is no smaller plan" if forced else "there is no smaller plan",
        fix=f"drop or lower one of {forced}" if forced else "use smaller head dims or a half-precision dtype",
    )

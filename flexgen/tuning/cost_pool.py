"""The pool of processes that compile candidates and tell what they cost."""

from __future__ import annotations

from flexgen.runtime.compile_pool import CompilePool
from flexgen.tuning.cost import CompiledCost


def cost_pool(workers: int) -> CompilePool[CompiledCost]:
    """Return a pool of so many processes."""
    return CompilePool(workers, "flexgen.tuning.worker", CompiledCost)

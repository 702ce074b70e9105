"""An emitted kernel, loaded and ready to run: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch

from flexgen.codegen.source import Arg, KernelSource
from flexgen.lowering.schedule import Walk
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.describe import Launch, address
from flexgen.runtime.environment import read_environment
from flexgen.runtime.load import load_module

ALIGNMENT = 16


@cache
def source_cache() -> SourceCache:
    """Return the process's cache of emitted sources."""
    return SourceCache(read_environment().cache_dir)


def module_of(source: KernelSource) -> ModuleType:
    """Return the loaded module of an emitted source, kept on disk under its key."""
    return load_module(source_cache().get(source.key, lambda: source.text))


Execute = Callable[[tuple[int, int, int], Sequence[Any]], None]


def executor(source: KernelSource, target: Target, compile_options: Mapping[str, int]) -> Execute:
    """Return what runs a kernel: `execute(grid, values)`.

    Triton is absent on some systems, where everything up to emission works: it is imported here, where a kernel runs.
    """
    module = module_of(source)
    if target.backend == "interpret":
        from flexgen.runtime.interpret import interpret

        return lambda grid, values: interpret(module, source.entry, grid, values, source.args)
    from flexgen.runtime.launch import Launcher

    options: dict[str, Any] = dict(compile_options)
    return Launcher(
        module,
        source.entry,
        source.args,
        target,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        extra_options=options,
    ).launch


class Kernel:
    """One kernel of one configuration.

    Args:
        source, plan: what to run, and how; `execute(grid, values)` runs it.
        owner: the captured mods it belongs to, kept alive so that its identity may serve as a key.
    """

    def __init__(self, source: KernelSource, plan: ForwardPlan, owner: object) -> None:
        self.owner = owner
        self._source = source
        self._plan = plan
        self.execute = executor(source, plan.target, plan.compile_options)

    @property
    def args(self) -> tuple[Arg, ...]:
        return self._source.args

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        return (program_count(self._plan, launch), 1, 1)


def program_count(plan: ForwardPlan, launch: Launch) -> int:
    """Return how many programs a launch needs: row tiles times heads times batch."""
    if plan.index_map.packs:
        return _tiles(launch.q_len * plan.GQA_SHARED_HEADS, plan.BLOCK_M) * launch.batch * launch.kv_heads
    tiles = _tiles(launch.q_len, plan.BLOCK_M)
    if plan.schedule.walk is Walk.TABLE and plan.SPARSE_Q_BLOCK_SIZE % plan.BLOCK_M:
        block = plan.SPARSE_Q_BLOCK_SIZE
        tiles = _tiles(launch.q_len, block) * _tiles(min(block, launch.q_len), plan.BLOCK_M)
    return tiles * launch.batch * launch.q_heads


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def divisible_positions(args: Sequence[Arg], values: Sequence[object]) -> frozenset[int]:
    """Return the positions of arguments that the launcher would specialise on as multiples of 16."""
    return frozenset(position for position, arg in enumerate(args) if arg.specialize and _divisible(values[position]))


def _divisible(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return address(value) % ALIGNMENT == 0
    return isinstance(value, int) and value % ALIGNMENT == 0

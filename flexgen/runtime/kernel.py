"""An emitted kernel, loaded and ready to run: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, runtime_checkable

import torch

from flexgen.codegen.source import Arg, KernelSource
from flexgen.lowering.schedule import Schedule, Walk
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan, DeltaPlan
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.bind import bind
from flexgen.runtime.compile_job import CompileJob
from flexgen.runtime.describe import Launch, address
from flexgen.runtime.load import module_of

ALIGNMENT = 16


@runtime_checkable
class OwnGrid(Protocol):
    """A plan that says itself how many programs compute a number of row tiles."""

    @property
    def target(self) -> Target: ...

    @property
    def compile_options(self) -> dict[str, int]: ...

    @property
    def BLOCK_M(self) -> int: ...

    def programs(self, tiles: int, processors: int) -> int: ...


@runtime_checkable
class BackwardGrid(Protocol):
    """A plan of a backward kernel, of any backend: its programs own tiles of one side."""

    @property
    def kernel(self) -> BackwardKernel: ...

    @property
    def target(self) -> Target: ...

    @property
    def compile_options(self) -> dict[str, int]: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def BLOCK_M(self) -> int: ...

    @property
    def BLOCK_N(self) -> int: ...

    @property
    def SPARSE_Q_BLOCK_SIZE(self) -> int: ...

    @property
    def SPARSE_KV_BLOCK_SIZE(self) -> int: ...


Plan = ForwardPlan | BackwardGrid | DeltaPlan | OwnGrid


Execute = Callable[[tuple[int, int, int], Sequence[Any]], None]


def executor(source: KernelSource, target: Target, compile_options: Mapping[str, int]) -> Execute:
    """Return what runs a kernel: `execute(grid, values)`.

    Triton is absent on some systems, where everything up to emission works: it is imported here, where a kernel runs.
    """
    module = module_of(source)
    if target.backend == "interpret":
        from flexgen.runtime.interpret import interpret

        return lambda grid, values: interpret(module, source.entry, grid, values, source.args, source.line_map)
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
        line_map=source.line_map,
    )


@dataclass(frozen=True, slots=True)
class Step:
    """One kernel that a launch runs: its parameters, its grid, and what runs it."""

    args: tuple[Arg, ...]
    grid: tuple[int, int, int]
    execute: Execute


class Kernel:
    """One kernel of one configuration.

    Args:
        source, plan: what to run, and how; `execute(grid, values)` runs it.
        owner: the captured mods it belongs to, kept alive so that its identity may serve as a key.
    """

    def __init__(self, source: KernelSource, plan: Plan, owner: object) -> None:
        self.owner = owner
        self._source = source
        self._plan = plan
        self.execute = executor(source, plan.target, plan.compile_options)

    @property
    def args(self) -> tuple[Arg, ...]:
        return self._source.args

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def entry(self) -> str:
        return self._source.entry

    def grid(self, launch: Launch) -> tuple[int, int, int]:
        return (program_count(self._plan, launch), 1, 1)

    def settled(self, launch: Launch) -> Launch:
        """Return a launch with what the kernel itself decides about it."""
        return launch

    def step(self, launch: Launch) -> Step:
        """Return what a launch of this kernel alone runs."""
        return Step(self.args, self.grid(launch), self.execute)

    def steps(self, launch: Launch) -> tuple[Step, ...]:
        """Return the kernels that a settled launch runs, in order."""
        return (self.step(launch),)

    def warm(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> None:
        """Compile what launches of other sizes will need; `outputs` may have no memory."""

    def compile_job(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> CompileJob:
        """Return what a launch compiles, as a value; `outputs` may have no memory."""
        divisible = divisible_positions(self.args, bind(self.args, launch, outputs))
        return CompileJob(self._source, self._plan.target, tuple(self._plan.compile_options.items()), divisible)

    def scratch_elements(self, launch: Launch) -> int | None:
        """Return how many elements of the accumulator's dtype a settled launch's steps pass on; None for no scratch."""
        return None

    def run(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> None:
        """Launch once, writing `outputs` in place."""
        self.execute(self.grid(launch), bind(self._source.args, launch, outputs))


def program_count(plan: Plan, launch: Launch) -> int:
    """Return how many programs a launch needs: tiles of a head times heads times batch."""
    if isinstance(plan, OwnGrid):
        tiles = _tiles(launch.q_len, plan.BLOCK_M) * launch.batch * launch.q_heads
        return plan.programs(tiles, processors(launch.device))
    if isinstance(plan, ForwardPlan | BackwardPlan) and plan.index_map.packs_sequences:
        return _tiles_of_sequences(plan, launch)
    if isinstance(plan, DeltaPlan):
        rows = _tiles(launch.q_len, plan.rows.ROW_MULTIPLE) * plan.rows.ROW_MULTIPLE
        return _tiles(rows, plan.BLOCK_M) * launch.batch * launch.q_heads
    if isinstance(plan, BackwardGrid):
        if plan.kernel is BackwardKernel.DKDV:
            tiles = _own_tiles(plan, launch.kv_len, plan.BLOCK_N, plan.SPARSE_KV_BLOCK_SIZE)
            return tiles * launch.batch * launch.kv_heads
        tiles = _own_tiles(plan, launch.q_len, plan.BLOCK_M, plan.SPARSE_Q_BLOCK_SIZE)
        return tiles * launch.batch * launch.q_heads
    if plan.index_map.packs:
        return _tiles(launch.q_len * plan.GQA_SHARED_HEADS, plan.BLOCK_M) * launch.batch * launch.kv_heads
    tiles = _own_tiles(plan, launch.q_len, plan.BLOCK_M, plan.SPARSE_Q_BLOCK_SIZE)
    return tiles * launch.batch * launch.q_heads


@cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; 1 for what is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _own_tiles(plan: ForwardPlan | BackwardGrid, length: int, block: int, sparse: int) -> int:
    """Return the tiles of a head; where a table's blocks are not whole tiles, each block has its own."""
    if plan.schedule.walk is Walk.TABLE and sparse % block:
        return _tiles(length, sparse) * _tiles(min(sparse, length), block)
    return _tiles(length, block)


def _tiles_of_sequences(plan: ForwardPlan | BackwardPlan, launch: Launch) -> int:
    """Return the programs that packed sequences of any lengths need: see IndexMap."""
    if isinstance(plan, BackwardPlan) and plan.kernel is BackwardKernel.DKDV:
        return (_tiles(launch.kv_len, plan.BLOCK_N) + launch.sequences) * launch.kv_heads
    return (_tiles(launch.q_len, plan.BLOCK_M) + launch.sequences) * launch.q_heads


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def divisible_positions(args: Sequence[Arg], values: Sequence[object]) -> frozenset[int]:
    """Return the positions of arguments that the launcher would specialise on as multiples of 16."""
    return frozenset(position for position, arg in enumerate(args) if arg.specialize and _divisible(values[position]))


def _divisible(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return address(value) % ALIGNMENT == 0
    if value is None:  # memory that is allocated at the launch
        return True
    return isinstance(value, int) and value % ALIGNMENT == 0

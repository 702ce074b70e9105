"""A decode kernel and the one that combines its splits: how many splits, and the memory between the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from flexgen.codegen.source import KernelSource
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.lowering.triton_decode.splits import Extent, most_splits, split_count
from flexgen.runtime.bind import bind
from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import Kernel, Step, executor, processors, program_count


class SplitKernel(Kernel):
    """The kernels of one decode configuration; a launch of one split needs the first alone."""

    def __init__(self, source: KernelSource, plan: DecodePlan, owner: object) -> None:
        super().__init__(source, plan, owner)
        self._decode_plan = plan
        combining = source.of_second()
        self._combine_args = combining.args
        self._combine = executor(combining, plan.target, plan.combining.compile_options)

    def steps(self, launch: Launch) -> tuple[Step, ...]:
        programs = program_count(self._decode_plan, launch)
        launch = self.settled(launch)
        first = Step(self.args, (programs, launch.splits, 1), self.execute)
        if launch.splits == 1:
            return (first,)
        rows = launch.batch * launch.q_heads * launch.q_len
        return (first, Step(self._combine_args, (rows, 1, 1), self._combine))

    def settled(self, launch: Launch) -> Launch:
        return replace(launch, splits=split_count(self._decode_plan, self._extent(launch)))

    def _extent(self, launch: Launch) -> Extent:
        programs = program_count(self._decode_plan, launch)
        return Extent(programs, launch.q_len, launch.kv_len, processors(launch.device))

    def warm(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> None:
        """Compile the combining kernel with the first where a longer cache will need it: no later step waits."""
        compile_for = getattr(self._combine, "warm", None)  # only what runs on a device
        if compile_for is not None and most_splits(self._decode_plan, self._extent(launch)) > 1:
            compile_for(launch.tensors["query"].get_device(), bind(self._combine_args, launch, outputs))

    def scratch_elements(self, launch: Launch) -> int | None:
        rows = launch.batch * launch.q_heads * launch.q_len
        return rows * launch.splits * self._decode_plan.PARTIAL_WIDTH if launch.splits > 1 else None

    def run(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> None:
        launch = self.settled(launch)
        elements = self.scratch_elements(launch)
        if elements is not None:
            dtype = self._decode_plan.accumulator_dtype
            outputs = {**outputs, "partials": launch.tensors["query"].new_empty(elements, dtype=dtype)}
        for step in self.steps(launch):
            step.execute(step.grid, bind(step.args, launch, outputs))


def kernel_of(source: KernelSource, plan: object, owner: object) -> Kernel:
    """Return the kernel of a plan, or the pair of a decode plan."""
    if isinstance(plan, DecodePlan):
        return SplitKernel(source, plan, owner)
    return Kernel(source, plan, owner)  # type: ignore[arg-type]

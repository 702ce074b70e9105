"""The workbench of a real search: lowers, compiles in a pool of processes, and measures on the device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from flexgen.errors import FlexgenError
from flexgen.lowered import Lowered
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS, GluonPlan
from flexgen.lowering.plans import RowPlan
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.runtime.apart import MOST_APART, apart
from flexgen.runtime.compile_job import CompileJob
from flexgen.runtime.compile_pool import CompilePool
from flexgen.runtime.timed_call import Tensors, timed_call
from flexgen.runtime.timing import Contender, Stopwatch, Times, interleaved
from flexgen.tuning.cost import CompiledCost
from flexgen.tuning.search import Pruned
from flexgen.tuning.settings import Settings
from flexgen.tuning.space import TunedDirection, entries_of, why_pruned

QUICK_ROUNDS, QUICK_MS = 1, 8.0
ROUNDS, ROUND_MS = 5, 30.0


class KernelBench:
    """Works with kernels of one attention and direction.

    Args:
        make: an Attention with options set over its own.
        tensors: query, key and value: real ones to measure with, or meta ones.
        target: to lower for; None for that of the tensors' device.
        stopwatch: None where nothing is measured.
        given: the call's other arguments by name.
    """

    def __init__(
        self,
        make: Callable[[Settings], Any],
        tensors: Tensors,
        direction: TunedDirection,
        pool: CompilePool[CompiledCost],
        target: str | None = None,
        stopwatch: Stopwatch | None = None,
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._make, self._direction, self._pool = make, direction, pool
        self._target, self._stopwatch, self._given = target, stopwatch, given
        backward = direction == "backward"
        query, key, value = (tensor.detach().requires_grad_(backward) for tensor in tensors)
        self._tensors: Tensors = (query, key, value)
        self._lowered: dict[tuple[tuple[str, object], ...], Lowered] = {}
        self._usual: Sequence[torch.Tensor] | None = None

    def lowered(self, settings: Settings) -> Lowered:
        """Lower once."""
        key = tuple(sorted(settings.items()))
        if key not in self._lowered:
            self._lowered[key] = self._make(settings).lower(*self._tensors, target=self._target, **self._given)
        return self._lowered[key]

    def lower(self, settings: Settings) -> str:
        """Lower, and return a digest of the emitted kernels and of how they are compiled and launched."""
        try:
            lowered = self.lowered(settings)
        except FlexgenError as error:
            raise Pruned(error.what) from error
        plan = lowered.plan
        if settings and (why := why_pruned(lowered, self._direction)):
            raise Pruned(why)
        jobs = self._jobs(settings)
        # The header's reasons differ from setting to setting: what is executed is what counts.
        texts = [f"{_code(job.source.text)}\0{job.options}" for job in jobs]
        texts += [f"splits {plan.SPLIT_KV}"] if isinstance(plan, DecodePlan) else []
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    def _jobs(self, settings: Settings) -> list[CompileJob]:
        lowered = self.lowered(settings)
        return [lowered.compile_job(entry) for entry in entries_of(lowered, self._direction)]

    def compile(self, candidates: Sequence[Settings]) -> Iterator[tuple[int, dict[str, CompiledCost] | str]]:
        """Compile every kernel of every candidate in the pool; a candidate is told when its last kernel is done."""
        jobs = [(number, job) for number, settings in enumerate(candidates) for job in self._jobs(settings)]
        left = [sum(number == place for number, _ in jobs) for place in range(len(candidates))]
        found: list[dict[str, CompiledCost] | str] = [{} for _ in candidates]
        for place, outcome in self._pool.compile([job for _, job in jobs]):
            number, job = jobs[place]
            costs = found[number]
            if isinstance(outcome, str):
                found[number] = outcome
            elif isinstance(costs, dict):
                costs[job.source.entry] = self._with_pairs(outcome, candidates[number], job.source.entry)
            left[number] -= 1
            if not left[number]:
                yield number, found[number]

    def _with_pairs(self, cost: CompiledCost, settings: Settings, entry: str) -> CompiledCost:
        plan = self.lowered(settings).plan_of(entry)
        if isinstance(plan, RowPlan):
            return cost
        rows = WARPGROUP_ROWS if isinstance(plan, GluonPlan) else plan.BLOCK_M  # of the warps that run the loop
        return replace(cost, issued=1000 * cost.loop * plan.num_warps / (rows * plan.BLOCK_N))

    def measure(self, candidates: Sequence[Settings], *, quick: bool) -> list[Times | str]:
        """Run each candidate, compare what it computes with flexgen's own choice, and time those that agree.

        Quickly means one after the other, so that only one keeps tensors for its backward.
        """
        assert self._stopwatch is not None, "a search that measures has a stopwatch"
        if quick:
            return [self._timed([settings], QUICK_ROUNDS, QUICK_MS)[0] for settings in candidates]
        return self._timed(candidates, ROUNDS, ROUND_MS)

    def _timed(self, candidates: Sequence[Settings], rounds: int, milliseconds: float) -> list[Times | str]:
        assert self._stopwatch is not None
        calls: dict[str, Contender] = {}
        failures: dict[str, str] = {}
        for number, settings in enumerate(candidates):
            try:
                calls[str(number)] = self._checked(settings)
            except (FlexgenError, RuntimeError) as error:
                failures[str(number)] = error.what if isinstance(error, FlexgenError) else str(error).splitlines()[0]
        times = interleaved(calls, rounds, self._stopwatch, milliseconds) if calls else {}
        return [times.get(str(number)) or failures[str(number)] for number in range(len(candidates))]

    def _checked(self, settings: Settings) -> Contender:
        """Return the call of a candidate that computes what flexgen's own choice does."""
        if self._usual is None and settings:
            self._checked({})
        attend = partial(self._make(settings), **self._given)
        call = timed_call(attend, self._tensors, backward=self._direction == "backward")
        found = _results(call())
        if self._usual is None:
            self._usual = found
        difference = apart(found, self._usual)
        if not difference <= MOST_APART[self._tensors[0].element_size()]:
            raise RuntimeError(f"its result differs by {difference:.1e} from that of flexgen's own choice")
        return call


def _results(found: Any) -> Sequence[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else list(found)


def _code(text: str) -> str:
    """Return a module's text without its header."""
    return text.split('"""', 2)[2]

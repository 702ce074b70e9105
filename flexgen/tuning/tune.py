"""Tunes one direction of one problem: what is stored, or a search whose result is stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch

from flexgen.errors import NoFeasiblePlanError
from flexgen.lowered import Lowered
from flexgen.options import Layout
from flexgen.runtime.cache import source_cache
from flexgen.runtime.compile_pool import usual_workers
from flexgen.runtime.describe import to_bhsd
from flexgen.runtime.timed_call import Tensors
from flexgen.runtime.timing import DeviceStopwatch, Stopwatch
from flexgen.tuning.cost_pool import cost_pool
from flexgen.tuning.kernel_bench import KernelBench
from flexgen.tuning.search import Pruned, Track, Trial, explore, search, untracked
from flexgen.tuning.settings import Settings
from flexgen.tuning.space import TunedDirection, entries_of, groups
from flexgen.tuning.store import FOLDER, Tuned, TunedStore, tuned_key

_log = logging.getLogger("flexgen.tuning")


@dataclass(frozen=True, slots=True)
class TuningSubject:
    """What is tuned.

    Attributes:
        make: an Attention with options set over its own.
        tensors: query, key and value in its layout.
        given: the call's other arguments by name, for example `block_table`.
    """

    make: Callable[[Settings], Any]
    tensors: Tensors
    layout: Layout
    given: Mapping[str, Any] = field(default_factory=dict)

    def having(self, settings: Settings) -> TuningSubject:
        """Return the same with options set, over which others are tried."""
        return replace(self, make=lambda more: self.make({**settings, **more}))

    @property
    def device(self) -> str:
        """The name of the tensors' device."""
        device = self.tensors[0].device
        return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


@dataclass(frozen=True, slots=True)
class Outcome:
    """What tuning found; `trials` is empty where the settings were stored already."""

    tuned: Tuned
    trials: tuple[Trial, ...] = ()


def tuned_store() -> TunedStore:
    """Return the store beside the cache of emitted sources."""
    return TunedStore(source_cache().directory / FOLDER)


def tune(
    subject: TuningSubject,
    direction: TunedDirection,
    store: TunedStore,
    *,
    again: bool = False,
    workers: int | None = None,
    track: Track = untracked,
    stopwatch: Stopwatch | None = None,
) -> Outcome:
    """Return the best settings for a direction.

    Args:
        again: search also where settings are stored.
        workers: processes to compile in; by default the processors of this machine.
        stopwatch: by default events of the device, with L2 flushed before each call.

    Raises:
        NoFeasiblePlanError: flexgen's own choice does not run.
    """
    with cost_pool(usual_workers() if workers is None else workers) as pool:
        stopwatch = stopwatch or DeviceStopwatch(subject.tensors[0].device, cold=True)
        bench = KernelBench(subject.make, subject.tensors, direction, pool, stopwatch=stopwatch, given=subject.given)
        usual = bench.lowered({})
        key = _key(usual, direction, subject)
        stored = None if again else store.get(key)
        if stored is not None:
            _log.info("%s of %s: tuned on %s: %s", direction, subject.device, stored.date, dict(stored.settings))
            return Outcome(stored)
        _log.info("tuning the %s on %s", direction, subject.device)
        try:
            result = search(groups(usual, direction, _query_rows(usual, subject)), bench, track)
        except Pruned as reason:
            raise NoFeasiblePlanError(
                f"the {direction} cannot be tuned: {reason}", why="what flexgen decides by itself does not run here"
            ) from reason
    _log.info("%s: %.4g ms for %.4g ms: %s", direction, result.best.median, result.usual.median, dict(result.settings))
    tuned = store.put(key, result.settings, result.best.median, result.usual.median)
    return Outcome(tuned, result.trials)


def candidates(
    subject: TuningSubject,
    direction: TunedDirection,
    target: str,
    *,
    workers: int | None = None,
    track: Track = untracked,
) -> list[Trial]:
    """Return what a search on a target would try, compiled offline and not measured."""
    with cost_pool(usual_workers() if workers is None else workers) as pool:
        bench = KernelBench(subject.make, subject.tensors, direction, pool, target)
        usual = bench.lowered({})
        return explore(groups(usual, direction, _query_rows(usual, subject)), bench, track)


def _query_rows(lowered: Lowered, subject: TuningSubject) -> int:
    length: int = to_bhsd(subject.tensors[0], subject.layout).shape[2]
    return length * lowered.plan.index_map.packed_heads


def _key(usual: Lowered, direction: TunedDirection, subject: TuningSubject) -> str:
    kernels = dict.fromkeys(usual.compile_job(entry).source.key for entry in entries_of(usual, direction))
    given = [value for value in subject.given.values() if isinstance(value, torch.Tensor)]
    shapes = [tuple(tensor.shape) for tensor in (*subject.tensors, *given)]
    return tuned_key(
        kernels, subject.device, f"triton {import_module('triton').__version__}", [*shapes, subject.layout, direction]
    )

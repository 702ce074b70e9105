"""How long each step of compiling takes, on any machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from flexgen.attention import Attention
from flexgen.capture.live import LiveMods
from flexgen.commands.offline import triton_is_installed
from flexgen.commands.subject import Subject
from flexgen.lowered import Lowered
from flexgen.pipeline import understand


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step: what it does, and its milliseconds of wall time: a median of rounds, or a single one of a build."""

    name: str
    what: str
    milliseconds: float


def compile_times(subject: Subject, target: str, rounds: int) -> list[StepTime]:
    """Time capture, analysis, planning with emission, the whole of flexgen, and each kernel's machine code.

    The first round, which imports and warms up, does not count.
    """
    own = subject.attention
    reading = LiveMods(own.score_mod, own.mask_mod).current()
    lowered = subject.lower(target)

    steps: list[tuple[str, str, Callable[[], object]]] = [
        ("capture", "tracing the mods", lambda: LiveMods(own.score_mod, own.mask_mod).current()),
        ("analyse", "simplifying, and proving ranges", lambda: understand(reading.captured)),
        ("plan and emit", "deciding, and writing the forward kernel", lambda: subject.lower(target)),
        ("flexgen in all", "of a first call, all but Triton", lambda: _again(subject).lower(target)),
        ("with backward", "the same, backward kernels too", lambda: _again(subject).lower(target, backward=True)),
    ]
    found = [StepTime(name, what, _median(step, rounds)) for name, what, step in steps]
    if triton_is_installed() and lowered.plan.target.backend != "interpret":
        found.append(StepTime("build", "machine code of the forward, by Triton", _build(lowered)))
    return found


def _again(subject: Subject) -> Subject:
    """Return the subject with nothing captured yet."""
    own = subject.attention
    fresh = Attention(own.score_mod, own.mask_mod, own.options)
    return Subject(subject.name, fresh, subject.shape, subject.dtype)


def _median(step: Callable[[], object], rounds: int) -> float:
    return statistics.median([_timed(step) for _ in range(rounds + 1)][1:])


def _timed(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


def _build(lowered: Lowered) -> float:
    from flexgen.runtime.build import without_cache  # triton is absent on some systems

    with without_cache():
        return _timed(lowered.binary)

"""The search itself: prune, compile, measure quickly, measure the best again; whatever does those things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from flexgen.runtime.timing import Times
from flexgen.tuning.cost import CompiledCost
from flexgen.tuning.settings import Settings
from flexgen.tuning.space import Group

KEPT = 6  # candidates of a group that are measured a second time
WORTH = 0.99  # a setting must take at most this much of the best time so far: less is noise

T = TypeVar("T")
State = Literal["pruned", "failed", "same kernel", "compiled", "measured", "best of its group"]


@dataclass(slots=True)
class Trial:
    """One candidate and what became of it.

    Attributes:
        settings: over what flexgen decides.
        group: the name of its group; "" for flexgen's own choice.
        why: of a candidate that was not measured.
        costs: of its kernels, by name.
    """

    settings: Settings
    group: str
    state: State = "compiled"
    why: str = ""
    costs: dict[str, CompiledCost] = field(default_factory=dict)
    times: Times | None = None


class Workbench(Protocol):
    """What a search works with: it may be a GPU, or a test."""

    def lower(self, settings: Settings) -> str:
        """Lower, and return a digest of the emitted kernels.

        Raises:
            Pruned: the settings cannot be honoured, or the model of the chip gives up on them.
        """

    def compile(self, candidates: Sequence[Settings]) -> Iterator[tuple[int, dict[str, CompiledCost] | str]]:
        """Yield, in any order, the position of each candidate and its kernels' costs, or why it does not compile."""

    def measure(self, candidates: Sequence[Settings], *, quick: bool) -> list[Times | str]:
        """Return the times of each candidate, of interleaved rounds, or why it cannot run."""


class Pruned(Exception):
    """A candidate that is not worth compiling, and why."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a search found.

    Attributes:
        settings: the best; empty where flexgen's own choice is.
        trials: all, flexgen's own choice first.
        best, usual: times of the best, and of flexgen's own choice, of the same last rounds.
    """

    settings: Settings
    trials: tuple[Trial, ...]
    best: Times
    usual: Times


class Track(Protocol):
    """Shows progress over work whose items come one after the other."""

    def __call__(self, work: Iterable[T], total: int, description: str, /) -> Iterable[T]: ...


def untracked(work: Iterable[T], total: int, description: str) -> Iterable[T]:
    """Show no progress."""
    return work


def explore(groups: Sequence[Group], bench: Workbench, track: Track = untracked) -> list[Trial]:
    """Prune and compile every candidate of every group, each over flexgen's own choice, and measure none."""
    seen = {bench.lower({}): "flexgen's own choice"}
    trials = [Trial({}, "")]
    for group in groups:
        trials += [_lowered({**settings}, group, bench, seen) for settings in group.settings]
    _compile([trial for trial in trials if trial.state == "compiled"], bench, track, "compiling")
    return trials


def search(groups: Sequence[Group], bench: Workbench, track: Track = untracked) -> Result:
    """Search the groups one after the other.

    Raises:
        Pruned: flexgen's own choice cannot run.
    """
    usual = Trial({}, "")
    trials = [usual]
    seen = {bench.lower({}): "flexgen's own choice"}
    _compile([usual], bench, track, "compiling")
    best = usual
    for group in groups:
        candidates = [_lowered({**best.settings, **each}, group, bench, seen) for each in group.settings]
        trials += candidates
        _compile([trial for trial in candidates if trial.state == "compiled"], bench, track, f"compiling: {group.name}")
        best = _best(best, [trial for trial in candidates if trial.state == "compiled"], bench)
    usual_times, best_times = _finally([usual, best], bench)
    if best is not usual and best_times.median > WORTH * usual_times.median:
        best, best_times = usual, usual_times
    return Result(best.settings, tuple(trials), best_times, usual_times)


def _lowered(settings: Settings, group: Group, bench: Workbench, seen: dict[str, str]) -> Trial:
    """Return a trial of settings that lower to a kernel not seen before, or one that says why not."""
    try:
        digest = bench.lower(settings)
    except Pruned as reason:
        return Trial(settings, group.name, "pruned", str(reason))
    if digest in seen:
        return Trial(settings, group.name, "same kernel", seen[digest])
    seen[digest] = " ".join(f"{name}={value}" for name, value in settings.items())
    return Trial(settings, group.name)


def _compile(trials: Sequence[Trial], bench: Workbench, track: Track, description: str) -> None:
    compiled = bench.compile([trial.settings for trial in trials])
    for number, outcome in track(compiled, len(trials), description):
        if isinstance(outcome, str):
            trials[number].state, trials[number].why = "failed", outcome
        else:
            trials[number].costs = outcome


def _best(best: Trial, candidates: Sequence[Trial], bench: Workbench) -> Trial:
    """Measure all candidates quickly beside the best so far, and the fastest of them again, for longer."""
    quick = _measured([best, *candidates], bench, quick=True)
    fastest = sorted((trial for trial in quick if trial is not best), key=_median)[:KEPT]
    again = _measured([best, *fastest], bench, quick=False) if fastest else []
    winner = min(again, key=_median, default=best)
    if winner is best or best.times is None or _median(winner) > WORTH * best.times.median:
        return best
    winner.state = "best of its group"
    return winner


def _measured(trials: Sequence[Trial], bench: Workbench, *, quick: bool) -> list[Trial]:
    """Measure, note the times, and return the trials that ran."""
    found = bench.measure([trial.settings for trial in trials], quick=quick)
    for trial, times in zip(trials, found, strict=True):
        if isinstance(times, str):
            trial.state, trial.why = "failed", times
        else:
            trial.times = times
            trial.state = "measured" if trial.state == "compiled" else trial.state
    return [trial for trial, times in zip(trials, found, strict=True) if not isinstance(times, str)]


def _median(trial: Trial) -> float:
    assert trial.times is not None
    return trial.times.median


def _finally(trials: Sequence[Trial], bench: Workbench) -> list[Times]:
    found = bench.measure([trial.settings for trial in trials], quick=False)
    for times in found:
        if isinstance(times, str):
            raise Pruned(times)
    return [times for times in found if not isinstance(times, str)]

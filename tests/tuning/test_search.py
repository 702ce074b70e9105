"""The search: what is pruned, compiled, measured and taken, with an injected workbench and invented times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from flexgen.runtime.timing import Times
from flexgen.tuning.cost import CompiledCost
from flexgen.tuning.search import KEPT, Pruned, explore, search
from flexgen.tuning.settings import Settings
from flexgen.tuning.space import Group

COST = CompiledCost(64, 0, 0, 100, 1024, 2, "registers")


class Bench:
    """A workbench on which a candidate takes what `milliseconds` says; it notes what it was asked."""

    def __init__(self, milliseconds: Callable[[Settings], float], pruned=(), failing=()) -> None:
        self.milliseconds, self.pruned, self.failing = milliseconds, pruned, failing
        self.compiled: list[Settings] = []
        self.measured: list[tuple[bool, list[Settings]]] = []

    def lower(self, settings: Settings) -> str:
        if settings in self.pruned:
            raise Pruned("holds 300 values a thread in registers, more than 160 spill")
        # An option called `name` changes nothing about the kernel.
        return repr(sorted((k, v) for k, v in settings.items() if k != "name"))

    def compile(self, candidates: Sequence[Settings]) -> Iterator[tuple[int, dict[str, CompiledCost] | str]]:
        for number, settings in reversed(list(enumerate(candidates))):
            self.compiled.append(settings)
            yield number, "does not compile" if settings in self.failing else {"forward": COST}

    def measure(self, candidates: Sequence[Settings], *, quick: bool) -> list[Times | str]:
        self.measured.append((quick, list(candidates)))
        found: list[Times | str] = []
        for settings in candidates:
            ms = self.milliseconds(settings)
            found.append(Times(ms, ms, ms) if ms < float("inf") else "its result differs")
        return found


TILES = Group("tiles", tuple({"tile": size} for size in (16, 32, 64, 128)))
FLAGS = Group("flags", ({"flag": True}, {"other": True}))


def by(**table: float) -> Callable[[Settings], float]:
    """Return times: 10 ms times the factor of each `option_value` that is set."""

    def milliseconds(settings: Settings) -> float:
        found = 10.0
        for name, value in settings.items():
            found *= table.get(f"{name}_{value}", 1.0)
        return found

    return milliseconds


def test_the_fastest_of_each_group_is_kept_for_the_next():
    bench = Bench(by(tile_64=0.5, tile_32=0.8, flag_True=0.9, other_True=1.1))
    result = search((TILES, FLAGS), bench)
    assert result.settings == {"tile": 64, "flag": True}
    assert (result.best.median, result.usual.median) == (pytest.approx(4.5), 10.0)
    assert {"tile": 64, "other": True} in bench.compiled
    assert [trial.state for trial in result.trials if trial.settings == {"tile": 64}] == ["best of its group"]
    assert result.trials[0].settings == {} and len(result.trials) == 7


def test_a_gain_within_the_noise_is_none():
    result = search((TILES,), Bench(by(tile_64=0.995)))
    assert result.settings == {} and result.best == result.usual


def test_what_is_pruned_is_neither_compiled_nor_measured():
    bench = Bench(by(tile_128=0.1, tile_64=0.5), pruned=({"tile": 128},))
    result = search((TILES,), bench)
    assert result.settings == {"tile": 64}
    assert {"tile": 128} not in bench.compiled
    (trial,) = [trial for trial in result.trials if trial.state == "pruned"]
    assert trial.settings == {"tile": 128} and "300 values" in trial.why


def test_one_kernel_is_compiled_once_whatever_lowers_to_it():
    group = Group("names", ({"tile": 64, "name": 1}, {"tile": 64, "name": 2}, {"name": 3}))
    bench = Bench(by(tile_64=0.5))
    result = search((group,), bench)
    assert [trial.state for trial in result.trials] == ["measured", "best of its group", "same kernel", "same kernel"]
    assert result.trials[2].why == "tile=64 name=1" and result.trials[3].why == "flexgen's own choice"
    assert len(bench.compiled) == 2


def test_candidates_that_fail_or_differ_are_told_and_passed_over():
    bench = Bench(by(tile_64=0.5, tile_32=float("inf"), tile_16=0.9), failing=({"tile": 64},))
    result = search((TILES,), bench)
    assert result.settings == {"tile": 16}
    why = {trial.settings["tile"]: trial.why for trial in result.trials if trial.state == "failed"}
    assert why == {64: "does not compile", 32: "its result differs"}


def test_only_the_fastest_are_measured_again():
    group = Group("many", tuple({"tile": size} for size in range(20)))
    bench = Bench(lambda settings: 20.0 - settings.get("tile", 0))  # type: ignore[operator]
    search((group,), bench)
    (_, quick), (_, again), (_, last) = bench.measured
    assert [quick for quick, _ in bench.measured] == [True, False, False]
    assert len(quick) == 21 and len(again) == KEPT + 1 and last == [{}, {"tile": 19}]


def test_without_a_usable_choice_of_flexgens_own_there_is_no_result():
    with pytest.raises(Pruned, match="its result differs"):
        search((), Bench(lambda settings: float("inf")))


def test_exploring_compiles_everything_and_measures_nothing():
    bench = Bench(by(), pruned=({"tile": 16},), failing=({"tile": 32},))
    trials = explore((TILES, FLAGS), bench)
    assert [trial.state for trial in trials] == [
        *("compiled", "pruned", "failed", "compiled", "compiled", "compiled", "compiled")
    ]
    assert bench.measured == [] and {} in bench.compiled


def test_progress_is_shown_over_what_is_compiled():
    shown: list[tuple[int, str]] = []

    def track(work, total: int, description: str):
        shown.append((total, description))
        return work

    search((TILES,), Bench(by()), track)
    assert shown == [(1, "compiling"), (4, "compiling: tiles")]

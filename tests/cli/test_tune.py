"""`flexgen tune`: what it says without a GPU, and the candidates that it lists."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch

from flexgen.commands.console import Console
from flexgen.commands.tune import _trial_json, write_outcome
from flexgen.runtime.timing import Times
from flexgen.tuning import tune as tuning
from flexgen.tuning.cost import CompiledCost
from flexgen.tuning.search import Trial
from flexgen.tuning.space import Group
from flexgen.tuning.store import Tuned, TunedStore
from flexgen.tuning.tune import Outcome
from tests.cli.conftest import Run

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_without_a_gpu_tuning_is_refused_and_the_way_out_told(run: Run, causal: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run("tune", causal)
    assert said.code == 2
    assert "tuning needs a GPU, and there is none here" in said.err and "--compile-only" in said.err
    assert "--jobs 0 is none" in run("tune", causal, "--jobs", "0").err
    assert run("tune", causal, "--compile-only", "--target", "interpret").code == 2


@needs_triton
def test_candidates_are_listed_with_what_they_take(run: Run, causal: Path, monkeypatch) -> None:
    tiles = [{"fwd_BLOCK_M": 16, "fwd_BLOCK_N": keys, "fwd_num_stages": 1} for keys in (16, 32)]
    few = (Group("tiles", (*tiles, {"fwd_USE_TMA": True}, tiles[0])),)
    monkeypatch.setattr(tuning, "groups", lambda usual, direction, rows: few)
    arguments = ("tune", causal, "--compile-only", "--target", "sm_80", "--jobs", "1", "--set", "num_warps=1")
    said = run(*arguments, "--all")
    assert said.code == 0, said.err
    title, header, *rows = said.out.splitlines()
    assert title == "candidates of the forward on sm_80: 3 compiled of 5"
    assert header.split() == ["options", "regs", "spilled", "programs", "loop", "issued"]
    assert {row.split("  ")[0] for row in rows[:3]} == {
        "default",
        "BLOCK_M=16 BLOCK_N=16 num_stages=1",
        "BLOCK_M=16 BLOCK_N=32 num_stages=1",
    }
    issued = [int(row.split()[-1]) for row in rows[:3]]
    assert issued == sorted(issued)
    assert "1 pruned: they do not fit the chip, or the problem" in said.out
    assert "fwd_USE_TMA=True: USE_TMA=True cannot be honoured" in said.out
    assert "1 lower to a kernel that another candidate lowers to" in said.out


def test_trials_are_json() -> None:
    cost = CompiledCost(64, 0, 0, 100, 1024, 2, "registers", 12.5)
    trial = Trial({"fwd_BLOCK_N": 16}, "tiles", "measured", costs={"forward": cost}, times=Times(1.0, 0.9, 1.1))
    told = json.loads(json.dumps(_trial_json(trial)))
    assert told["settings"] == {"fwd_BLOCK_N": 16} and told["ms"] == 1.0 and told["state"] == "measured"
    assert told["costs"]["forward"]["issued"] == 12.5


def test_what_was_measured_is_told_the_fastest_first() -> None:
    times = {32: 1.0, 16: 2.0, 64: 3.0}
    trials = tuple(
        Trial({"fwd_BLOCK_N": keys}, "tiles", "measured", times=Times(ms, ms, ms)) for keys, ms in times.items()
    )
    outcome = Outcome(Tuned({"fwd_BLOCK_N": 32}, 1.0, 2.0, "2026-01-01"), trials)
    out, err = io.StringIO(), io.StringIO()
    write_outcome("forward", outcome, False, Console(out, err))
    lines = out.getvalue().splitlines()
    assert lines[0] == "forward: the fastest of 3 measured candidates"
    assert [line.split()[0] for line in lines[2:5]] == ["BLOCK_N=32", "BLOCK_N=16", "BLOCK_N=64"]
    assert lines[-1] == "forward: fwd_BLOCK_N=32  1 ms, 2.00 times as fast as what flexgen decides by itself"
    write_outcome("forward", Outcome(outcome.tuned), False, Console(io.StringIO(), err))
    assert "found on 2026-01-01, and stored; --again searches again" in err.getvalue()


@pytest.mark.gpu
def test_the_command_tunes_on_the_gpu(run: Run, causal: Path, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path / "cache"))
    few = (Group("tiles", tuple({"fwd_BACKEND": "TRITON", "fwd_BLOCK_N": keys} for keys in (32, 64))),)
    monkeypatch.setattr(tuning, "groups", lambda usual, direction, rows: few)
    monkeypatch.setattr("flexgen.commands.tune.tuned_store", lambda: TunedStore(tmp_path / "tuned"))
    said = run("tune", causal, "--shape", "1,2,2,512,512,64,64")
    assert said.code == 0, said.err
    assert "forward: the fastest of" in said.out and "times as fast as what flexgen decides" in said.out
    again = run("tune", causal, "--shape", "1,2,2,512,512,64,64")
    assert "and stored; --again searches again" in again.err

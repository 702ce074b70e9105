"""`flexgen bench`: rows, tables and files from injected times; on the CPU, compile times alone."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.commands.arguments import Shape
from flexgen.commands.bench import row_json, write_rows
from flexgen.commands.bench_plot import save_bars
from flexgen.commands.bench_rows import BenchRow, bench
from flexgen.commands.console import Console
from flexgen.commands.contenders import CUDNN, EAGER, FLEX, FLEXGEN, Peer, decoding, is_causal, peers
from flexgen.commands.reference import DenseProblem, evaluate_dense
from flexgen.commands.subject import Subject
from flexgen.runtime.apart import apart
from flexgen.runtime.timing import Times, interleaved
from tests.cli.conftest import Run

CPU = torch.device("cpu")
SHAPE = Shape(1, 2, 1, 48, 64, 16, 16)


def causal(b, h, q_idx, kv_idx):
    return q_idx + 16 >= kv_idx


def shifted(score, b, h, q_idx, kv_idx):
    return score + 0.01 * (q_idx - kv_idx)


class Script:
    """A stopwatch that runs each call once and says what it was told to."""

    def __init__(self, *milliseconds: float) -> None:
        self.milliseconds, self.counts = iter(milliseconds), []

    def __call__(self, call, count: int) -> list[float]:
        call()
        self.counts.append(count)
        return [next(self.milliseconds)]


def subject(mask=causal, score=None, shape: Shape = SHAPE, dtype=torch.float32, **options: object) -> Subject:
    return Subject("mods.py", flexgen.compile(score, mask, options), shape, dtype)


def own_and_others(asked: Subject, mods, device) -> Iterator[Peer]:
    """Yield flexgen itself, dense attention, one that cannot run, and one that fails."""
    yield next(iter(peers(asked, mods, device)))
    own = asked.attention

    def dense(query, key, value):
        problem = DenseProblem(query, key, value, own.score_mod, own.mask_mod, query.shape[3] ** -0.5)
        return evaluate_dense(problem, "exact").output.to(query.dtype)

    yield Peer("dense", dense)
    yield Peer("absent", None, "not on this machine")

    def fails(query, key, value):
        raise RuntimeError("no kernel image\nof many lines")

    yield Peer("failing", fails)


class TestInterleaved:
    """Every contender runs in every round, for about the same time."""

    def test_medians_least_and_greatest_are_of_the_rounds(self):
        script = Script(1.0, 10.0, 5.0, 50.0, 3.0, 30.0, 4.0, 40.0)
        calls: list[str] = []
        found = interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 3, script, 20.0)
        assert found == {"a": Times(4.0, 3.0, 5.0), "b": Times(40.0, 30.0, 50.0)}
        assert calls == ["a", "b"] * 4
        assert script.counts == [2, 2, *[20, 2] * 3]

    def test_very_short_calls_are_not_repeated_without_end(self):
        script = Script(0.0, 0.001)
        interleaved({"a": lambda: None}, 1, script, 60.0)
        assert script.counts[1] == 2000


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_rows_hold_times_useful_flops_and_how_far_results_are_apart(layout: str):
    script = Script(2.0, 4.0, *[2.0, 4.0] * 3)
    made = subject(score=shifted, layout=layout)
    rows = {row.contender: row for row in bench(made, "forward", "interpret", CPU, script, 3, own_and_others)}
    live = sum(min(q + 17, 64) for q in range(48)) * 2
    assert rows[FLEXGEN].flops == live * 2 * 32
    assert rows[FLEXGEN].tflops == pytest.approx(rows[FLEXGEN].flops / 2e-3 / 1e12)
    assert rows["dense"].times == Times(4.0, 4.0, 4.0) and rows["dense"].apart < 1e-5
    assert rows["absent"].times is None and rows["absent"].remark == "not on this machine"
    assert rows["failing"].remark == "RuntimeError: no kernel image"


def test_a_decode_is_the_last_query_of_the_sequence():
    made = decoding(subject(score=shifted))
    assert made.shape == SHAPE._replace(Lq=1)
    query, key, value = made.tensors(CPU, seed=1)
    score = lambda s, b, h, q, kv: shifted(s, b, h, q + 63, kv)  # noqa: E731
    problem = DenseProblem(query, key, value, score, None, 0.25)
    torch.testing.assert_close(made.attention(query, key, value), evaluate_dense(problem, "exact").output.float())


def test_of_a_failure_of_flexgens_own_nothing_is_made():
    def broken(asked: Subject, mods, device) -> Iterator[Peer]:
        def fails(query, key, value):
            raise RuntimeError("wrong")

        yield Peer(FLEXGEN, fails)

    with pytest.raises(RuntimeError, match="wrong"):
        bench(subject(), "forward", "interpret", CPU, Script(), 1, broken)


class TestPeers:
    """What else computes the same is known before it runs."""

    def refusals(self, made: Subject) -> dict[str, str]:
        mods = made.lower("sm_80").understood.mods
        return {peer.name: peer.refusal for peer in peers(made, mods, CPU)}

    def test_cudnn_takes_no_mask_or_the_causal_one(self):
        square = SHAPE._replace(Lk=48)
        plain = subject(lambda b, h, q, kv: kv <= q, shape=square, dtype=torch.bfloat16)
        assert self.refusals(plain) == {FLEXGEN: "", FLEX: "", CUDNN: "", EAGER: ""}
        assert "no score_mod" in self.refusals(subject(None, shifted, dtype=torch.bfloat16))[CUDNN]
        assert "no mask but the causal" in self.refusals(subject(causal, dtype=torch.bfloat16))[CUDNN]
        assert "half precision" in self.refusals(subject(None))[CUDNN]
        uneven = subject(lambda b, h, q, kv: q >= kv, dtype=torch.bfloat16)
        assert "equal lengths" in self.refusals(uneven)[CUDNN]

    def test_eager_attention_is_left_out_where_its_scores_do_not_fit(self):
        large = subject(None, shape=Shape(4, 32, 32, 8192, 8192, 64, 64))
        assert "its scores would take 96 GiB" in self.refusals(large)[EAGER]

    def test_causal_is_recognised_by_what_it_is(self):
        for mask, expected in ((lambda b, h, q, kv: q >= kv, True), (causal, False), (None, False)):
            assert is_causal(subject(mask).lower("sm_80").understood.mods) is expected


ROWS = [
    BenchRow("forward", FLEXGEN, Times(1.0, 0.9, 1.1), 10**11, 0.5),
    BenchRow("forward", FLEX, Times(2.0, 1.9, 2.2), 10**11, 0.5, apart=0.001),
    BenchRow("forward", CUDNN, Times(0.5, 0.5, 0.6), 10**11, 0.5, apart=0.5),
    BenchRow("forward", EAGER, None, 10**11, 0.5, remark="its scores would take 96 GiB"),
]


def test_the_table_compares_with_flexgen():
    out, err = io.StringIO(), io.StringIO()
    write_rows(ROWS, torch.bfloat16, Console(out, err))
    header, own, flex, cudnn, *_ = out.getvalue().splitlines()
    assert header.split() == [
        "direction",
        "contender",
        "time",
        "from",
        "to",
        "TFLOP/s",
        "flexgen",
        "is",
        "bound",
        "apart",
    ]
    assert own.split() == ["forward", "flexgen", "1", "ms", "900", "us", "1.1", "ms", "100", "50%"]
    assert flex.split()[-2:] == ["2.00x", "1.0e-03"] and cudnn.split()[-2:] == ["0.50x", "5.0e-01"]
    assert err.getvalue() == "forward: eager was left out: its scores would take 96 GiB\n"


def test_rows_are_json():
    told = json.loads(json.dumps([row_json(row) for row in ROWS]))
    assert told[0]["ms"] == {"median": 1.0, "least": 0.9, "greatest": 1.1} and told[0]["tflops"] == pytest.approx(100)
    assert told[3]["ms"] is None and told[3]["remark"]


@pytest.mark.parametrize("name", ["bars.png", "bars.svg"])
def test_a_picture_is_drawn(tmp_path: Path, name: str):
    pytest.importorskip("matplotlib")
    save_bars(ROWS, "a $title$ of causal.py", tmp_path / name)
    start = (tmp_path / name).read_bytes()[:5]
    assert start in (b"\x89PNG\r", b"<?xml")


def test_differences_are_relative_and_of_the_worst_result():
    ones = torch.ones(4)
    assert apart([ones, 2 * ones], [ones, ones]) == 1.0
    assert apart([ones], [ones]) == 0.0


def test_without_a_gpu_compiling_is_timed_and_that_is_said(
    causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small = ("--set", "BLOCK_M=16", "BLOCK_N=16", "BACKEND=TRITON", "--rounds", "1")
    said = run("bench", causal, *small)
    assert said.code == 0, said.err
    assert "times of calls would mean nothing" in said.err
    for step in ("capture", "analyse", "plan and emit", "flexgen in all", "with backward", "build"):
        assert any(line.startswith(step) and line.endswith("s") for line in said.out.splitlines()), step
    asked = run("bench", causal, *small, "--compile", "--json", "-")
    assert asked.code == 0 and "would mean nothing" not in asked.err
    told = json.loads(asked.out)
    assert told["of"] == "compilation" and all(row["ms"] > 0 for row in told["rows"])


def test_wrong_use_says_what_and_how(causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU here to time calls on" in run("bench", causal, "--only", "decode").err
    assert "--rounds 0 is none" in run("bench", causal, "--rounds", "0").err
    assert "neither a .png nor an .svg" in run("bench", causal, "-o", "bars.pdf").err
    assert run("bench", causal, "--only", "sideways").code == 2


@pytest.mark.gpu
def test_the_gpu_is_timed_beside_what_else_runs_there(causal: Path, run: Run, tmp_path: Path) -> None:
    shape = ("--shape", "1,4,4,1024,1024,64,64", "--rounds", "2")
    said = run("bench", causal, *shape, "-o", tmp_path / "bars.png", "--json", tmp_path / "times.json")
    assert said.code == 0, said.err
    rows = json.loads((tmp_path / "times.json").read_text())["rows"]
    timed = {(row["direction"], row["contender"]) for row in rows if row["ms"]}
    assert {(direction, FLEXGEN) for direction in ("forward", "backward", "decode")} <= timed
    assert {("forward", FLEX), ("forward", CUDNN), ("forward", EAGER)} <= timed
    assert all(row["apart"] < 0.02 for row in rows if row["ms"])
    assert (tmp_path / "bars.png").stat().st_size > 1000

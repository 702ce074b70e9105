"""A short run with a fixed seed, and proof that the fuzzer would find a wrong kernel and make the case small."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import flexgen
from flexgen.codegen import node_printer
from flexgen.codegen.dialects import triton as triton_dialect
from flexgen.fuzzing import worker
from flexgen.fuzzing.cases import Case, DrawnCall, Placed, Scope, cases
from flexgen.fuzzing.check import check_call
from flexgen.fuzzing.grammar import STATEMENTS, Statement
from flexgen.fuzzing.hunt import Failure, Hunt, Plan, run_script
from flexgen.fuzzing.inputs import LAYOUTS, drawn
from flexgen.fuzzing.judge import Judge, Wrong
from flexgen.fuzzing.mods import Captures
from flexgen.fuzzing.pool import FuzzPool
from flexgen.fuzzing.reference import Precision, Problem, evaluate
from flexgen.fuzzing.script import script_of
from flexgen.fuzzing.tally import Tally
from flexgen.fuzzing.ways import WAYS
from flexgen.ir.ops import OPS
from flexgen.options import Options

FORWARD, BACKWARD = Scope(backward=False, cuda=False), Scope(backward=True, cuda=False)


def hunt(scope: Scope, seed: int, number: int) -> tuple[Tally, list[Failure]]:
    """Run a number of cases and return what was counted and what failed."""
    hunting = Hunt(Plan(scope, seed, cases=number))
    found = [failure for failure in hunting.failures() if failure is not None]
    return hunting.tally, found


@pytest.mark.parametrize(("scope", "number"), [(FORWARD, 40), (BACKWARD, 12)], ids=["forward", "backward"])
def test_a_short_run_finds_nothing(scope: Scope, number: int):
    tally, found = hunt(scope, 2026, number)
    assert found == []
    assert tally.cases >= number
    assert tally.backward >= 12 or not scope.backward


@pytest.mark.slow
@pytest.mark.parametrize("scope", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_a_long_run_finds_nothing(scope: Scope):
    assert hunt(scope, 7, 1500)[1] == []


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_a_short_run_on_a_gpu_finds_nothing(backward: bool):
    assert hunt(Scope(backward, cuda=True), 2026, 60)[1] == []


def test_a_run_of_the_same_seed_draws_the_same_cases():
    assert scripts_of(FORWARD, 3, 5) == scripts_of(FORWARD, 3, 5) != scripts_of(FORWARD, 4, 5)


def scripts_of(scope: Scope, seed: int, number: int) -> list[str]:
    scripts: list[str] = []
    list(Hunt(Plan(scope, seed, cases=number), scripts.append).failures())
    return scripts


def drawn_cases(number: int) -> list[Case]:
    """Draw cases without running them."""
    found: list[Case] = []

    @settings(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(FORWARD))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def test_cases_cover_the_layouts_the_ways_and_the_dtypes():
    drawn_ones = drawn_cases(400)
    calls = [call for case in drawn_ones for call in case.calls]
    assert {placed.layout for call in calls for placed in (call.query, call.key, call.value)} == set(LAYOUTS)
    assert len({way for call in calls for way in call.ways}) >= len(WAYS) - 2
    assert {True, False} == {call.lengths is None for call in calls}
    assert {"float32", "float16", "bfloat16", "float64"} == {case.dtype for case in drawn_ones}
    assert any(0 in call.query.shape for call in calls)


CONSTANTS = {"n": "3", "d": "-3", "s": "2", "x": "0.5"}
VALUES = {
    "i": ("(q_idx - 4)", "(kv_idx - 2)"),
    "f": ("score", "(score * 0.7 - 0.2)"),
    "b": ("(q_idx > 3)", "(kv_idx < 5)"),
}


def one_statement(statement: Statement) -> Case:
    """Return a case whose score_mod is one statement of the grammar."""
    values = {kind: itertools.cycle(texts) for kind, texts in VALUES.items()}
    operands = [CONSTANTS.get(code) or next(values[code]) for code in statement.operands]
    text = f"def score_mod(score, b, h, q_idx, kv_idx):\n    x = {statement.template.format(*operands)}\n"
    placed = Placed((1, 1, 9, 16), "contiguous", 1, requires_grad=True)
    keys = dataclasses.replace(placed, seed=2)
    call = DrawnCall(placed, keys, keys, scale=None, lengths=None, backward=True, ways=())
    return Case(Captures((), ()), text + "    return score + torch.sin(x)", None, (), "float32", (call,))


def test_every_statement_of_the_grammar_is_right_and_all_ops_are_among_them():
    tally = Tally()
    for statement in itertools.chain(*STATEMENTS.values()):
        run_script(script_of(one_statement(statement)), functools.partial(check_call, tally=tally))
    read_by_table = {"load", "scalar"}  # drawn apart from the grammar's statements
    assert set(OPS) - set(tally.ops) == read_by_table


# Would it find what is wrong?

BROKEN = {
    "ge": triton_dialect._infix(">", triton_dialect.Precedence.COMPARE),
    "mul": triton_dialect._infix("+", triton_dialect.Precedence.ADD),
    "floor": triton_dialect._function("tl.ceil"),
}


@pytest.mark.parametrize("op", ["ge", *(pytest.param(op, marks=pytest.mark.slow) for op in ("mul", "floor"))])
def test_a_wrong_op_is_found_and_the_case_made_small(op: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(node_printer, "SPELLINGS", {**triton_dialect.SPELLINGS, op: BROKEN[op]})
    monkeypatch.setattr("flexgen.fuzzing.hunt.SHRINKING_SECONDS", 6.0)
    failure = next(found for found in Hunt(Plan(FORWARD, 1, seconds=120)).failures() if found is not None)
    assert failure.error.startswith("Wrong: ")
    statements = re.search(r"_mod\(.*\):\n(.*?)\n    attention", failure.script, re.DOTALL)
    assert statements is not None and statements.group(1).count("\n") <= 8, failure.script
    with pytest.raises(Wrong):
        run_script(failure.script, check_call)


def test_a_found_case_is_a_script_and_a_test(tmp_path: Path):
    path = tmp_path / "test_found.py"
    path.write_text(script_of(drawn_cases(3)[-1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for command in ([path], ["-m", "pytest", "-q", "-p", "no:cacheprovider", path]):
        done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_judge_excuses_what_rounding_decides_and_nothing_else():
    table = torch.tensor([0.3, 0.7, 1.0])
    query, key, value = (drawn((1, 1, 3, 16), seed=seed) for seed in range(3))

    def steps(score, b, h, q, k):
        return torch.floor((table[k] * 10.0) / 10.0 - table[k] + 1.0) + score * 0

    problem = Problem(query, key, value, steps, None, None, None, backward=False)
    exact = evaluate(problem, Precision(exact=True))
    judge = Judge(problem, Options())
    moved = {**exact, "max_scores": exact["max_scores"] + 1.0}  # a floor on the other side
    judge.check(exact)
    assert judge.excused == 0
    judge.check(moved)
    assert judge.excused == 1
    with pytest.raises(Wrong, match="max_scores: off by 6"):
        judge.check({**exact, "max_scores": exact["max_scores"] + 6.0})
    plain = dataclasses.replace(problem, score_mod=None)
    with pytest.raises(Wrong, match="output: off by"):
        Judge(plain, Options()).check({**evaluate(plain, Precision(exact=True)), "output": exact["output"] + 1e-3})


def test_the_judge_wants_nan_where_a_live_score_is_nan():
    query, key, value = (drawn((1, 1, 3, 16), seed=seed) for seed in range(3))

    def lost(score, b, h, q, k):
        return torch.where(q == 1, float("nan"), score)

    problem = Problem(query, key, value, lost, None, None, None, backward=False)
    exact = evaluate(problem, Precision(exact=True))
    Judge(problem, Options()).check(exact)
    with pytest.raises(Wrong, match="instead of nan"):
        Judge(problem, Options()).check({**exact, "output": exact["output"].nan_to_num()})


def test_the_judge_knows_the_precision_of_what_mods_capture():
    table = drawn((1,), seed=0)
    inputs = (drawn((1, 1, 7, 16), "float64", seed) for seed in range(3))
    check_call(flexgen.compile(lambda score, b, h, q, k: table[q % 1] ** 1.5), *inputs)


@pytest.mark.parametrize(("dtype", "spread"), [("bfloat16", 1.0), ("float32", 8.0)])
def test_the_judge_knows_that_rows_of_gradients_are_summed_from_the_rounded_output(dtype: str, spread: float):
    table = drawn((1,), requires_grad=True)
    query, key = (drawn((1, 1, length, 64), dtype, requires_grad=True) for length in (7, 65))
    value = drawn((1, 1, 65, 64), dtype, spread=spread, requires_grad=True)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[0], lambda b, h, q, k: q >= k)
    check_call(attention, query, key, value, scale=0.3, backward=True)


@pytest.mark.parametrize(
    ("dtype", "options", "scale"), [("float32", {}, 4.0), ("bfloat16", {"fwd_PRESCALE_QK": True}, 1.5)]
)
def test_the_judge_knows_that_weights_are_computed_again(dtype: str, options: dict[str, bool], scale: float):
    query, key, value = (drawn((1, 1, 7, 64), dtype, requires_grad=True) for _ in range(3))
    check_call(flexgen.compile(None, lambda b, h, q, k: q >= k, options), query, key, value, scale=scale, backward=True)


def test_the_judge_knows_the_gradient_of_a_logsumexp_of_huge_scores():
    query, key, value = (drawn((1, 1, 7, 16), seed=seed, requires_grad=True) for seed in range(3))
    check_call(flexgen.compile(lambda score, b, h, q, k: score - 1e30), query, key, value, backward=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["query", "key", "value", "captured 0"])
def test_the_judge_refuses_gradients_that_are_a_little_off(dtype: str, name: str):
    table = drawn((9,), requires_grad=True)
    query, key, value = (drawn((1, 2, 9, 16), dtype, seed, requires_grad=True) for seed in range(3))
    problem = Problem(query, key, value, lambda s, b, h, q, k: s + table[k], None, None, None, backward=True)
    exact = evaluate(problem, Precision(exact=True))
    Judge(problem, Options()).check(exact)
    changed = f"gradient of {name}"
    off = exact[changed].abs().amax() * 8 * torch.finfo(query.dtype).eps
    off = max(float(off), 1e-3)
    with pytest.raises(Wrong, match=changed):
        Judge(problem, Options()).check({**exact, changed: exact[changed] + off})


def test_the_judge_knows_what_a_dtype_cannot_hold():
    query, key, value = (drawn((1, 1, 9, 16), "float16", seed, requires_grad=True) for seed in range(3))
    problem = Problem(query, key, value, None, None, None, None, backward=True)
    exact, name = evaluate(problem, Precision(exact=True)), "gradient of query"
    large = {**exact, name: exact[name] * 1e6}
    judge = Judge(problem, Options())
    vars(judge)["_exact"] = vars(judge)["_eager"] = large
    vars(judge)["_noisy"] = [large]
    assert large[name].half().isinf().any()
    judge.check({**large, name: large[name].half()})
    with pytest.raises(Wrong, match=f"{name}: off by"):
        judge.check({**large, name: torch.full_like(large[name], torch.inf).half()})


def test_heads_of_float8_are_reversed():
    query, key = drawn((1, 2, 7, 16), "bfloat16"), drawn((1, 2, 7, 16), "float8_e4m3fn")
    check_call(flexgen.compile(), query, key, key, also=["with heads in reverse"])


# Processes.


def test_the_case_that_a_process_dies_of_is_reported(monkeypatch: pytest.MonkeyPatch):
    dies = f"""
import os, sys
from flexgen.fuzzing import hunt, worker
hunt.check_call = lambda *args, **options: os.kill(os.getpid(), {int(signal.SIGKILL)})
worker.main()
"""
    monkeypatch.setattr("flexgen.fuzzing.pool.WORKER", ("-c", dies))
    with FuzzPool(Plan(FORWARD, 0, cases=5), jobs=1) as pool:
        failures = [event for event in pool.events() if isinstance(event, Failure)]
    assert [failure.error for failure in failures] == ["the process ended with -9 while it ran this case"]
    assert "def test_case" in failures[0].script


def test_cases_are_shared_out_over_processes(monkeypatch: pytest.MonkeyPatch):
    passes = """
from flexgen.fuzzing import hunt, worker
hunt.check_call = lambda *args, tally, **options: None
worker.main()
"""
    monkeypatch.setattr("flexgen.fuzzing.pool.WORKER", ("-c", passes))
    monkeypatch.setattr("flexgen.fuzzing.pool.CASES", 20)
    total = Tally()
    with FuzzPool(Plan(FORWARD, 0, cases=50), jobs=2) as pool:
        for event in pool.events():
            assert isinstance(event, Tally)
            total.add(event)
    assert 50 <= total.cases <= 53


def test_the_worker_is_the_module_that_is_started():
    assert worker.main.__module__ == "flexgen.fuzzing.worker"

"""Hopper backward kernels on the CPU, emulated, against float32; and that the emulator sees what goes wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.gluon_cases import Check
from flexgen.codegen.source import KernelSource
from flexgen.pipeline import BackwardKernels
from tests.gluon import backward_run
from tests.gluon.backward_problems import CHECKS
from tests.gluon.backward_run import run
from tests.gluon.emulator import DeadlockError

LIMIT = 0.006  # relative to the gradient's norm; half precision alone makes 0.002 to 0.004
EVERYDAY = (
    "first causal 64",
    "first 128",
    "first causal 256",
    "window tails D=128",
    "no mask tails D=64",
    "GQA tails D=64",
    "softcap tails D=128",
    "key table tails D=64",
    "documents tails D=64",
    "document starts tails D=128",
    "two windows tails D=64",
    "block mask future D=64",
    "fully masked rows D=128",
    "values alone D=64",
    "lengths 65, 65",
    "D=192,128",
)


def small(check: Check) -> Check:
    """Return a check with fewer rows, heads and batches."""
    q_heads, kv_heads = check.heads
    heads = check.heads if q_heads != kv_heads else (1, 1)
    q_len, kv_len = (min(length, 330 if length % 2 else 260) for length in check.lengths)
    return dataclasses.replace(check, heads=heads, batch=min(check.batch, 2), lengths=(q_len, kv_len))


@pytest.mark.parametrize("name", EVERYDAY)
def test_gradients(name: str) -> None:
    assert max(run(small(CHECKS[name])).errors.values()) < LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - set(EVERYDAY)))
def test_other_gradients(name: str) -> None:
    assert max(run(small(CHECKS[name])).errors.values()) < LIMIT


@pytest.mark.parametrize("seed", range(4))
def test_gradients_do_not_depend_on_how_partitions_take_turns(seed: int) -> None:
    check = dataclasses.replace(small(CHECKS["causal D=64"]), batch=1)
    assert max(run(check, seed).errors.values()) < LIMIT


# What a careless change could do, by kernel: a text and what it becomes.
MISTAKES = {
    "wrong parity of a full slot": ("(turn // SLOTS) & 1)", "((turn // SLOTS) & 1) ^ 1)", DeadlockError),
    "a slot is never freed": ("        free(key_empty, step - 1, KEY_STAGES)\n", "", DeadlockError),
    "wrong parity of an empty slot": ("((turn // SLOTS) & 1) ^ 1)", "(turn // SLOTS) & 1)", DeadlockError),
    "a product is read before a wait": (
        "        score = warpgroup_mma_wait(2, deps=[score])\n",
        "        score = warpgroup_mma_wait(3, deps=[score])\n",
        AssertionError,
    ),
    "bytes that nobody announced": ("key_desc.block_type.nbytes", "2 * key_desc.block_type.nbytes", DeadlockError),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, error = MISTAKES[mistake]
    changed(monkeypatch, before, after)
    with pytest.raises(error):
        run(small(CHECKS["causal D=64"]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        free(key_empty, step - 1, KEY_STAGES)\n", ""),  # freed before its product is done, see below
        ("tile >= full_hi", "tile > full_hi"),
        ("row_start + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))", "row_start - 1 + gl.arange(0, ROWS, 0)"),
    ],
    ids=["slot freed too early", "tile not masked", "rows moved"],
)
def test_a_mistake_is_a_wrong_gradient(before: str, after: str, monkeypatch: pytest.MonkeyPatch) -> None:
    early = "        key_early = free(key_empty, step - 1, KEY_STAGES)\n        tile = tile_at(step, tiles)\n"
    changed(monkeypatch, before, after)
    if "key_empty" in before:
        changed(monkeypatch, "        tile = tile_at(step, tiles)\n", early)
    check = dataclasses.replace(small(CHECKS["causal D=64"]), options={"bwd_BLOCK_N2": 64})  # slots are used again
    errors = [max(run(check, seed).errors.values()) for seed in range(3)]
    assert max(errors) > 2 * LIMIT


def changed(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """Let a text of the dQ kernel be another one."""
    compile_backward = backward_run.compile_backward

    def compile_changed(*args: object, **named: object) -> BackwardKernels:
        kernels = compile_backward(*args, **named)  # type: ignore[arg-type]
        passes = tuple((_with(source, before, after), plan) for source, plan in kernels.passes)
        return dataclasses.replace(kernels, passes=passes)

    monkeypatch.setattr(backward_run, "compile_backward", compile_changed)


def _with(source: KernelSource, before: str, after: str) -> KernelSource:
    if source.entry != "backward_dq":
        return source
    assert before in source.text
    return dataclasses.replace(source, text=source.text.replace(before, after))


def test_the_row_kernel_pads_each_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain kernel that prepares rows, in Triton's interpreter, for rows that begin at multiples."""
    from flexgen.codegen.emit_backward import emit_delta
    from flexgen.lowering.targets import TARGETS
    from flexgen.lowering.triton.backward_plan import RowForm
    from flexgen.lowering.triton.choose_backward import choose_delta
    from flexgen.problem import Guard, Problem
    from flexgen.runtime.describe import Launch
    from flexgen.runtime.kernel import Kernel

    rows, heads, dim = 70, 3, 64
    output, grad_output = (torch.randn(1, heads, rows, dim, dtype=torch.bfloat16) for _ in range(2))
    logsumexp, tail = torch.randn(1, heads, rows), torch.randn(1, heads, rows)
    logsumexp[0, 1, 5] = float("-inf")
    unit = frozenset({"output", "grad_output"})
    problem = Problem(torch.bfloat16, torch.bfloat16, torch.bfloat16, dim, dim, unit_stride=unit)
    form = RowForm(BASE_2=True, ROW_MULTIPLE=128, writes_tail=True)
    plan = choose_delta(
        problem, Guard(128, 128, False, False), TARGETS["interpret"], has_grad_logsumexp=False, row_form=form
    )
    tensors = {"query": output, "key": output, "value": output, "output": output, "grad_output": grad_output}
    tensors |= {"logsumexp": logsumexp, "logsumexp_tail": tail}
    launch = Launch(1, heads, heads, rows, rows, tensors, 1.0)
    outputs = {name: torch.full((1, heads, 128), float("nan")) for name in ("delta", "row_shift", "row_tail")}
    Kernel(emit_delta(plan), plan, None).run(launch, outputs)
    expected = torch.where(logsumexp == float("-inf"), float("inf"), logsumexp * backward_run.LOG2_E)
    torch.testing.assert_close(outputs["row_shift"][..., :rows], expected)
    torch.testing.assert_close(outputs["delta"][..., :rows], (output.float() * grad_output.float()).sum(-1))
    torch.testing.assert_close(outputs["row_tail"][..., :rows], tail)
    assert (outputs["row_shift"][..., rows:] == float("inf")).all()
    assert (outputs["delta"][..., rows:] == 0).all()
    assert (outputs["row_tail"][..., rows:] == 0).all()

"""Decides the plans of the backward kernels."""

from __future__ import annotations

import dataclasses

from flexgen.lowering.index_map import IndexMap
from flexgen.lowering.rounding import round_up_to_power_of_two
from flexgen.lowering.schedule import Walk
from flexgen.lowering.targets import Target
from flexgen.lowering.triton import choose
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan, BackwardTask, DeltaPlan, RowForm
from flexgen.lowering.triton.backward_tiles import TILE_OPTIONS, BackwardPhysics, preferred
from flexgen.lowering.triton.choose import Answers, Question
from flexgen.lowering.triton.tiles import Tile, TileShape, captured_loads
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem, TableForm


def choose_backward(question: Question, task: BackwardTask) -> BackwardPlan:
    """Decide every template variable of a backward kernel.

    Args:
        question: with the backward options, and the schedule of the kernel's own direction.
        task: what the kernel computes.

    Raises:
        OptionError, NoFeasiblePlanError, UnsupportedProblemError: as for the forward.
    """
    question = dataclasses.replace(question, options=_own_tile(question.options, task.kernel))
    answers = Answers()
    choose.decide_backend(question, answers)
    _task(task, answers)
    choose.decide_head_dims(question, answers)
    index_map = IndexMap(cu_seqlens=question.problem.cu_seqlens)
    answers.add("index_map", index_map, "gradients of the heads of a group are summed by the program, not packed")
    choose.decide_sequences(question, answers)
    if question.schedule.walk is Walk.DERIVED:
        question = _tile_with_its_table(question, answers, task)
    else:
        _tile(question, answers, task)
    choose.decide_table(question, answers)
    choose.decide_divisible(question, answers)
    _scale(question, answers)
    choose.decide_arithmetic(question, answers)
    choose.decide_order(question, answers)
    choose.decide_dropout(question, answers)
    choose.decide_amd(question, answers)
    fields = choose.plan_fields(question, answers, BackwardPlan)
    return BackwardPlan(**fields | {"kernel": task.kernel, "scatter": task.scatter, "accumulation": task.accumulation})


def _task(task: BackwardTask, answers: Answers) -> None:
    for name in ("query", "key", "value"):
        writes = name in task.writes
        answers.add(f"WRITE_GRAD_{name.upper()}", writes, "wanted" if writes else "not wanted, or another kernel's")
    names = ", ".join(dict.fromkeys(site.buffer for site in task.scatter))
    answers.add("scatter", names or "none", task.because)


def _own_tile(options: KernelOptions, kernel: BackwardKernel) -> KernelOptions:
    """Move the kernel's own tile options to BLOCK_M and BLOCK_N, which are the forward's."""
    named = {block: getattr(options, option) for option, block in TILE_OPTIONS[kernel].items()}
    return dataclasses.replace(options, **{"BLOCK_M": None, "BLOCK_N": None, **named})


def _tile(question: Question, answers: Answers, task: BackwardTask) -> None:
    problem = question.problem
    itemsize = problem.query_dtype.itemsize
    qk, v = answers["QK_HEAD_DIM_ROUNDED"], answers["V_HEAD_DIM_ROUNDED"]
    shape = TileShape(qk, v, itemsize, itemsize, itemsize, captured_loads(question.mods), drops=problem.dropout)
    first, origin = preferred(problem.query_dtype, max(qk, v), question.target, task.kernel)
    first = _fit_lengths(first, question)
    physics = BackwardPhysics(task.kernel, task.kept_tiles + _drawn_tiles(problem, task.kernel))
    choose.settle_tile(question, answers, first, origin, shape, physics)


def _drawn_tiles(problem: Problem, kernel: BackwardKernel) -> int:
    """Return how many tiles of values it takes to draw what is dropped, and to keep that for both uses in dK/dV.

    Fitted to where kernels compiled offline begin to spill; around a loop over heads more is kept. dQ has room for it.
    """
    return 2 + (problem.group > 1) if problem.dropout and kernel is BackwardKernel.DKDV else 0


def _tile_with_its_table(question: Question, answers: Answers, task: BackwardTask) -> Question:
    """Decide the tile, and with it the table: a block is a tile, so that no finer list would help.

    The forward's table would do where its blocks are whole tiles, but its larger blocks are visited in full where only
    a part of them is live. Where they are of one size, as measured to be the best on Hopper, it is the same table.
    """
    _tile(dataclasses.replace(question, problem=dataclasses.replace(question.problem, table=None)), answers, task)
    form = TableForm(answers["BLOCK_M"], answers["BLOCK_N"], True, derived=True)
    return dataclasses.replace(question, problem=dataclasses.replace(question.problem, table=form))


def _fit_lengths(tile: Tile, question: Question) -> Tile:
    guard, table = question.guard, question.problem.table
    block_m = min(tile.BLOCK_M, round_up_to_power_of_two(guard.q_bucket or tile.BLOCK_M))
    block_n = min(tile.BLOCK_N, round_up_to_power_of_two(guard.kv_bucket or tile.BLOCK_N))
    if table is not None:
        block_m = choose.dividing(block_m, table.q_block_size)
        block_n = choose.dividing(block_n, table.kv_block_size)
    return Tile(block_m, block_n, tile.num_warps, tile.num_stages)


def _scale(question: Question, answers: Answers) -> None:
    scale = question.problem.scale
    answers.add("SM_SCALE", scale, "a constant" if scale is not None else "varies between calls: a run-time argument")
    extreme = choose.extreme_reason(question)
    fold = choose.fold(question, prescale=False)
    answers.add("FOLD_SCALE", *(fold if extreme is None else (False, "scores are scaled before the subtraction")))
    answers.add("SUBTRACT_FIRST", extreme is not None, extreme or "scores of moderate size")


def choose_delta(
    problem: Problem, guard: Guard, target: Target, *, has_grad_logsumexp: bool, row_form: RowForm
) -> DeltaPlan:
    """Decide the plan of the kernel that prepares rows: it only streams, so its tile matters little."""
    rounded = round_up_to_power_of_two(problem.v_head_dim)
    rows = 128 if target.backend == "interpret" else max(16, 8192 // rounded)
    return DeltaPlan(
        target=target,
        BLOCK_M=min(128, rows),
        V_HEAD_DIM=problem.v_head_dim,
        V_HEAD_DIM_ROUNDED=rounded,
        num_warps=4,
        has_grad_logsumexp=has_grad_logsumexp,
        rows=row_form,
        dtype=problem.query_dtype,
        accumulator_dtype=problem.accumulator_dtype,
        unit_stride=problem.unit_stride,
        wide=guard.wide,
    )

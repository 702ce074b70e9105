"""Decides a decode plan, or says why there is none: one small function a decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flexgen.lowering.index_map import PACKED_QUERIES
from flexgen.lowering.occupancy import occupancy
from flexgen.lowering.rounding import round_down_to_power_of_two, round_up_to_power_of_two
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton.choose import (
    Answers,
    Question,
    decide_amd,
    decide_arithmetic,
    decide_dropout,
    decide_head_dims,
    decide_outputs,
    decide_packing,
    decide_scale,
    decide_stored,
    decide_table,
    decoded_tensors,
    fit_pages,
    plan_fields,
    refuse_float64,
    settle_tile,
)
from flexgen.lowering.triton.choose_table import hull_width
from flexgen.lowering.triton.tiles import ForwardPhysics, Tile, TileShape, captured_loads
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem

SELECTING = ("FORCE_USE_FLEX_ATTENTION", "USE_SUBTILING", "USE_TMA")  # options that only the forward kernel has
TILE_BYTES = 32768  # of a key and a value tile together; two in flight cover the latency of a multiprocessor's memory
MOST_ROWS = 64  # more rows of a tile would keep accumulators that few decodes need
MOST_RESIDENT = 2  # programs of a multiprocessor that together keep enough bytes in flight
LIKELY_REGISTERS = 128  # of a thread: 108 to 168 in kernels of up to 32 rows, compiled offline
COMBINED = 8192  # elements of partial rows that a combining program holds at a time


def refusal(question: Question) -> str | None:
    """Return why these kernels cannot serve a call; None if they can."""
    return refusal_of(question.problem, question.guard, question.options)


def refusal_of(problem: Problem, guard: Guard, options: KernelOptions) -> str | None:
    """Return why these kernels cannot serve calls of a kind, whatever their number of keys."""
    if not 0 < guard.q_bucket <= PACKED_QUERIES:
        return f"there are more than {PACKED_QUERIES} queries, which fill tiles of their own"
    if problem.table is not None:
        return "a block table is walked row by row of blocks, not split"
    if problem.cu_seqlens is not None:
        return "sequences are packed along the length, each with queries of its own"
    if problem.dropout:
        return "softmax weights are dropped, by the general kernel alone"
    if problem.has_offsets:
        return "the indices have run-time offsets"
    chosen = [name for name in SELECTING if getattr(options, name)]
    return f"{chosen[0]} selects the general kernel" if chosen else None


def recommended(question: Question) -> str | None:
    """Return why this backend is the default for a call that it can serve."""
    if question.options.SPLIT_KV is not None:
        return "selected by SPLIT_KV"
    return f"at most {question.guard.q_bucket} queries leave most of a device idle unless their keys are split"


def relevant(guard: Guard) -> Guard:
    """Return what a decode plan looks at of a guard: nothing that changes as a cache grows."""
    return replace(guard, kv_bucket=0, kv_divisible=False, rows_safe_holds=False, aligned=frozenset())


def choose_decode(question: Question, because: str) -> DecodePlan:
    """Decide every template variable; `refusal` has returned None.

    Args:
        because: why this backend.

    Raises:
        NoFeasiblePlanError, OptionError, UnsupportedProblemError: as for the forward kernel.
    """
    answers = Answers()
    answers.add("BACKEND", "TRITON_DECODE", because, question.passed_over)
    refuse_float64(question)
    for decide in _ORDER:
        decide(question, answers)
    return DecodePlan(**plan_fields(question, answers, DecodePlan))


def _decide_tile(question: Question, answers: Answers) -> None:
    problem = question.problem
    shape = TileShape(
        answers["QK_HEAD_DIM_ROUNDED"],
        answers["V_HEAD_DIM_ROUNDED"],
        problem.query_dtype.itemsize,
        problem.key_dtype.itemsize,
        problem.value_dtype.itemsize,
        captured_loads(question.mods),
        splits_operands=question.options.FLOAT32_PRECISION == "tf32x3",
        looks_up_pages=problem.page_size > 0,
    )
    rows = question.guard.q_bucket * answers["index_map"].packed_heads
    block_m = min(MOST_ROWS, round_up_to_power_of_two(rows))
    tile, origin = fit_pages(*_preferred(question, shape, block_m), question)
    settle_tile(question, answers, tile, origin, shape, ForwardPhysics())


def _preferred(question: Question, shape: TileShape, block_m: int) -> tuple[Tile, str]:
    target = question.target
    if target.backend == "interpret":
        return Tile(block_m, 128, 4, 1), "the interpreter's cost is per step, not per element"
    row_bytes = shape.qk_rounded * shape.key_bytes + shape.v_rounded * shape.value_bytes
    block_n = min(128, max(16, round_down_to_power_of_two(TILE_BYTES // row_bytes)))
    if decoded_tensors(question.problem, target):
        block_n = max(16, block_n // 2)  # moving the bits of float8_e4m3fn takes registers
    if shape.query_bytes >= 4:
        keys = 32 if max(shape.qk_rounded, shape.v_rounded) <= 64 else 16
        return Tile(min(block_m, 32), keys, 8, 2), "float32 products run outside the matrix units: small tiles"
    stages = 3 if target.backend == "cuda" else 2
    warps = 8 if block_m >= 64 and target.backend == "cuda" else 4
    return Tile(block_m, block_n, warps, stages), f"guess: {TILE_BYTES // 1024} KB of keys and values a stage"


def _decide_splits(question: Question, answers: Answers) -> None:
    asked = question.options.SPLIT_KV
    because = "asked for" if asked else "each launch counts: as many as run at once, each of a few tiles at least"
    answers.add("SPLIT_KV", asked, because)
    width = hull_width(question.facts) if question.schedule.walk is Walk.RANGES else None
    known = "the mask bounds no row by a constant" if width is None else "the mask lets no query see more"
    answers.add("LIVE_KEYS", width, known)
    fits = occupancy(question.target, LIKELY_REGISTERS, answers["num_warps"], answers["shared_bytes"])
    held = max(1, fits.programs) if fits else 1
    limit = f"by {fits.limit}, if a thread takes {LIKELY_REGISTERS} registers" if fits else "the interpreter runs one"
    answers.add("held", held, limit)
    answers.add("resident", min(MOST_RESIDENT, held), "programs of a multiprocessor that splits are counted for")


def _decide_combining(question: Question, answers: Answers) -> None:
    held = COMBINED // answers["V_HEAD_DIM_ROUNDED"]
    answers.add("COMBINE_SPLITS", max(16, min(64, held)), f"up to {COMBINED} elements of partial rows at a time")
    answers.add("combine_warps", 4, "one row a program, read along the head dim")


def _decide_lengths(question: Question, answers: Answers) -> None:
    answers.add("IS_DIVISIBLE", False, "one kernel serves a cache of any length, and rows of a tile are masked")
    answers.add("ROWS_GUARANTEED_SAFE", False, "a split may hold no live key of a row")
    first = bool(question.options.LONG_ROWS_FIRST)
    answers.add("LONG_ROWS_FIRST", first, "asked for" if first else "splits are of one length")


def _decide_absent(question: Question, answers: Answers) -> None:
    for name in ("USE_TMA", "USE_SUBTILING"):
        answers.add(name, False, "the general forward kernel has it")


_ORDER: tuple[Callable[[Question, Answers], None], ...] = (
    decide_head_dims,
    decide_table,
    decide_packing,
    _decide_tile,
    _decide_splits,
    _decide_combining,
    _decide_lengths,
    decide_scale,
    decide_stored,
    _decide_absent,
    decide_arithmetic,
    decide_dropout,
    decide_outputs,
    decide_amd,
)

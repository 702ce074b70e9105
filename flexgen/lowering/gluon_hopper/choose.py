"""Decides a Gluon forward plan for Hopper, or says why there is none: one small function a decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.lowering.decision import Decision, Rejected
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import PROGRAM_WARPS, WARPGROUP_ROWS, GluonPlan, Template
from flexgen.lowering.intervals import Interval
from flexgen.lowering.rounding import largest_power_of_two_divisor
from flexgen.lowering.row_groups import rows_of_one_range
from flexgen.lowering.schedule import Walk
from flexgen.lowering.score_fold import ScoreFold, fold_score
from flexgen.lowering.triton.choose import (
    Answers,
    Question,
    decide_arithmetic,
    decide_head_dims,
    decide_order,
    decide_outputs,
    decide_rows_safe,
    decide_scale,
    decide_table,
    keys_visited,
)
from flexgen.problem import TableForm

HEAD_DIMS = (32, 256)
SWIZZLED_BYTES = 16  # the copy engine moves rows in units of this
FEW_KEYS = 64  # fewer are not worth a pipeline
BARRIER_BYTES = 1024  # barriers and alignment of the tiles: an upper bound


@dataclass(frozen=True, slots=True)
class Shape:
    """A template with its tile, and how it shares out registers.

    Attributes:
        consumers: warpgroups that compute, each 64 rows.
        block_n, key_stages, value_stages: keys of a tile, and tiles in shared memory.
        registers: of a thread at launch, of a consumer's thread, and of the producer's.
    """

    template: Template
    consumers: int
    block_n: int
    key_stages: int
    value_stages: int
    registers: tuple[int, int, int]

    @property
    def block_m(self) -> int:
        return self.consumers * WARPGROUP_ROWS


TWO_CONSUMERS = (168, 240, 24)  # 384 threads: two warpgroups and the producer's
THREE_CONSUMERS = (128, 160, 32)  # 512 threads

# By rounded head dim. H200, bf16, S = 8192, B = 2, heads x head dim = 2048, TFLOP/s in docs/hopper.md: 64 keys instead
# of 128 lose a fifth at head dim 128, a third stage gains nothing, and at head dim 64 three consumers beat two by 14 %.
LONG_ROWS = {
    64: Shape(Template.WARP_SPECIALISED, 3, 128, 2, 2, THREE_CONSUMERS),
    128: Shape(Template.WARP_SPECIALISED, 2, 128, 2, 2, TWO_CONSUMERS),
    256: Shape(Template.WARP_SPECIALISED, 2, 64, 2, 2, TWO_CONSUMERS),
}
# Several small programs on a multiprocessor hide each other's prologue and epilogue.
SHORT_ROWS = {
    64: Shape(Template.ONE_WARPGROUP, 1, 64, 2, 2, (128, 128, 0)),
    128: Shape(Template.ONE_WARPGROUP, 1, 64, 2, 1, (168, 168, 0)),
    256: Shape(Template.ONE_WARPGROUP, 1, 64, 1, 1, (255, 255, 0)),
}
MEASURED = "measured on H200"
GAINS = {64: "1.1 to 1.3", 128: "1.1 to 1.5", 256: "1.2 to 1.7"}  # by rounded head dim, over plain Triton
SHORT_KEYS = {64: 2048, 128: 512, 256: 512}  # a row tile that visits at most so many keys is short


def refusal(question: Question) -> str | None:
    """Return why these kernels cannot serve a call; None if they can."""
    return next((reason for check in _CHECKS if (reason := check(question)) is not None), None)


def verified_to_win(question: Question) -> str | None:
    """Return the measurement for which this backend is the default; None where there is none.

    H200, bf16, S = 8192, against plain Triton in interleaved rounds (benchmarks/gluon_check.py): the eight cases of
    benchmarks/cases.py, which cover key ranges, derived tables and score_mods, all win. Block masks and ranges that
    are reduced over rows run the same loops.
    """
    head_dim = max(_rounded(question))
    if head_dim < min(GAINS):
        return None
    return f"{GAINS[head_dim]} times as fast as plain Triton at head dim {head_dim} ({MEASURED})"


def choose_gluon(question: Question, because: str, spelling: str) -> GluonPlan:
    """Decide every template variable; `refusal` has returned None.

    Args:
        because: why this backend.
        spelling: which of Gluon's spellings to write the kernel in.
    """
    answers = Answers()
    answers.add("BACKEND", "GLUON", because)
    for decide in _ORDER:
        decide(question, answers)
    names = {field.name for field in dataclasses.fields(GluonPlan)}
    values: dict[str, Any] = {decision.name: decision.value for decision in answers.decisions if decision.name in names}
    return GluonPlan(
        target=question.target,
        spelling=spelling,
        score=_score(question),
        live_keys=live_interval(question),
        schedule=question.schedule,
        query_dtype=question.problem.query_dtype,
        wide=question.guard.wide,
        decisions=tuple(answers.decisions),
        **values,
    )


# What the kernels cannot do.


def _wrong_chip(question: Question) -> str | None:
    name = question.target.name
    return None if name == "sm_90" else f"{name} has no warpgroup matrix instructions" if name else None


def _dtype(question: Question) -> str | None:
    dtype, problem = question.problem.query_dtype, question.problem
    if problem.converts_keys:
        return "the warpgroup instructions would multiply keys as they are stored, in 8 bits"
    if problem.k_scale or problem.v_scale:
        return "k_scale and v_scale are applied by plain Triton kernels alone"
    half = dtype in (torch.float16, torch.bfloat16)
    return None if half else f"the warpgroup instructions multiply half precision, not {dtype}"


def _head_dim(question: Question) -> str | None:
    low, high = HEAD_DIMS
    for size in (question.problem.qk_head_dim, question.problem.v_head_dim):
        if not low <= size <= high:
            return f"head dim {size} is outside of {low} to {high}"
        if size * question.problem.query_dtype.itemsize % SWIZZLED_BYTES:
            return f"head dim {size} is not a multiple of {SWIZZLED_BYTES} bytes, the copy engine's unit"
    return None


def _strides(question: Question) -> str | None:
    names = ("query", "key", "value")
    strided = [name for name in names if name not in question.problem.unit_stride]
    if strided:
        return f"the last dimension of {strided[0]} is strided, and the copy engine copies rows"
    misaligned = [name for name in names if name not in question.guard.aligned]
    if misaligned:
        return f"{misaligned[0]} does not start on 16 bytes, or a stride of it is not a multiple of 16 bytes"
    return None


def _lengths(question: Question) -> str | None:
    guard = question.guard
    if 0 < guard.q_bucket < WARPGROUP_ROWS:
        return f"at most {guard.q_bucket} queries do not fill a warpgroup's {WARPGROUP_ROWS} rows"
    if 0 < guard.kv_bucket < FEW_KEYS:
        return f"at most {guard.kv_bucket} keys are less than a tile"
    if question.problem.page_size:
        return "keys lie in pages"
    if question.problem.lengths_dtype is not None:
        return "kv_lengths gives each batch row a number of keys of its own"
    if guard.wide_index:
        return "index arithmetic needs 64 bits"
    return None


def _walk(question: Question) -> str | None:
    schedule = question.schedule
    if schedule.walk is Walk.RANGES and not schedule.segments:
        return "no key is ever live"
    return None


def _offsets(question: Question) -> str | None:
    if question.problem.cu_seqlens is not None:
        return "packed sequences (cu_seqlens) begin where no tile of the copy engine does"
    return "the indices have run-time offsets" if question.problem.has_offsets else None


def _dropout(question: Question) -> str | None:
    return "dropout is computed by plain Triton alone" if question.problem.dropout else None


def _options(question: Question) -> str | None:
    options = question.options
    selecting = ("USE_SUBTILING", "PRESCALE_QK", "USE_TMA", "FORCE_USE_FLEX_ATTENTION")
    chosen = [name for name in selecting if getattr(options, name)]
    if chosen:
        return f"{chosen[0]} selects plain Triton"
    if options.USE_TMA is False:
        return "USE_TMA=False was asked for, and these kernels copy by it"
    if options.num_warps not in (None, PROGRAM_WARPS):
        return f"num_warps={options.num_warps} was asked for, and a warpgroup has {PROGRAM_WARPS} warps"
    return _tile_reason(question)


def _tile_reason(question: Question) -> str | None:
    shape, _ = _shape(question)
    if shape.block_m not in (64, 128, 192) or shape.block_n not in (32, 64, 128):
        return f"tiles of {shape.block_m} x {shape.block_n} are none of these kernels'"
    table = question.problem.table
    if table is not None and (table.q_block_size % shape.block_m or table.kv_block_size % shape.block_n):
        return f"the listed blocks are not whole tiles of {shape.block_m} x {shape.block_n}"
    needed = shared_bytes(shape, *_rounded(question), question.problem.query_dtype.itemsize)
    if needed > question.target.shared_bytes:
        return (
            f"the tile needs {needed} bytes of shared memory, {question.target.name} has {question.target.shared_bytes}"
        )
    return None


_CHECKS: tuple[Callable[[Question], str | None], ...] = (
    _wrong_chip,
    _dtype,
    _head_dim,
    _strides,
    _lengths,
    _walk,
    _offsets,
    _dropout,
    _options,
)


# The tile.


def _rounded(question: Question) -> tuple[int, int]:
    """Return both head dims as the tiles have them: powers of two."""
    problem = question.problem
    qk, v = (max(HEAD_DIMS[0], 1 << (size - 1).bit_length()) for size in (problem.qk_head_dim, problem.v_head_dim))
    return qk, v


def shared_bytes(shape: Shape, qk_dim: int, v_dim: int, itemsize: int) -> int:
    """Return an upper bound on the shared memory of a program: the query tile, the rings, and barriers."""
    query = shape.block_m * qk_dim
    rings = shape.block_n * (shape.key_stages * qk_dim + shape.value_stages * v_dim)
    return (query + rings) * itemsize + BARRIER_BYTES


def _shape(question: Question) -> tuple[Shape, str]:
    """Return the first choice, changed to what the user forces, and why."""
    shape, because = _first_choice(question)
    return _forced(shape, question), because


def _first_choice(question: Question) -> tuple[Shape, str]:
    head_dim = _size_class(question)
    if question.problem.table is not None:
        return _listed(question.problem.table, head_dim)
    keys = keys_visited(question.schedule)
    if 0 < question.guard.q_bucket <= WARPGROUP_ROWS:
        return SHORT_ROWS[head_dim], f"at most {question.guard.q_bucket} queries fill one warpgroup"
    if keys is not None and keys <= SHORT_KEYS[head_dim]:
        return SHORT_ROWS[head_dim], f"a row visits about {keys} keys: small programs waste few of them ({MEASURED})"
    group = rows_of_one_range(question.schedule)
    if group is not None and group % LONG_ROWS[head_dim].block_m:
        because = f"{group} rows have one range of keys, and a larger tile would visit what lies between several"
        return SHORT_ROWS[head_dim], because
    if head_dim == 64 and question.mods.score is not None:
        because = "at head dim 64 a score_mod keeps the vector units busy, and many small programs share them best"
        return SHORT_ROWS[head_dim], f"{because} ({MEASURED})"
    visited = "most keys" if keys is None else f"about {keys} keys"
    because = f"a row visits {visited}: long rows keep a producer and consumers busy ({MEASURED})"
    if question.guard.q_bucket:
        return _with_consumers(head_dim, 2), f"at most {question.guard.q_bucket} queries fill two warpgroups"
    if head_dim == 64 and is_reduced(question):
        return _with_consumers(head_dim, 2), f"{because}; three consumers have too few registers for reduced ranges"
    return LONG_ROWS[head_dim], because


def _listed(table: TableForm, head_dim: int) -> tuple[Shape, str]:
    """Return the shape for listed blocks, which its tiles must divide."""
    because = f"blocks of {table.q_block_size} x {table.kv_block_size} are listed"
    whole = table.q_block_size % (2 * WARPGROUP_ROWS) == 0
    shape = _with_consumers(head_dim, 2) if whole else SHORT_ROWS[head_dim]
    block_n = min(shape.block_n, largest_power_of_two_divisor(table.kv_block_size))
    return dataclasses.replace(shape, block_n=block_n), because


def _size_class(question: Question) -> int:
    return max(64, *_rounded(question))


def _with_consumers(head_dim: int, consumers: int) -> Shape:
    registers = THREE_CONSUMERS if consumers == 3 else TWO_CONSUMERS
    return dataclasses.replace(LONG_ROWS[head_dim], consumers=consumers, registers=registers)


def is_reduced(question: Question) -> bool:
    """Whether key ranges are reduced over a tile's rows."""
    return any(bound.reduce for segment in question.schedule.segments for bound in segment.bounds)


def _forced(shape: Shape, question: Question) -> Shape:
    options = question.options
    if options.BLOCK_M == WARPGROUP_ROWS:
        shape = SHORT_ROWS[_size_class(question)]
    elif options.BLOCK_M is not None:
        shape = _with_consumers(_size_class(question), options.BLOCK_M // WARPGROUP_ROWS)
    stages = options.num_stages
    return dataclasses.replace(
        shape,
        block_n=options.BLOCK_N or shape.block_n,
        key_stages=stages or shape.key_stages,
        value_stages=stages or shape.value_stages,
    )


def _decide_tile(question: Question, answers: Answers) -> None:
    shape, because = _shape(question)
    options = question.options
    answers.add("template", shape.template, because, _other_template(shape))
    answers.add("BLOCK_M", shape.block_m, "asked for" if options.BLOCK_M else because)
    answers.add("BLOCK_N", shape.block_n, "asked for" if options.BLOCK_N else f"{MEASURED} for this head dim")
    answers.add("CONSUMERS", shape.consumers, f"{WARPGROUP_ROWS} rows of the tile for each warpgroup")
    answers.add("num_warps", PROGRAM_WARPS, "a warpgroup; the other partitions' warps are added to it")
    stages = "asked for" if options.num_stages else "more gained nothing, or do not fit"
    answers.add("num_stages", shape.key_stages, stages)
    answers.add("VALUE_STAGES", shape.value_stages, stages)
    launch, consumer, producer = shape.registers
    shared_out = "all registers of the multiprocessor, shared out over the partitions"
    answers.add("maxnreg", launch, shared_out)
    answers.add("CONSUMER_REGISTERS", consumer, shared_out)
    answers.add("PRODUCER_REGISTERS", producer, "it only starts copies" if producer else "there is no producer")
    needed = shared_bytes(shape, *_rounded(question), question.problem.query_dtype.itemsize)
    answers.add("shared_bytes", needed, "computed from the tile, an upper bound")


def _other_template(shape: Shape) -> tuple[Rejected, ...]:
    if shape.template is Template.WARP_SPECIALISED:
        return (Rejected(Template.ONE_WARPGROUP, "on long rows it leaves the matrix units idle during each softmax"),)
    why = "on short rows each tile's start and end would be waited for by the whole multiprocessor"
    return (Rejected(Template.WARP_SPECIALISED, why),)


def _decide_head_dims(question: Question, answers: Answers) -> None:
    decide_head_dims(question, answers)
    for name, size in zip(("QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM_ROUNDED"), _rounded(question), strict=True):
        if answers[name] != size:  # plain Triton's tiles start at 16
            answers.decisions[:] = [d for d in answers.decisions if d.name != name]
            answers.add(name, size, f"at least {HEAD_DIMS[0]}")


def _decide_persistence(question: Question, answers: Answers) -> None:
    keys = keys_visited(question.schedule) if question.problem.table is None else None
    if answers["template"] is Template.ONE_WARPGROUP:
        answers.add("PERSISTENT", False, "several programs share a multiprocessor")
    elif keys is not None:
        answers.add("PERSISTENT", True, "short rows: the next tile's loads start under this one's end")
    else:
        answers.add("PERSISTENT", False, "long rows: the scheduler balances programs, and a walk gains nothing")


def _decide_tail(question: Question, answers: Answers) -> None:
    tail = not question.guard.kv_divisible
    answers.add(
        "KV_TAIL",
        tail,
        "KV_LEN is not a multiple of 128" if tail else "KV_LEN is a multiple of 128, which BLOCK_N divides",
    )


_ORDER: tuple[Callable[[Question, Answers], None], ...] = (
    _decide_head_dims,
    decide_table,
    _decide_tile,
    _decide_persistence,
    _decide_tail,
    decide_scale,
    decide_rows_safe,
    decide_arithmetic,
    decide_order,
    decide_outputs,
)


def _score(question: Question) -> ScoreFold | None:
    score = question.mods.score
    return fold_score(score, constant_scale=question.problem.scale is not None) if score is not None else None


def live_interval(question: Question) -> Interval | None:
    """Return a row's live keys where they are exactly one interval and the schedule follows from them."""
    way = question.facts.kv
    exact = len(way.rows.segments) == 1 and way.rows.is_exact
    followed = question.schedule.walk is Walk.RANGES and question.schedule.segments == way.segments
    return way.rows.segments[0].outer if exact and followed else None


def decision(plan: GluonPlan | GluonBackwardPlan, name: str) -> Decision:
    return next(found for found in plan.decisions if found.name == name)

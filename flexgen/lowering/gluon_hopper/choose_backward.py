"""Decides the Gluon backward plans for Hopper, or says why there are none: one small function a decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flexgen.ir.graph import Axis
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan, Sums
from flexgen.lowering.gluon_hopper.plan import PROGRAM_WARPS, WARPGROUP_ROWS
from flexgen.lowering.intervals import Interval
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton import choose
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardTask
from flexgen.lowering.triton.backward_tiles import TILE_OPTIONS
from flexgen.lowering.triton.choose import Answers, Question
from flexgen.problem import TableForm

HEAD_DIMS = (33, 256)
LEAST_ROUNDED = 64
T = TypeVar("T")
SWIZZLED_BYTES = 16  # the copy engine moves rows in units of this
CONSUMERS = 2
OWN_ROWS = CONSUMERS * WARPGROUP_ROWS
WALKED_SIZES = (32, 64, 128)
REGISTERS = (168, 240, 24)  # of a thread at launch, of a consumer's, and of the producer's: 384 threads share 64 Ki
MEASURED = "measured on H200"
BARRIER_BYTES = 1024  # barriers and alignment of the tiles: an upper bound


@dataclass(frozen=True, slots=True)
class Shape:
    """How a kernel uses registers and shared memory.

    Attributes:
        walked: queries (dK, dV) or keys (dQ) of a tile.
        stages: tiles in shared memory, of the two tensors that are walked.
        pipelined: see GluonBackwardPlan.PIPELINED.
    """

    walked: int
    stages: tuple[int, int]
    pipelined: bool


# By rounded head dim: the first choice, then what BLOCK_M1 (queries of dK, dV) or BLOCK_N2 (keys of dQ) may choose
# instead. The sums, a tile of scores and one of their gradients share a thread's 240 registers, where pipelined with
# both of the tile before in half precision. Large tiles won on H200, also where they leave no room for that.
SHAPES: dict[Sums, dict[int, tuple[Shape, ...]]] = {
    Sums.QUERY: {
        64: (Shape(128, (2, 2), True), Shape(64, (2, 2), True)),
        128: (Shape(128, (2, 2), False), Shape(64, (2, 2), True)),
        256: (Shape(64, (2, 1), True), Shape(32, (2, 2), True)),
    },
    Sums.KEY_AND_VALUE: {
        64: (Shape(128, (2, 2), False), Shape(64, (2, 2), True)),
        128: (Shape(64, (2, 2), False), Shape(32, (2, 2), True)),
    },
    Sums.KEY: {
        64: (Shape(64, (2, 2), True),),
        128: (Shape(64, (2, 2), True),),
        256: (Shape(64, (2, 1), True), Shape(32, (2, 2), True)),
    },
    Sums.VALUE: {
        64: (Shape(64, (2, 2), True),),
        128: (Shape(64, (2, 2), True),),
        256: (Shape(64, (2, 2), True), Shape(32, (2, 2), True)),
    },
}

# The first choice where mods are evaluated for each pair, which takes registers of its own.
BUSY_SHAPES: dict[tuple[Sums, int], Shape] = {
    (Sums.QUERY, 64): Shape(64, (2, 2), True),
    (Sums.KEY_AND_VALUE, 64): Shape(64, (2, 2), True),
}


@dataclass(frozen=True, slots=True)
class Win:
    """What these kernels gain over plain Triton, and on which rows.

    Attributes:
        gain: how many times as fast, as text.
        least_keys: a query visits at least so many keys; None: only rows that the mask does not bound.
        listed: the gain where the blocks that a derived table lists are visited; None: not measured to win.
    """

    gain: str
    least_keys: int | None
    listed: str | None = None


# Where these kernels are the default, by rounded head dim; elsewhere they are used where they are asked for. H200,
# bf16, S = 8192, against plain Triton in interleaved rounds (benchmarks.gluon_check --backward, benchmarks.backward).
# A caller's block mask and ranges that are reduced over rows are right too, but were not measured to win.
VERIFIED_TO_WIN: dict[int, Win] = {
    128: Win("1.1 to 1.6", None),
    256: Win("1.4 to 2.0", 256, listed="1.4"),
}


def refusal(question: Question, task: BackwardTask) -> str | None:
    """Return why these kernels cannot serve a task; None if they can."""
    if task.scatter:
        return f"it adds to the gradient of {task.scatter[0].buffer}, which these kernels do not"
    return next((reason for check in _CHECKS if (reason := check(question, task)) is not None), None)


def verified_to_win(question: Question, task: BackwardTask) -> str | None:
    """Return the measurement for which these kernels are the default for a task; None where there is none."""
    win = VERIFIED_TO_WIN.get(_size_class(question))
    if win is None:
        return None
    if question.schedule.walk is Walk.DERIVED and win.listed is not None:
        return _told(win.listed, question, "blocks that a derived table lists")
    if question.schedule.walk is not Walk.RANGES:
        return None
    keys = question.facts.kv.segments
    if any(bound.reduce for segment in keys for bound in segment.bounds):
        return None
    visited = choose.keys_visited(dataclasses.replace(question.schedule, segments=keys))
    if visited is not None and (win.least_keys is None or visited < win.least_keys):
        return None
    return _told(win.gain, question, "most keys" if visited is None else f"about {visited} keys")


def _told(gain: str, question: Question, visited: str) -> str:
    faster = f"{gain} times as fast as plain Triton at head dim {_size_class(question)}"
    return f"{faster}, where a row visits {visited} ({MEASURED})"


def parts_of(question: Question, task: BackwardTask) -> tuple[BackwardTask, ...]:
    """Return the kernels that a task takes: where registers do not hold the sums of keys and of values, one each."""
    if Sums.of(task.writes) is Sums.KEY_AND_VALUE and _size_class(question) not in SHAPES[Sums.KEY_AND_VALUE]:
        return tuple(dataclasses.replace(task, writes=frozenset({name})) for name in ("value", "key"))
    return (task,)


def choose_gluon_backward(question: Question, task: BackwardTask, because: str, spelling: str) -> GluonBackwardPlan:
    """Decide every template variable of one kernel; `refusal` has returned None.

    Args:
        question: with the backward options, and the schedule of the kernel's own direction.
        task: one of `parts_of`.
        because: why this backend.
        spelling: which of Gluon's spellings to write the kernel in.
    """
    answers = Answers()
    answers.add("BACKEND", "GLUON", because)
    _decide_sums(question, task, answers)
    _decide_head_dims(question, answers)
    _decide_tile(question, task, answers)
    choose.decide_table(_with_own_table(question, answers), answers)
    _decide_tail(question, task, answers)
    _decide_scale(question, answers)
    choose.decide_arithmetic(question, answers)
    choose.decide_order(question, answers)
    names = {field.name for field in dataclasses.fields(GluonBackwardPlan)}
    values: dict[str, Any] = {decision.name: decision.value for decision in answers.decisions if decision.name in names}
    return GluonBackwardPlan(
        kernel=task.kernel,
        target=question.target,
        spelling=spelling,
        live=_live_interval(question, task),
        schedule=question.schedule,
        query_dtype=question.problem.query_dtype,
        wide=question.guard.wide,
        decisions=tuple(answers.decisions),
        **values,
    )


# What the kernels cannot do.


def _wrong_chip(question: Question, task: BackwardTask) -> str | None:
    name = question.target.name
    return None if name == "sm_90" else f"{name} has no warpgroup matrix instructions"


def _dtype(question: Question, task: BackwardTask) -> str | None:
    dtype = question.problem.query_dtype
    half = dtype in (torch.float16, torch.bfloat16)
    return None if half else f"the warpgroup instructions multiply half precision, not {dtype}"


def _head_dim(question: Question, task: BackwardTask) -> str | None:
    low, high = HEAD_DIMS
    sizes = (question.problem.qk_head_dim, question.problem.v_head_dim)
    if not low <= max(sizes) <= high:
        return f"head dim {max(sizes)} is outside of {low} to {high}"
    odd = [size for size in sizes if size * question.problem.query_dtype.itemsize % SWIZZLED_BYTES]
    return f"head dim {odd[0]} is not a multiple of {SWIZZLED_BYTES} bytes, the copy engine's unit" if odd else None


def _strides(question: Question, task: BackwardTask) -> str | None:
    names = ("query", "key", "value", "grad_output")
    strided = [name for name in names if name not in question.problem.unit_stride]
    if strided:
        return f"the last dimension of {strided[0]} is strided, and the copy engine copies rows"
    misaligned = [name for name in names if name not in question.guard.aligned]
    if misaligned:
        return f"{misaligned[0]} does not start on 16 bytes, or a stride of it is not a multiple of 16 bytes"
    return None


def _lengths(question: Question, task: BackwardTask) -> str | None:
    guard = question.guard
    for bucket, plural in ((guard.q_bucket, "queries"), (guard.kv_bucket, "keys")):
        if 0 < bucket < WARPGROUP_ROWS:
            return f"at most {bucket} {plural} do not fill a warpgroup's {WARPGROUP_ROWS} rows"
    return "index arithmetic needs 64 bits" if guard.wide_index else None


def _walk(question: Question, task: BackwardTask) -> str | None:
    schedule = question.schedule
    nothing = schedule.walk is Walk.RANGES and not schedule.segments
    return "no pair is ever live" if nothing else None


def _packing(question: Question, task: BackwardTask) -> str | None:
    packed = question.problem.cu_seqlens is not None
    return "packed sequences (cu_seqlens) begin where no tile of the copy engine does" if packed else None


def _dropout(question: Question, task: BackwardTask) -> str | None:
    return "dropout is computed by plain Triton alone" if question.problem.dropout else None


def _options(question: Question, task: BackwardTask) -> str | None:
    options = question.options
    selecting = ("FORCE_USE_FLEX_ATTENTION", "kpack", "matrix_instr_nonkdim", "waves_per_eu")
    chosen = [name for name in selecting if getattr(options, name) not in (None, False)]
    if chosen:
        return f"{chosen[0]} selects plain Triton"
    if options.num_warps not in (None, PROGRAM_WARPS):
        return f"num_warps={options.num_warps} was asked for, and a warpgroup has {PROGRAM_WARPS} warps"
    reasons = (_tile_reason(question, part) for part in parts_of(question, task))
    return next((reason for reason in reasons if reason is not None), None)


def _tile_reason(question: Question, task: BackwardTask) -> str | None:
    asked = _asked_tile(question, task)
    shape = _shape(question, task)
    if asked["own"] not in (None, OWN_ROWS) or shape.walked not in WALKED_SIZES:
        sizes = " x ".join(str(asked[side] or usual) for side, usual in (("own", OWN_ROWS), ("walked", shape.walked)))
        return f"tiles of {sizes} (own side x walked side) are none of these kernels'"
    if shape.pipelined and question.options.num_stages == 1:
        return "one stage was asked for, and the pipeline holds two"
    table = question.problem.table
    if table is not None and not table.derived:
        own, walked = _sides(task, table.q_block_size, table.kv_block_size)
        if own % OWN_ROWS or walked % shape.walked:
            return (
                f"the block mask's blocks are not whole tiles of {OWN_ROWS} x {shape.walked} (own side x walked side)"
            )
    needed = shared_bytes(shape, task, *_rounded(question), question.problem.query_dtype.itemsize)
    if needed > question.target.shared_bytes:
        limit = question.target.shared_bytes
        return f"the tile needs {needed} bytes of shared memory, {question.target.name} has {limit}"
    return None


_CHECKS: tuple[Callable[[Question, BackwardTask], str | None], ...] = (
    _wrong_chip,
    _dtype,
    _head_dim,
    _strides,
    _lengths,
    _walk,
    _packing,
    _dropout,
    _options,
)


# The tile.


def _rounded(question: Question) -> tuple[int, int]:
    """Return both head dims as the tiles have them: powers of two."""
    problem = question.problem
    qk, v = (max(LEAST_ROUNDED, 1 << (size - 1).bit_length()) for size in (problem.qk_head_dim, problem.v_head_dim))
    return qk, v


def _size_class(question: Question) -> int:
    return max(_rounded(question))


def _sides(task: BackwardTask, q_side: T, kv_side: T) -> tuple[T, T]:
    """Return the own side's and the walked side's."""
    return (q_side, kv_side) if task.kernel is BackwardKernel.DQ else (kv_side, q_side)


def _asked_tile(question: Question, task: BackwardTask) -> dict[str, int | None]:
    """Return the tile that the options ask for, by side."""
    named = {block: getattr(question.options, option) for option, block in TILE_OPTIONS[task.kernel].items()}
    own, walked = _sides(task, named["BLOCK_M"], named["BLOCK_N"])
    return {"own": own, "walked": walked}


def _shape(question: Question, task: BackwardTask) -> Shape:
    sums, head_dim = Sums.of(task.writes), _size_class(question)
    shapes = SHAPES[sums][head_dim]
    if (sums, head_dim) in BUSY_SHAPES and _evaluates(question, task):
        shapes = (BUSY_SHAPES[sums, head_dim], *shapes)
    asked, stages = _asked_tile(question, task)["walked"], question.options.num_stages
    shape = next((shape for shape in shapes if shape.walked == asked), shapes[0])
    walked = asked or shape.walked
    table = question.problem.table
    if asked is None and table is not None and not table.derived:
        _, sparse = _sides(task, table.q_block_size, table.kv_block_size)
        walked = choose.dividing(shape.walked, sparse)
    return Shape(walked, (stages, stages) if stages else shape.stages, shape.pipelined)


def shared_bytes(shape: Shape, task: BackwardTask, qk_dim: int, v_dim: int, itemsize: int) -> int:
    """Return an upper bound on the shared memory of a program: own tiles, rings, row statistics, barriers."""
    own = OWN_ROWS * (qk_dim + (v_dim if Sums.of(task.writes) is not Sums.VALUE else 0))
    rings = shape.walked * (shape.stages[0] * qk_dim + shape.stages[1] * v_dim)
    statistics = 0 if task.kernel is BackwardKernel.DQ else 4 * shape.walked * (2 * shape.stages[0] + shape.stages[1])
    return (own + rings) * itemsize + statistics + BARRIER_BYTES


# Decisions.


def _decide_sums(question: Question, task: BackwardTask, answers: Answers) -> None:
    split = "key and value have one kernel each: registers do not hold both sums"
    for name in ("query", "key", "value"):
        writes = name in task.writes
        answers.add(f"WRITE_GRAD_{name.upper()}", writes, "wanted" if writes else "not wanted, or another kernel's")
    is_split = task.kernel is BackwardKernel.DKDV and _size_class(question) not in SHAPES[Sums.KEY_AND_VALUE]
    answers.add("sums", Sums.of(task.writes), split if is_split else "what is wanted of this side")


def _decide_head_dims(question: Question, answers: Answers) -> None:
    choose.decide_head_dims(question, answers)
    for name, size in zip(("QK_HEAD_DIM_ROUNDED", "V_HEAD_DIM_ROUNDED"), _rounded(question), strict=True):
        if answers[name] != size:
            answers.decisions[:] = [d for d in answers.decisions if d.name != name]
            answers.add(name, size, f"at least {LEAST_ROUNDED}")


def _decide_tile(question: Question, task: BackwardTask, answers: Answers) -> None:
    shape, asked = _shape(question, task), _asked_tile(question, task)
    names = _sides(task, "BLOCK_M", "BLOCK_N")
    answers.add(names[0], OWN_ROWS, f"{CONSUMERS} consumer warpgroups of {WARPGROUP_ROWS} rows")
    because = f"{MEASURED} for this head dim, or what does not spill where mods are evaluated"
    because = "asked for" if asked["walked"] else because
    answers.add(names[1], shape.walked, because)
    answers.add("CONSUMERS", CONSUMERS, "what shared memory and registers hold")
    answers.add("num_warps", PROGRAM_WARPS, "a warpgroup; the other partitions' warps are added to it")
    stages = "asked for" if question.options.num_stages else "what shared memory holds, two at most"
    answers.add("num_stages", shape.stages[0], stages)
    answers.add("PARTNER_STAGES", shape.stages[1], stages)
    serial = "registers do not hold a second tile: each step's products end with it"
    answers.add("PIPELINED", shape.pipelined, "a step's sums run under the next step's" if shape.pipelined else serial)
    answers.add("FRESH_ADDRESSES", *_fresh_addresses(question, task))
    launch, consumer, producer = REGISTERS
    shared_out = "all registers of the multiprocessor, shared out over the partitions"
    answers.add("maxnreg", launch, shared_out)
    answers.add("CONSUMER_REGISTERS", consumer, shared_out)
    answers.add("PRODUCER_REGISTERS", producer, "it only starts copies")
    needed = shared_bytes(shape, task, *_rounded(question), question.problem.query_dtype.itemsize)
    answers.add("shared_bytes", needed, "computed from the tile, an upper bound")


def _fresh_addresses(question: Question, task: BackwardTask) -> tuple[bool, str]:
    """Whether addresses of tiles are computed at each step: the compiler would keep them, and spill what it keeps."""
    head_dim, sums = _size_class(question), Sums.of(task.writes)
    if head_dim == 256:
        return True, "at this head dim descriptors of the own tiles would spill"
    if head_dim == 128 and sums in (Sums.KEY_AND_VALUE, Sums.QUERY) and _evaluates(question, task):
        return True, "sums and what mods compute leave no registers for descriptors"
    return False, "descriptors fit in registers"


def _evaluates(question: Question, task: BackwardTask) -> bool:
    """Whether mods are evaluated for each pair; a mask that is an interval of each row takes next to nothing."""
    mods = question.mods
    return mods.score is not None or (mods.mask is not None and _live_interval(question, task) is None)


def _with_own_table(question: Question, answers: Answers) -> Question:
    """Return the question with the table that the kernel reads: a derived one is made of the kernel's own tiles."""
    if question.schedule.walk is not Walk.DERIVED:
        return question
    form = TableForm(answers["BLOCK_M"], answers["BLOCK_N"], True, derived=True)
    return dataclasses.replace(question, problem=dataclasses.replace(question.problem, table=form))


def _decide_tail(question: Question, task: BackwardTask, answers: Answers) -> None:
    length, divisible = ("KV_LEN", question.guard.kv_divisible)
    if task.kernel is BackwardKernel.DKDV:
        length, divisible = ("Q_LEN", question.guard.q_divisible)
    because = f"{length} is a multiple of 128, which the tile divides" if divisible else "it is not a multiple of 128"
    answers.add("WALKED_TAIL", not divisible, because if divisible else f"{length}: {because}")


def _decide_scale(question: Question, answers: Answers) -> None:
    scale = question.problem.scale
    answers.add("SM_SCALE", scale, "a constant" if scale is not None else "varies between calls: a run-time argument")
    extreme = choose.extreme_reason(question)
    fold = choose.fold(question, prescale=False)
    answers.add("FOLD_SCALE", *(fold if extreme is None else (False, "scores are scaled before the subtraction")))
    answers.add("SUBTRACT_FIRST", extreme is not None, extreme or "scores of moderate size")


def _live_interval(question: Question, task: BackwardTask) -> Interval | None:
    """Return what an own row sees where it is exactly one interval and the schedule follows from it."""
    way = question.facts.kv if task.kernel is BackwardKernel.DQ else question.facts.q
    exact = len(way.rows.segments) == 1 and way.rows.is_exact
    followed = question.schedule.walk is Walk.RANGES and question.schedule.segments == way.segments
    return way.rows.segments[0].outer if exact and followed else None


def walked_axis(plan: GluonBackwardPlan) -> Axis:
    return Axis.KV if plan.kernel is BackwardKernel.DQ else Axis.Q

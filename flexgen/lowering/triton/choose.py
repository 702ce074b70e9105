"""Decides a plain Triton forward plan: one small function a decision, in a fixed order."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.errors import InternalError, NoFeasiblePlanError, OptionError, UnsupportedProblemError
from flexgen.ir.graph import Axis, Graph, Mods, Node, topological
from flexgen.lowering.decision import Decision, Rejected
from flexgen.lowering.dropout import GROUP_SPAN, Draws
from flexgen.lowering.facts import MaskFacts
from flexgen.lowering.host_value import host_value
from flexgen.lowering.index_map import IndexMap, packs_heads
from flexgen.lowering.rounding import is_power_of_two, largest_power_of_two_divisor, round_up_to_power_of_two
from flexgen.lowering.row_groups import rows_of_one_range
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton.tiles import ForwardPhysics, Physics, Tile, TileShape, captured_loads, preferred
from flexgen.options import KernelOptions
from flexgen.problem import DIVISOR, Guard, Problem

MAX_HEAD_DIM = 512
NOMINAL_LENGTH = 8192  # the sequence that mask ranges are measured on
LARGEST_SAFE = 1e37  # constants up to this do not make a finite score infinite
LEAST_PAGE = 32  # keys: a smaller page is gathered from, by tiles of several
SEARCH_WIDTH = 128  # a warpgroup's threads: one load and one sum find the sequence among so many
LARGE_FACTOR = 1000  # an index times this may be extreme
EXTREME = 2e4  # scores of this magnitude are off by 0.002 when multiplied by log2(e): half a digit of bfloat16


@dataclass(frozen=True, slots=True)
class Question:
    """Everything a decision may look at."""

    problem: Problem
    guard: Guard
    target: Target
    options: KernelOptions
    mods: Mods
    facts: MaskFacts
    schedule: Schedule
    passed_over: tuple[Rejected, ...] = ()  # backends that do not serve this call, and why


class Answers:
    """The decisions made so far, by name and in order."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []

    def add(self, name: str, value: Any, because: str, rejected: tuple[Rejected, ...] = ()) -> Any:
        self.decisions.append(Decision(name, value, because, rejected))
        return value

    def __getitem__(self, name: str) -> Any:
        return next(decision.value for decision in self.decisions if decision.name == name)


def choose_forward(question: Question) -> ForwardPlan:
    """Decide every template variable of the forward kernel.

    Raises:
        OptionError: an option cannot be honoured for this problem and target.
        NoFeasiblePlanError: no tile, or not the forced one, fits the target.
        UnsupportedProblemError: the target does not compute this dtype or head dim.
    """
    answers = Answers()
    for decide in _ORDER:
        decide(question, answers)
    return ForwardPlan(**plan_fields(question, answers, ForwardPlan))


def plan_fields(question: Question, answers: Answers, plan: type) -> dict[str, Any]:
    """Return what a plan's fields are called and are: what was decided, and what the kernel's question says."""
    problem, guard = question.problem, question.guard
    names = {field.name for field in dataclasses.fields(plan)}
    known = {decision.name: decision.value for decision in answers.decisions} | {
        "target": question.target,
        "schedule": question.schedule,
        "query_dtype": problem.query_dtype,
        "key_dtype": problem.key_dtype,
        "value_dtype": problem.value_dtype,
        "accumulator_dtype": problem.accumulator_dtype,
        "unit_stride": problem.unit_stride,
        "wide": guard.wide,
        "wide_index": guard.wide_index,
        "lengths_dtype": problem.lengths_dtype,
        "K_SCALE": problem.k_scale,
        "V_SCALE": problem.v_scale,
        "decoded": decoded_tensors(problem, question.target),
        "decisions": tuple(answers.decisions),
    }
    return {name: value for name, value in known.items() if name in names}


def decoded_tensors(problem: Problem, target: Target) -> frozenset[str]:
    """Return the tensors whose elements a kernel decodes from bytes; see ForwardPlan."""
    stored = {"key": problem.key_dtype, "value": problem.value_dtype}
    e4m3 = frozenset(name for name, dtype in stored.items() if dtype == torch.float8_e4m3fn)
    return frozenset() if target.has_e4m3 else e4m3


_NOT_BUILT = {
    "TRITON_DECODE": "only forward kernels split the keys of a few queries over programs",
}


def decide_backend(question: Question, answers: Answers) -> None:
    asked = question.options.BACKEND
    if asked in _NOT_BUILT:
        raise OptionError(
            f"BACKEND={asked!r} is not available for this kernel",
            why=_NOT_BUILT[asked],
            fix="leave BACKEND at 'AUTO' or use 'TRITON'; fwd_BACKEND and bwd_BACKEND choose apart",
        )
    selecting = [n for n in ("FORCE_USE_FLEX_ATTENTION", "USE_SUBTILING", "USE_TMA") if getattr(question.options, n)]
    because = "asked for" if asked == "TRITON" else "it serves every call"
    because = f"selected by {', '.join(selecting)}" if selecting else because
    answers.add("BACKEND", "TRITON", because, question.passed_over)
    refuse_float64(question)


def refuse_float64(question: Question) -> None:
    """Refuse float64 on a GPU."""
    if question.problem.query_dtype == torch.float64 and question.target.backend != "interpret":
        raise UnsupportedProblemError(
            f"float64 attention is not compiled for {question.target.name}",
            why="GPUs run it at a small fraction of their float32 rate, and no kernel of flexgen is tuned for it",
            fix="convert query, key and value to float32, or run on CPU, where the interpreter computes float64",
        )


def decide_head_dims(question: Question, answers: Answers) -> None:
    problem = question.problem
    for name, size in (("QK_HEAD_DIM", problem.qk_head_dim), ("V_HEAD_DIM", problem.v_head_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise UnsupportedProblemError(
                f"{name}={size} is out of range",
                why=f"a row of a tile must fit the chip; flexgen supports head dims from 1 to {MAX_HEAD_DIM}",
                fix="split the head, or use fewer dimensions",
            )
        answers.add(name, size, "the tensors' last dimension")
        answers.add(f"{name}_ROUNDED", round_up_to_power_of_two(size), "the next power of two, at least 16 for tl.dot")
    exact = (
        answers["QK_HEAD_DIM"] == answers["QK_HEAD_DIM_ROUNDED"]
        and answers["V_HEAD_DIM"] == answers["V_HEAD_DIM_ROUNDED"]
    )
    answers.add("SAFE_HEAD_DIM", exact, "no padding to mask" if exact else "rounded head dims need masked loads")
    answers.add("GQA_SHARED_HEADS", problem.group, "query heads divided by key/value heads")


def decide_table(question: Question, answers: Answers) -> None:
    table = question.problem.table
    because = "no block mask was given"
    if table:
        because = "derived from the mask" if table.derived else "from the block mask"
    answers.add("SPARSE_Q_BLOCK_SIZE", table.q_block_size if table else 0, because)
    answers.add("SPARSE_KV_BLOCK_SIZE", table.kv_block_size if table else 0, because)
    answers.add("HAS_FULL_BLOCKS", table.has_full_blocks if table else False, because)
    asked = question.options.BLOCKS_ARE_CONTIGUOUS
    if asked and table is None:
        because = "no block list is read: key ranges are computed, and contiguous by construction"
    elif asked:
        because = "asked for; the block mask's lists are checked once"
    else:
        because = "block lists may have gaps" if table else "no block list is read"
    answers.add("BLOCKS_ARE_CONTIGUOUS", bool(asked and table), because)


def decide_packing(question: Question, answers: Answers) -> None:
    problem, group, bucket = question.problem, question.problem.group, question.guard.q_bucket
    heads = 1
    if packs_heads(problem, question.guard):
        heads, because = group, f"at most {bucket} queries: the {group} heads of a group share a tile and its keys"
    elif group == 1:
        because = "one query head a key head"
    elif problem.cu_seqlens is not None:
        because = "a tile holds queries of one sequence, of lengths that the device alone knows"
    else:
        because = "a block table may differ between heads" if problem.table is not None else "one head fills a tile"
    answers.add("index_map", IndexMap(heads, problem.has_offsets, problem.page_size, problem.cu_seqlens), because)
    decide_sequences(question, answers)


def decide_sequences(question: Question, answers: Answers) -> None:
    """Decide how a tile finds its sequence, where sequences are packed along the length."""
    packed = question.problem.cu_seqlens is not None
    found = f"a tile searches its sequence: one load for up to {SEARCH_WIDTH}, less than a map's own launch costs"
    answers.add("PACKED_SEQUENCES", packed, "cu_seqlens were given" if packed else "no cu_seqlens were given")
    balanced = "sequences differ in length: simulated, within 2 % of the best order; head after head, up to 8 %"
    order = ("heads of a tile together", balanced) if packed else ("head after head", "tiles of a head share its keys")
    answers.add("program_order", *order)
    answers.add("SEARCH_WIDTH", SEARCH_WIDTH if packed else 0, found if packed else "each batch entry is one sequence")


def _tile(question: Question, answers: Answers) -> None:
    problem = question.problem
    shape = TileShape(
        answers["QK_HEAD_DIM_ROUNDED"],
        answers["V_HEAD_DIM_ROUNDED"],
        problem.query_dtype.itemsize,
        problem.key_dtype.itemsize,
        problem.value_dtype.itemsize,
        captured_loads(question.mods),
        bulk_copies=bool(question.options.USE_TMA),
        splits_operands=question.options.FLOAT32_PRECISION == "tf32x3",
        looks_up_pages=problem.page_size > 0,
        drops=problem.dropout,
    )
    head_dim, masked = max(shape.qk_rounded, shape.v_rounded), question.mods.mask is not None
    first, origin = preferred(problem.query_dtype, head_dim, question.target, masked=masked)
    group = rows_of_one_range(question.schedule)
    if group is not None and group % first.BLOCK_M and question.target.backend != "interpret":
        first = dataclasses.replace(first, BLOCK_M=dividing(first.BLOCK_M, group))
        origin = f"{group} rows have one range of keys, and a larger tile would visit what lies between several"
    if problem.converts_keys and head_dim > 128 and question.target.backend != "interpret":
        first, origin = dataclasses.replace(first, BLOCK_N=first.BLOCK_N // 2), f"{origin}; converting takes registers"
    first, origin = fit_pages(_fit_lengths(first, question, answers), origin, question)
    settle_tile(question, answers, first, origin, shape, ForwardPhysics())


def fit_pages(tile: Tile, origin: str, question: Question) -> tuple[Tile, str]:
    """Return a first choice, and where it comes from, for keys that lie in pages.

    A tile lies inside one page where that costs little; else each key finds its own page. Triton's pipeline fetches
    pages as many steps ahead as keys, so that it takes twice the stages to have as many keys in flight.
    """
    page_size = question.problem.page_size
    if not page_size:
        return tile, origin
    inside = largest_power_of_two_divisor(page_size)
    block_n = inside if LEAST_PAGE <= inside < tile.BLOCK_N else tile.BLOCK_N
    stages = 2 * tile.num_stages - 1 if question.target.backend == "cuda" else tile.num_stages
    tile = dataclasses.replace(tile, BLOCK_N=block_n, num_stages=stages)
    return tile, f"{origin}; pages are looked up a step before keys are fetched"


def settle_tile(
    question: Question, answers: Answers, first: Tile, origin: str, shape: TileShape, physics: Physics
) -> None:
    """Decide tile, warps and stages: what the user forces, else the first of ever smaller ones that fits.

    Raises:
        NoFeasiblePlanError, OptionError: the forced ones do not fit the target or the block table.
    """
    options = question.options
    origin += "; not measured with dropout" if question.problem.dropout else ""
    forced = {name: getattr(options, name) for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")}
    forced = {name: value for name, value in forced.items() if value is not None}
    tile, rejected = _first_feasible(dataclasses.replace(first, **forced), forced, shape, question.target, physics)
    if not (is_power_of_two(tile.BLOCK_M) and is_power_of_two(tile.BLOCK_N)):
        raise InternalError(f"a tile of {tile.BLOCK_M} x {tile.BLOCK_N} was chosen: Triton's tiles are powers of two")
    for name in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"):
        because = "asked for" if name in forced else f"fits; {origin}"
        answers.add(name, getattr(tile, name), because, rejected if name == "BLOCK_M" else ())
    needed = physics.shared_bytes(tile, shape, question.target)
    answers.add("shared_bytes", needed, "computed from the tile, an upper bound")
    _check_table_tiles(question, tile, {physics.option_names.get(name, name): name for name in forced})


def keys_visited(schedule: Schedule) -> int | None:
    """Return how many keys a tile of queries visits in the middle of a long sequence; None where unbounded there."""
    middle = NOMINAL_LENGTH // 2
    total = _keys_at(schedule, middle)
    return total if total is not None and total < middle else None


def _fit_lengths(tile: Tile, question: Question, answers: Answers) -> Tile:
    """Shrink a first choice to lengths that do not fill it, and to the block table's blocks."""
    guard, table = question.guard, question.problem.table
    rows = guard.q_bucket * answers["index_map"].packed_heads if guard.q_bucket else tile.BLOCK_M
    block_m = min(tile.BLOCK_M, round_up_to_power_of_two(max(rows, 1)))
    block_n = min(tile.BLOCK_N, round_up_to_power_of_two(guard.kv_bucket or tile.BLOCK_N))
    if table is not None:
        block_m = dividing(block_m, table.q_block_size)
        block_n = dividing(block_n, table.kv_block_size)
    warps = min(tile.num_warps, max(1, block_m // 16)) if question.target.backend != "interpret" else tile.num_warps
    return Tile(block_m, block_n, max(warps, min(4, tile.num_warps)), tile.num_stages)


def dividing(block: int, sparse: int) -> int:
    """Return a block that divides the sparse block; where none of at least 16 does, one that wastes little."""
    divisor = largest_power_of_two_divisor(sparse)
    return min(block, divisor) if divisor >= 16 else min(block, round_up_to_power_of_two(sparse))


def _first_feasible(
    first: Tile, forced: dict[str, int], shape: TileShape, target: Target, physics: Physics
) -> tuple[Tile, tuple[Rejected, ...]]:
    allowed = [t for t in physics.smaller(first) if all(getattr(t, name) == value for name, value in forced.items())]
    rejected: list[Rejected] = []
    for tile in allowed:
        reason = physics.infeasible(tile, shape, target)
        if reason is None:
            return tile, tuple(rejected[:4])
        rejected.append(Rejected(_tile_text(tile), reason))
    if forced:  # what a user forces may spill registers, but must launch
        launches = next((t for t in allowed if physics.shared_bytes(t, shape, target) <= target.shared_bytes), None)
        if launches is not None:
            return launches, tuple(rejected[:4])
    last = rejected[-1] if rejected else Rejected(_tile_text(first), "no smaller tile exists")
    asked = ", ".join(f"{physics.option_names.get(name, name)}={value}" for name, value in forced.items())
    raise NoFeasiblePlanError(
        f"no tile fits {target.name}" + (f" with {asked}" if forced else ""),
        why=f"the smallest one considered, {last.value}, {last.because}",
        fix=f"drop or lower one of {asked}" if forced else "use smaller head dims or a half-precision dtype",
    )


def _tile_text(tile: Tile) -> str:
    return f"BLOCK_M={tile.BLOCK_M} BLOCK_N={tile.BLOCK_N} num_warps={tile.num_warps} num_stages={tile.num_stages}"


def _check_table_tiles(question: Question, tile: Tile, forced: dict[str, str]) -> None:
    """Check what the user forced: the field of the tile by the name of the option."""
    table = question.problem.table
    if table is None:
        return
    sizes = {"BLOCK_M": table.q_block_size, "BLOCK_N": table.kv_block_size}
    for option, name in forced.items():
        sparse = sizes.get(name)
        if sparse and sparse % getattr(tile, name):
            raise OptionError(
                f"{option}={getattr(tile, name)} does not divide the block mask's block size {sparse}",
                why="a tile must lie inside one block of the mask",
                fix=f"choose a power of two that divides {sparse}, or create the block mask with another BLOCK_SIZE",
            )


def decide_divisible(question: Question, answers: Answers) -> None:
    guard = question.guard
    block_m, block_n = answers["BLOCK_M"], answers["BLOCK_N"]
    if answers["index_map"].packs:
        answers.add("IS_DIVISIBLE", False, "rows of packed heads are always masked")
        return
    if question.problem.lengths_dtype is not None:
        answers.add("IS_DIVISIBLE", False, "only the device knows how many keys a batch row has")
        return
    if question.problem.cu_seqlens is not None:
        answers.add("IS_DIVISIBLE", False, "packed sequences end anywhere")
        return
    table = question.problem.table
    blocks_fit = table is None or (
        table.q_block_size % block_m == table.kv_block_size % block_n == 0
        and DIVISOR % table.q_block_size == DIVISOR % table.kv_block_size == 0
    )
    lengths_fit = guard.q_divisible and guard.kv_divisible and DIVISOR % block_m == 0 and DIVISOR % block_n == 0
    if lengths_fit and blocks_fit:
        because = f"both lengths are multiples of {DIVISOR}, which the tile divides"
    else:
        because = f"a length is not a multiple of {DIVISOR}" if blocks_fit else "the mask's blocks are not whole tiles"
    answers.add("IS_DIVISIBLE", lengths_fit and blocks_fit, because)


def decide_scale(question: Question, answers: Answers) -> None:
    scale = question.problem.scale
    answers.add("SM_SCALE", scale, "a constant" if scale is not None else "varies between calls: a run-time argument")
    prescale = bool(question.options.PRESCALE_QK)
    answers.add(
        "PRESCALE_QK",
        prescale,
        "asked for: the query is scaled once, in its own dtype" if prescale else "scaling scores keeps full precision",
    )
    answers.add("FOLD_SCALE", *fold(question, prescale))
    extreme = extreme_reason(question)
    answers.add("SUBTRACT_FIRST", extreme is not None, extreme or "scores of moderate size")


def decide_stored(question: Question, answers: Answers) -> None:
    """Note how keys and values are stored, where that is not simply as the query."""
    problem = question.problem
    if problem.converts_keys:
        stored = f"{problem.key_dtype} and {problem.value_dtype}".replace("torch.", "")
        how = f"converted to {problem.query_dtype}".replace("torch.", "") + " after they are read"
        decoded = decoded_tensors(problem, question.target)
        how += f"; {question.target.name} cannot, so bits of float8_e4m3fn are moved into float16" if decoded else ""
        answers.add("stored", stored, how)
    if problem.page_size:
        inside = problem.page_size % answers["BLOCK_N"] == 0
        how = "a tile of keys lies in one page" if inside else "a tile of keys spans pages: each key looks up its own"
        answers.add("PAGE_SIZE", problem.page_size, how)
    if problem.k_scale:
        answers.add("K_SCALE", True, "k_scale is read for each key head, and multiplies the scores' scale")
    if problem.v_scale:
        how = {"head": "read for each key head", "number": "an argument"}[problem.v_scale]
        answers.add("V_SCALE", problem.v_scale, f"v_scale is {how}, and multiplies the output once")


def fold(question: Question, prescale: bool) -> tuple[bool, str]:
    scale = question.problem.scale
    if question.mods.score is not None:
        return False, "score_mod sees the scaled score"
    if prescale:
        return False, "the query is scaled already"
    if question.problem.k_scale:
        return False, "k_scale is read for each head"
    if scale is None or scale <= 0:
        return False, "only a scale known to be positive keeps the order of scores"
    return True, "identity score_mod: one multiplier for scale and log2(e) inside the exponential"


def extreme_reason(question: Question) -> str | None:
    """Say why a question's scores may be extreme; see `scores_may_be_extreme`."""
    return scores_may_be_extreme(question.mods.score, question.problem.query_dtype)


def scores_may_be_extreme(score: Graph | None, query_dtype: torch.dtype) -> str | None:
    """Say why scores may be so large in magnitude that multiplying before subtracting loses them.

    A fused multiply-add computes score * log2(e) exactly, but the row maximum's product is rounded, and so is the
    logsumexp that the backward subtracts: past about EXTREME weights are off by more than half precision is. Near the
    float32 minimum the product overflows.
    """
    if query_dtype in (torch.float32, torch.float64):
        return "full-precision inputs: differences stay exact in scores of any magnitude"
    for node in score.nodes() if score else ():
        if node.op == "const" and isinstance(node.attr, float) and EXTREME <= abs(node.attr) < float("inf"):
            return f"score_mod uses {node.attr:.3g}, whose rounding would pass what an exponential holds"
        if node.op == "load" and node.dtype.is_floating_point and Axis.KV in node.axes:
            return f"{node.attr} is read for each key and may hold values near the dtype's minimum"
        if node.dtype.is_floating_point and node.op in ("scalar", "exp", "exp2", "expm1", "pow"):
            return f"score_mod's {node.op} may be of any magnitude"
    return next(filter(None, map(_why_extreme, added_terms(score.root) if score else ())), None)


def added_terms(root: Node) -> list[Node]:
    """Return what sums, choices and conversions at the top of an expression are made of."""
    terms: dict[Node, None] = {}
    waiting, seen = [root], {root}
    while waiting:
        node = waiting.pop()
        parts = node.args[1:] if node.op == "where" else node.args if node.op in _OF_TERMS else ()
        if not parts:
            terms[node] = None
        waiting += [part for part in parts if part not in seen]
        seen.update(parts)
    return list(terms)


_OF_TERMS = ("add", "sub", "neg", "min", "max", "cast")


def _why_extreme(term: Node) -> str | None:
    """Say why a term may be extreme that is added to scores; one that is the same for a whole row is no difference."""
    if term.op == "load":
        return f"{term.attr} is added to scores and may hold values of any magnitude"
    if Axis.KV in term.axes:
        return None
    for node in topological(term):
        if node.op == "input" and node.attr == "q_idx":
            return "what is added to whole rows grows with q_idx"
        if node.op in ("load", "scalar"):
            return f"{node.attr} is part of what is added to whole rows, and may be of any magnitude"
        if node.op == "const" and not node.dtype.is_floating_point and abs(int(node.attr or 0)) >= LARGE_FACTOR:
            return f"{node.attr} is part of what is added to whole rows, which indices may make large"
    return None


def decide_rows_safe(question: Question, answers: Answers) -> None:
    asked = question.options.ROWS_GUARANTEED_SAFE
    proof = question.facts.rows_safe
    table = question.problem.table
    if table is not None and not table.derived:
        value, because = False, "a block table may leave rows without a block"
    elif question.problem.lengths_dtype is not None:
        value, because = False, "kv_lengths may leave a batch row without keys"
    elif question.problem.cu_seqlens is not None:
        value, because = False, "a packed sequence may have queries and no keys; the device alone knows"
    elif may_drop_rows(question.mods.score):
        value, because = False, "score_mod may return -inf for a whole row"
    elif proof.holds and not question.guard.rows_safe_holds:
        value, because = False, f"this call does not meet the proof's condition: {proof.because}"
    else:
        value, because = proof.holds, proof.because
    if asked and not value:
        because = f"asked for, not proved: {because}; the check after the loop stays, so a wrong promise gives no NaN"
    answers.add("ROWS_GUARANTEED_SAFE", value, because)


def may_drop_rows(score: Graph | None) -> bool:
    """Whether a score_mod could make a score -inf: conservative, by the ops that can."""
    return score is not None and any(_may_be_infinite(node) for node in score.nodes())


def _may_be_infinite(node: Node) -> bool:
    if node.op == "const":
        return isinstance(node.attr, float) and abs(node.attr) > LARGEST_SAFE
    if node.op == "div" and node.args[1].op == "const":
        return node.args[1].attr == 0
    risky = ("load", "scalar", "div", "log", "log2", "log1p", "exp", "exp2", "pow", "rsqrt", "expm1")
    return node.dtype.is_floating_point and node.op in risky


def _tma(question: Question, answers: Answers) -> None:
    asked = question.options.USE_TMA
    blocker = _tma_blocker(question, answers)
    if asked and blocker:
        raise OptionError(
            f"USE_TMA=True cannot be honoured: {blocker}",
            why="the bulk copy engine copies aligned, unit-stride tiles on sm_90 and later",
            fix="make key and value contiguous with a head dim that is a multiple of 16 bytes, or drop USE_TMA",
        )
    because = "asked for" if asked is not None else blocker or "not the default until measured to win"
    answers.add("USE_TMA", bool(asked), because)


def _tma_blocker(question: Question, answers: Answers) -> str | None:
    problem = question.problem
    if not question.target.has_tma:
        return f"{question.target.name} has no bulk copy engine"
    if problem.page_size:
        return "keys lie in pages"
    if problem.converts_keys:
        return "keys and values are converted after they are read"
    if not {"key", "value"} <= problem.unit_stride:
        return "the last dimension of key or value is strided"
    if not {"key", "value"} <= question.guard.aligned:
        return "key or value does not start on 16 bytes, or its row stride is not a multiple of 16 bytes"
    if answers["SPARSE_KV_BLOCK_SIZE"] % answers["BLOCK_N"]:
        return "the mask's key blocks are not whole tiles"
    if problem.query_dtype.itemsize >= 4 and max(answers["QK_HEAD_DIM_ROUNDED"], answers["V_HEAD_DIM_ROUNDED"]) > 64:
        return "float32 tiles of more than 64 head dims spill when they come from the copy engine"
    if max(answers["BLOCK_N"], answers["QK_HEAD_DIM_ROUNDED"], answers["V_HEAD_DIM_ROUNDED"]) > 256:
        return "a tile side passes the engine's limit of 256 elements"
    return None


def _subtiling(question: Question, answers: Answers) -> None:
    asked = question.options.USE_SUBTILING
    because = "asked for" if asked is not None else "default; exactly equivalent, no gain measured on Hopper"
    answers.add("USE_SUBTILING", bool(asked), because)


def decide_arithmetic(question: Question, answers: Answers) -> None:
    asked = question.options.FLOAT32_PRECISION
    answers.add("FLOAT32_PRECISION", asked or "ieee", "asked for" if asked else "float32 stays float32 unless asked")
    fast, because = _fast_tanh(question)
    answers.add("FAST_TANH", fast, because)


def decide_order(question: Question, answers: Answers) -> None:
    """Decide in which order programs of a head start; they run in waves, and the last wave decides the time."""
    asked = question.options.LONG_ROWS_FIRST
    grows = _rows_grow(question.schedule)
    if asked is not None:
        answers.add("LONG_ROWS_FIRST", bool(asked), "asked for")
    else:
        because = "later queries visit more keys: their programs start first" if grows else "rows are alike in length"
        answers.add("LONG_ROWS_FIRST", grows, because)


def _rows_grow(schedule: Schedule) -> bool:
    """Whether a tile of late queries visits clearly more keys than one of early ones."""
    early, late = (_keys_at(schedule, NOMINAL_LENGTH * part // 4) for part in (1, 3))
    return early is not None and late is not None and late > 1.5 * early


def _keys_at(schedule: Schedule, q_idx: int) -> int | None:
    """Return how many keys a tile at a query visits in a long sequence; None where that cannot be said."""
    names = {"q_lo": q_idx, "q_hi": q_idx, "Q_LEN": NOMINAL_LENGTH, "KV_LEN": NOMINAL_LENGTH, "b": 0, "h": 0}
    total = 0
    for segment in schedule.segments:
        lo, hi = (host_value(bound.node, names) for bound in (segment.visit_lo, segment.visit_hi))
        if lo is None or hi is None:
            return None
        total += int(max(0, min(hi, NOMINAL_LENGTH) - max(lo, 0)))
    return total if schedule.segments else None


def _fast_tanh(question: Question) -> tuple[bool, str]:
    asked, target = question.options.FAST_TANH, question.target
    uses = question.mods.score is not None and any(node.op == "tanh" for node in question.mods.score.nodes())
    if asked and not target.has_fast_tanh:
        raise OptionError(
            f"FAST_TANH=True cannot be honoured on {target.name}",
            why="it has no tanh instruction",
            fix="drop FAST_TANH or choose an NVIDIA target",
        )
    if asked is not None:
        return bool(asked), "asked for"
    if not uses:
        return False, "score_mod has no tanh"
    half = question.problem.query_dtype in (torch.float16, torch.bfloat16)
    if half and target.has_fast_tanh:
        return True, "half-precision inputs: the hardware's error of 2**-11 is below theirs"
    return False, "float32 inputs keep the exact tanh" if not half else f"{target.name} has no tanh instruction"


def decide_outputs(question: Question, answers: Answers) -> None:
    problem = question.problem
    tail = problem.output_logsumexp and answers["SUBTRACT_FIRST"]
    answers.add("OUTPUT_TAIL", tail, "the backward needs exact differences from it" if tail else "no backward needs it")
    for name, value in (("OUTPUT_LOGSUMEXP", problem.output_logsumexp), ("OUTPUT_MAX", problem.output_max)):
        answers.add(name, value, "the call returns it" if value else "the call does not return it")


def decide_dropout(question: Question, answers: Answers) -> None:
    answers.add("DROPOUT", *_draws(question, answers))


def _draws(question: Question, answers: Answers) -> tuple[Draws, str]:
    """Return how pairs are drawn: four at once need tiles that start at multiples of what a block of groups covers."""
    if not question.problem.dropout:
        return Draws.NONE, "dropout_p is 0"
    index_map, table = answers["index_map"], question.problem.table
    if index_map.packs:
        return Draws.SINGLE, "rows of a tile belong to several heads: each pair is drawn by itself"
    if index_map.has_offsets:
        return Draws.SINGLE, f"indices start at run-time offsets, maybe no multiples of {GROUP_SPAN}"
    if table is not None and (table.q_block_size % GROUP_SPAN or table.kv_block_size % GROUP_SPAN):
        blocks = f"blocks of {table.q_block_size} x {table.kv_block_size}"
        return Draws.SINGLE, f"{blocks} do not start at multiples of {GROUP_SPAN}"
    return Draws.GROUPED, "dropout_p is not 0: one call of the generator draws four pairs, 8 queries and 8 keys apart"


def decide_amd(question: Question, answers: Answers) -> None:
    for name in ("kpack", "matrix_instr_nonkdim", "waves_per_eu"):
        asked = getattr(question.options, name)
        if asked is not None and question.target.backend != "hip":
            raise OptionError(
                f"{name}={asked} cannot be honoured on {question.target.name}",
                why="it is an option of AMD targets",
                fix=f"drop {name}, or choose one of gfx90a, gfx942, gfx950",
            )
        answers.add(name, asked, "asked for" if asked is not None else "Triton's default")


_ORDER: tuple[Callable[[Question, Answers], None], ...] = (
    decide_backend,
    decide_head_dims,
    decide_table,
    decide_packing,
    _tile,
    decide_divisible,
    decide_scale,
    decide_stored,
    decide_rows_safe,
    _tma,
    _subtiling,
    decide_arithmetic,
    decide_order,
    decide_dropout,
    decide_outputs,
    decide_amd,
)

"""Predicted work of a kernel, and the least time that the chip's units need for it: a roofline.

Everything here is arithmetic on counts; `flexgen.commands.predict` counts the pairs of a mask at a kernel's tiles.
A prediction is a lower bound of the time: units are taken to work at their peak, all at once, and what is not counted
(scalar arithmetic of mods and softmax, waiting, shared memory) to be free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from flexgen.ir.graph import Axis, Node, topological
from flexgen.ir.score_grad import ScoreGrad
from flexgen.lowering.chips import Chip
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.plans import AnyBackwardPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import BackwardKernel
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import DecodePlan


class Sizes(Protocol):
    """The sizes of a call: query [B, Hq, Lq, Dqk], key [B, Hkv, Lk, Dqk], value [B, Hkv, Lk, Dv]."""

    @property
    def B(self) -> int: ...
    @property
    def Hq(self) -> int: ...
    @property
    def Hkv(self) -> int: ...
    @property
    def Lq(self) -> int: ...
    @property
    def Lk(self) -> int: ...
    @property
    def Dqk(self) -> int: ...
    @property
    def Dv(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Visited:
    """What one kernel visits in a whole call, of all batches and heads.

    Attributes:
        live: (query, key) pairs of all query heads that the mask keeps.
        tiles: tiles that are visited; computed in whole, also where they reach past an end.
        programs: tiles of the side that programs own, one program each; of each split.
        walked_rows: rows of the other side that all programs load, in sum.
        read_rows: those of them that are different, each counted once a head of its tensor.
        pairs: (query, key) pairs of all query heads, live or not; of packed sequences, those of one sequence.
        estimated: counted at some (batch, head) only, and scaled to all.
        splits: programs that share the walk of a tile, each of which leaves its rows for another kernel to combine.
    """

    live: int
    tiles: int
    programs: int
    walked_rows: int
    read_rows: int
    pairs: int
    estimated: bool = False
    splits: int = 1


Unit = Literal["matrix unit", "memory", "exponentials"]


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that one unit of the chip needs.

    Attributes:
        amount: FLOP, bytes, or exponentials.
        rate: of the unit, a second; of those multiprocessors that have a program.
    """

    unit: Unit
    amount: float
    rate: float

    @property
    def seconds(self) -> float:
        return self.amount / self.rate


@dataclass(frozen=True, slots=True)
class Work:
    """The predicted work of one kernel.

    Attributes:
        kernel: its name, as in `Lowered.source`.
        visited: what it visits.
        visited_pairs: pairs of the visited tiles, whole tiles, rows of padding included.
        live_flops: of the kernel's matrix products, for live pairs alone.
        flops: of its matrix products for the visited pairs, head dims as wide as in its tiles.
        exponentials: exp2 and similar functions that it computes.
        memory_bytes: what must pass between chip and memory, by tensor; each element once.
        cache_bytes: rows of the walked side that programs load through L2, each program its own.
        bounds: of the units, the largest first; none without rates.
        chip: whose rates they are.
        multiprocessors_used: the share of them that has a program.
    """

    kernel: str
    visited: Visited
    visited_pairs: int
    live_flops: int
    flops: int
    exponentials: int
    memory_bytes: Mapping[str, int]
    cache_bytes: int
    bounds: tuple[Bound, ...]
    chip: Chip | None
    multiprocessors_used: float

    @property
    def bytes(self) -> int:
        return sum(self.memory_bytes.values())

    @property
    def intensity(self) -> float:
        """FLOP the kernel computes for each byte between chip and memory."""
        return self.flops / max(self.bytes, 1)

    @property
    def bound(self) -> Bound | None:
        """The unit that needs the longest: the kernel cannot be faster."""
        return self.bounds[0] if self.bounds else None


def useful_flops(sizes: Sizes, live: int, *, backward: bool = False) -> int:
    """Return the FLOP of the matrix products that a direction cannot do without: what TFLOP/s are stated over.

    A live pair takes 2 (Dqk + Dv) forward and 6 Dqk + 4 Dv backward: five products, of which kernels that compute dQ
    and dK/dV apart do two twice.
    """
    return live * (6 * sizes.Dqk + 4 * sizes.Dv if backward else 2 * (sizes.Dqk + sizes.Dv))


def predict_work(
    kernel: str,
    plan: WalkPlan,
    sizes: Sizes,
    visited: Visited,
    functions: int,
    captured_bytes: int = 0,
) -> Work:
    """Return the predicted work of a forward, dQ or dK/dV kernel.

    Args:
        functions: special functions of the mods for each pair, from `special_functions`.
        captured_bytes: of captured tensors that the kernel reads.
    """
    pairs = visited.tiles * plan.BLOCK_M * plan.BLOCK_N
    flops = pairs * _flops_of_a_pair(plan, plan.QK_HEAD_DIM_ROUNDED, plan.V_HEAD_DIM_ROUNDED)
    exponentials = pairs * (1 + functions)
    if not isinstance(plan, AnyBackwardPlan):
        exponentials += visited.tiles * plan.BLOCK_M  # what the sums so far are scaled by
    moved = _memory_bytes(plan, sizes, visited) | ({"captured": captured_bytes} if captured_bytes else {})
    chip = plan.target.chip
    used = min(1.0, visited.programs * visited.splits / chip.multiprocessors) if chip else 1.0
    key_size, value_size = _stored_sizes(plan)
    amounts = {"matrix unit": flops, "memory": sum(moved.values()), "exponentials": exponentials}
    return Work(
        kernel,
        visited,
        pairs,
        visited.live * _flops_of_a_pair(plan, sizes.Dqk, sizes.Dv),
        flops,
        exponentials,
        moved,
        visited.walked_rows * (sizes.Dqk * key_size + sizes.Dv * value_size),
        _bounds(amounts, chip, used, matrix_rate(plan, chip)) if chip and used else (),
        chip,
        used,
    )


def _flops_of_a_pair(plan: WalkPlan, qk: int, v: int) -> int:
    """Return what the kernel's matrix products take for one pair."""
    if not isinstance(plan, AnyBackwardPlan):
        return 2 * (qk + v)
    products = qk  # the scores, computed again
    if plan.differentiates_scores:
        products += v  # gradient of the weights
    products += qk * (plan.WRITE_GRAD_QUERY + plan.WRITE_GRAD_KEY) + v * plan.WRITE_GRAD_VALUE
    return 2 * products


def _stored_sizes(plan: WalkPlan) -> tuple[int, int]:
    """Return the bytes of an element of the walked side's two tensors: keys and values, or queries and gradients."""
    if isinstance(plan, ForwardPlan):
        return plan.key_dtype.itemsize, plan.value_dtype.itemsize
    return plan.query_dtype.itemsize, plan.query_dtype.itemsize


def _memory_bytes(plan: WalkPlan, sizes: Sizes, visited: Visited) -> dict[str, int]:
    size, statistic = plan.query_dtype.itemsize, 4
    rows, keys = sizes.B * sizes.Hq * sizes.Lq, sizes.B * sizes.Hkv * sizes.Lk
    if not isinstance(plan, AnyBackwardPlan):
        key_size, value_size = _stored_sizes(plan)
        moved = {
            "query": rows * sizes.Dqk * size,
            "key": visited.read_rows * sizes.Dqk * key_size,
            "value": visited.read_rows * sizes.Dv * value_size,
        }
        if isinstance(plan, DecodePlan) and visited.splits > 1:  # the combining kernel writes the outputs
            return moved | {"partial rows": rows * visited.splits * plan.PARTIAL_WIDTH * statistic}
        moved |= {"output": rows * sizes.Dv * size}
        statistics = {"logsumexp": plan.OUTPUT_LOGSUMEXP, "max_scores": plan.OUTPUT_MAX}
        return moved | {name: rows * statistic for name, wanted in statistics.items() if wanted}
    if plan.kernel is BackwardKernel.DQ:
        rows_read, keys_read = rows, visited.read_rows
    else:
        rows_read, keys_read = visited.read_rows, keys
    moved = {
        "query": rows_read * sizes.Dqk * size,
        "grad_output": rows_read * sizes.Dv * size,
        "row statistics": rows_read * 2 * statistic,
        "key": keys_read * sizes.Dqk * size,
        "value": keys_read * sizes.Dv * size,
    }
    moved |= {"grad_query": rows * sizes.Dqk * size} if plan.WRITE_GRAD_QUERY else {}
    moved |= {"grad_key": keys * sizes.Dqk * size} if plan.WRITE_GRAD_KEY else {}
    return moved | ({"grad_value": keys * sizes.Dv * size} if plan.WRITE_GRAD_VALUE else {})


def matrix_rate(plan: WalkPlan, chip: Chip) -> float:
    """Return the rate of the plan's matrix products on a whole chip, in FLOP/s."""
    if plan.query_dtype.itemsize < 4 or isinstance(plan, GluonBackwardPlan):
        return chip.half
    precision = {"tf32": chip.tf32, "tf32x3": chip.tf32 / 3}
    return precision.get(plan.FLOAT32_PRECISION, chip.float32)


def _bounds(amounts: Mapping[str, int], chip: Chip, used: float, matrix_rate: float) -> tuple[Bound, ...]:
    bounds = (
        Bound("matrix unit", amounts["matrix unit"], used * matrix_rate),
        Bound("memory", amounts["memory"], chip.memory),
        Bound("exponentials", amounts["exponentials"], used * chip.exponentials),
    )
    return tuple(sorted(bounds, key=lambda bound: -bound.seconds))


# How many results of the special function unit an op needs, by the shortest usual sequence; the rest are polynomials
# or ordinary arithmetic.
_SPECIAL = {"exp": 1, "exp2": 1, "expm1": 1, "log": 1, "log2": 1, "log1p": 1, "sqrt": 1, "rsqrt": 1, "sin": 1, "cos": 1}
_SPECIAL |= {"sigmoid": 2, "tanh": 2, "pow": 2, "div": 1}


def special_functions(plan: WalkPlan, score: Node | None, grad: ScoreGrad | None = None) -> int:
    """Return how many results of the special function unit the score_mod needs for each pair.

    Args:
        score: what score_mod returns.
        grad: its gradients, for a backward kernel.
    """
    roots = [] if score is None else [score]
    if grad is not None and isinstance(plan, AnyBackwardPlan) and plan.differentiates_scores:
        roots.append(grad.dscore)
    fast = _SPECIAL | ({"tanh": 1} if plan.FAST_TANH else {})
    return sum(fast.get(node.op, 0) for node in topological(*roots) if _of_pairs(node))


def _of_pairs(node: Node) -> bool:
    """Whether a value is computed for each pair, in float; by a constant is not divided, but multiplied."""
    if not {Axis.Q, Axis.KV} <= node.axes or not node.dtype.is_floating_point or node.dtype == torch.float64:
        return False
    return node.op != "div" or node.args[1].op != "const"

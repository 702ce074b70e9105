"""Random graphs of the IR, and inputs full of awkward values to evaluate them on."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from flexgen.ir.graph import Buffer, Graph, Mods, Node, Scalar, const, input_node, make
from flexgen.ir.identities import IDENTITIES
from flexgen.ir.ops import OPS, DtypeRule
from flexgen.ir.patterns import Call, Pattern, Variable, parse_pattern, parse_rule
from flexgen.ir.patterns import Literal as Number
from flexgen.ir.sizes import size_name
from flexgen.ir.verify import used_captures

ROWS, COLUMNS = 5, 7
FLOATS = (0.0, -0.0, 1.0, -1.0, 2.0, 3.0, 0.5, -0.5, 0.1, 4.0, 1e30, math.inf, -math.inf, math.nan)
INTEGERS = (0, 1, -1, 2, 3, 4, 6, 7, 8, 12, -3, 31, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63))
DTYPES = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
BUFFERS = (
    Buffer("ids", torch.int32, (None,), ("1",)),
    Buffer("table", torch.float32, (ROWS, None), ("*", "0"), requires_grad=True),
    Buffer("flag", torch.bool, (None,), ("*",)),
    Buffer("temperature", torch.float16, (), ()),
)
SCALARS = (Scalar("window", torch.int64), Scalar("cap", torch.float32))

# Functions whose last bit depends on how torch vectorises them: the shape of a value is not part of its meaning.
INEXACT = frozenset({"exp", "exp2", "expm1", "log", "log2", "log1p", "sin", "cos", "tanh", "sigmoid", "erf", "pow"})


def constants(dtype: torch.dtype) -> list[Node]:
    if dtype == torch.bool:
        return [const(False, dtype), const(True, dtype)]
    if dtype.is_floating_point:
        return [const(value, dtype) for value in FLOATS]
    info = torch.iinfo(dtype)
    return [const(value, dtype) for value in INTEGERS if info.min <= value <= info.max]


def _leaves(kind: str) -> list[Node]:
    q_idx, kv_idx = input_node("q_idx"), input_node("kv_idx")
    leaves = [q_idx, kv_idx, input_node("b"), input_node("h")]
    leaves += [make("load", q_idx, attr="ids", dtype=torch.int32), make("load", kv_idx, attr="flag", dtype=torch.bool)]
    leaves += [make("load", q_idx, kv_idx, attr="table", dtype=torch.float32)]
    leaves += [make("load", attr="temperature", dtype=torch.float16)]
    leaves += [make("scalar", attr=scalar.name, dtype=scalar.dtype) for scalar in SCALARS]
    leaves += [make("scalar", attr=size_name("ids", 0), dtype=torch.int64)]
    return leaves + ([input_node("score", torch.float32)] if kind == "score" else [])


def accepts(rule: DtypeRule, dtype: torch.dtype) -> bool:
    """Whether an op of this rule has arguments of this dtype."""
    is_bool, is_float = dtype == torch.bool, dtype.is_floating_point
    match rule:
        case DtypeRule.SAME:
            return not is_bool
        case DtypeRule.FLOAT:
            return is_float
        case DtypeRule.INTEGER:
            return not is_bool and not is_float
        case DtypeRule.BITS:
            return not is_float
    return True


# Shapes that rules which compute look for; those of the identities stand in their table.
_SHAPES = (
    *("floordiv(floordiv(x, C), D)", "mod(mod(x, C), D)", "floordiv(mul(x, C), D)", "mod(mul(x, C), D)"),
    *("truncdiv(x, C)", "fmod(x, C)", "shr(x, C)", "shl(x, C)", "and(x, C)", "abs(x)", "div(x, C)", "add(x, C)"),
    *(
        "le(add(x, C), D)",
        "ge(add(x, C), sub(y, D))",
        "lt(x, C)",
        "max(x, C)",
        "min(C, x)",
        "floor(x)",
        "round(floor(x))",
    ),
    *("ne(where(c, C, D), C)", "eq(where(c, C, x), D)"),
)
PATTERNS = tuple(
    [parse_rule(rule.text)[0] for rule in IDENTITIES if rule.text] + [parse_pattern(text) for text in _SHAPES]
)


class _Pool:
    """Values to draw arguments from."""

    def __init__(self, draw: st.DrawFn, kind: str) -> None:
        self._draw = draw
        self._leaves: defaultdict[torch.dtype, list[Node]] = defaultdict(list)
        self._values: defaultdict[torch.dtype, list[Node]] = defaultdict(list)
        for node in _leaves(kind):
            self._leaves[node.dtype].append(node)

    def add(self, node: Node) -> None:
        self._values[node.dtype].append(node)

    def take(self, dtype: torch.dtype) -> Node:
        """Draw a value: half the time one of the last few computed, rarely a constant."""
        recent, leaves = self._values[dtype][-4:], self._leaves[dtype]
        weighted = recent * (len(leaves) // max(len(recent), 1) + 1) + leaves
        return self._draw(st.sampled_from(weighted + constants(dtype)[:6] if len(weighted) < 3 else weighted))

    def root(self, dtype: torch.dtype) -> Node:
        """Return the last value of the dtype, or one made of the last value of any other."""
        if self._values[dtype]:
            return self._values[dtype][-1]
        value = next(values[-1] for values in self._values.values() if values)
        return make("cast", value, dtype=dtype)

    def instance(self) -> Node | None:
        """Draw what a rule looks for."""
        pattern = self._draw(st.sampled_from(PATTERNS))
        dtype = self._draw(st.sampled_from((torch.int64, torch.float32, torch.bool, torch.int32, torch.uint8)))
        node = self._fill(pattern, dtype, {})
        return node if is_well_typed(node) else None

    def _fill(self, pattern: Pattern, dtype: torch.dtype, bound: dict[str, Node]) -> Node:
        match pattern:
            case Number(value):
                return const(abs(value) if dtype == torch.uint8 else value, dtype)
            case Variable(letter):
                if letter not in bound and letter.isupper():
                    bound[letter] = self._draw(st.sampled_from(constants(dtype)))
                elif letter not in bound:
                    bound[letter] = self.take(torch.bool if letter == "c" else dtype)
                return bound[letter]
            case Call(op, args):
                dtypes = [torch.bool if op == "where" and index == 0 else dtype for index in range(len(args))]
                nodes = [self._fill(arg, own, bound) for arg, own in zip(args, dtypes, strict=True)]
                compares = OPS[op].rule is DtypeRule.COMPARE
                return make(op, *nodes, dtype=torch.bool if compares else nodes[-1].dtype)

    def operation(self, ops: list[str]) -> Node:
        op = self._draw(st.sampled_from(ops))
        row = OPS[op]
        dtype = self._draw(st.sampled_from([dtype for dtype in DTYPES if accepts(row.rule, dtype)]))
        if op == "load":
            index = self._draw(st.sampled_from((torch.int32, torch.int64)))
            return make("load", self.take(index), attr="ids", dtype=torch.int32)
        if op == "cast":
            return self._casts(dtype)
        if op == "where":
            return make("where", self.take(torch.bool), self.take(dtype), self.take(dtype), dtype=dtype)
        args = [self.take(dtype) for _ in range(row.arity or 0)]
        return make(op, *args, dtype=torch.bool if row.rule is DtypeRule.COMPARE else dtype)

    def _casts(self, dtype: torch.dtype) -> Node:
        """Draw one to three casts in a row, never of a float to an integer: what overflows there depends on torch."""
        node = self.take(self._draw(st.sampled_from(DTYPES)))
        for target in (*self._draw(st.lists(st.sampled_from(DTYPES), max_size=2)), dtype):
            if target.is_floating_point or target == torch.bool or not node.dtype.is_floating_point:
                node = make("cast", node, dtype=target)
        return node


def is_well_typed(node: Node) -> bool:
    """Whether every operation below the node is defined on its arguments' dtype."""
    operations = (inner for inner in Graph("mask", "m", node).nodes() if inner.args and inner.op != "load")
    return all(accepts(OPS[inner.op].rule, inner.args[-1].dtype) for inner in operations)


@st.composite
def graphs(draw: st.DrawFn, kind: Literal["score", "mask"], *, exact: bool = False, longest: int = 20) -> Graph:
    """Draw a graph that declares what it uses; `exact` leaves out functions that torch computes to an ulp or so."""
    pool = _Pool(draw, kind)
    ops = sorted(set(OPS) - {"input", "const", "scalar"} - (INEXACT if exact else frozenset()))
    pool.add(pool.operation(ops))
    for _ in range(draw(st.integers(1, longest))):
        node = pool.instance() if draw(st.booleans()) else pool.operation(ops)
        if node is not None and not (exact and node.op in INEXACT):
            pool.add(node)
    return graph_of(kind, pool.root(torch.bool if kind == "mask" else torch.float32))


@st.composite
def mods(draw: st.DrawFn, *, exact: bool = False) -> Mods:
    score = draw(st.none() | graphs("score", exact=exact))
    return Mods(score, draw(st.none() | graphs("mask", exact=exact)))


def graph_of(kind: Literal["score", "mask"], root: Node, name: str = "mod") -> Graph:
    """Return the graph of `root` that declares those of BUFFERS and SCALARS that it uses."""
    used = used_captures(list(Graph(kind, name, root).nodes()))
    buffers = tuple(buffer for buffer in BUFFERS if buffer.name in used)
    return Graph(kind, name, root, buffers, tuple(scalar for scalar in SCALARS if scalar.name in used))


@dataclass(frozen=True, slots=True)
class Arguments:
    """What `evaluate` takes."""

    inputs: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]


def awkward_arguments() -> Arguments:
    """Return arguments with both zeros, infinities and NaN, and with indices outside the buffers."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.tensor(FLOATS, dtype=torch.float32).repeat(3)[: ROWS * COLUMNS].reshape(ROWS, COLUMNS)
    inputs = {
        "score": scores,
        "b": torch.tensor(1),
        "h": torch.tensor(3),
        "q_idx": torch.arange(ROWS)[:, None],
        "kv_idx": torch.arange(COLUMNS)[None, :],
    }
    buffers = {
        "ids": torch.tensor([3, -2, 0, 2**31 - 1], dtype=torch.int32),
        "table": scores[:, torch.randperm(COLUMNS, generator=generator)][:, :4],
        "flag": torch.tensor([True, False, True, True]),
        "temperature": torch.tensor(-0.0, dtype=torch.float16),
    }
    return Arguments(inputs, buffers, {"window": -3, "cap": 20.0})


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors agree after broadcasting: NaN equals NaN, and 0.0 does not equal -0.0."""
    shape = (left != right).shape
    left, right = left.expand(shape), right.expand(shape)
    if left.dtype != right.dtype:
        return False
    if not left.dtype.is_floating_point:
        return bool((left == right).all())
    equal = (left == right) & (torch.signbit(left) == torch.signbit(right))
    return bool((equal | (left.isnan() & right.isnan())).all())

"""Short spellings of index expressions for tests, and random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from hypothesis import strategies as st

from flexgen.ir.graph import Node, const, input_node, make

T = TypeVar("T")

I64 = torch.int64
B, H, Q, K = (input_node(name) for name in ("b", "h", "q_idx", "kv_idx"))

Operand = Node | int


def index(op: str, *args: Operand) -> Node:
    """An int64 operation."""
    return make(op, *(_node(arg) for arg in args), dtype=I64)


def test(op: str, *args: Operand) -> Node:
    """A comparison or a logical operation."""
    return make(op, *(_node(arg) for arg in args), dtype=torch.bool)


test.__test__ = False  # type: ignore[attr-defined]


def _node(arg: Operand) -> Node:
    return const(arg, I64) if isinstance(arg, int) else arg


def load(name: str, *indices: Node, dtype: torch.dtype = torch.int32) -> Node:
    """An element of a table; integers are promoted to int64, as capture does where they meet an index."""
    loaded = make("load", *indices, attr=name, dtype=dtype)
    return loaded if dtype in (torch.bool, I64) else make("cast", loaded, dtype=I64)


def scalar(name: str) -> Node:
    return make("scalar", attr=name, dtype=I64)


CAUSAL = test("ge", Q, K)
DISTANCE = index("sub", Q, K)

_LEAVES = (
    *(Q, K, Q, K, B, H),
    scalar("offset"),
    *(load("per_head", H), load("per_batch", B, dtype=I64), load("per_query", Q), load("per_key", K)),
    load("starts", load("per_query", Q)),
)
_DIVISIONS = ("floordiv", "floordiv", "truncdiv", "mod", "fmod")
_ARITHMETIC = ("add", "sub", "add", "sub", "min", "max", "mul")
_UNARY = ("abs", "abs", "neg", "sign")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_FLAGS = (load("query_flag", Q, dtype=torch.bool), load("key_flag", K, dtype=torch.bool))
_FAMILIAR = (
    CAUSAL,
    test("lt", DISTANCE, 5),
    test("le", index("abs", DISTANCE), 3),
    test("eq", index("floordiv", Q, 4), index("floordiv", K, 4)),
    test("lt", K, load("starts", Q)),
)


class _Drawer:
    """Draws expressions from the choices of one example."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(0, len(options) - 1)]

    def number(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def index(self, depth: int) -> Node:
        kind = self.number(0, 8) if depth else self.number(0, 1)
        match kind:
            case 0 | 2:
                return self.pick(_LEAVES)
            case 1:
                return const(self.number(-9, 17), I64)
            case 3 | 4:
                return index(self.pick(_ARITHMETIC), self.index(depth - 1), self.index(depth - 1))
            case 5:
                return index("mul", self.index(depth - 1), self.number(-3, 3))
            case 6:
                return index(self.pick(_DIVISIONS), self.index(depth - 1), self.pick((1, 2, 3, 4, 7, -2, -5)))
            case 7:
                return index(self.pick(_UNARY), self.index(depth - 1))
        return self._rare_index(depth)

    def _rare_index(self, depth: int) -> Node:
        match self.number(0, 3):
            case 0:
                return index(self.pick(("shl", "shr")), self.index(depth - 1), self.number(0, 3))
            case 1:
                return index(self.pick(("and", "or", "xor")), self.index(depth - 1), self.index(depth - 1))
            case 2:
                narrow = make("cast", self.index(depth - 1), dtype=self.pick((torch.int32, torch.int8)))
                return make("cast", narrow, dtype=I64)
        return index("where", self.condition(depth - 1), self.index(depth - 1), self.index(depth - 1))

    def condition(self, depth: int) -> Node:
        kind = self.number(0, 9) if depth > 0 else self.number(0, 3)
        match kind:
            case 0 | 1:
                return test(self.pick(_COMPARISONS), self.index(2), self.index(2))
            case 2:
                return self.pick(_FAMILIAR)
            case 3:
                return self.pick(_FLAGS) if self.number(0, 2) == 0 else self.pick(_FAMILIAR)
            case 4 | 5 | 6:
                return test(self.pick(("and", "or")), self.condition(depth - 1), self.condition(depth - 1))
            case 7:
                return test(self.pick(("xor", "eq", "ne")), self.condition(depth - 1), self.condition(depth - 1))
            case 8:
                return test("not", self.condition(depth - 1))
        return self._rare_condition(depth)

    def _rare_condition(self, depth: int) -> Node:
        match self.number(0, 2):
            case 0:
                return test("where", *(self.condition(depth - 1) for _ in range(3)))
            case 1:
                return test("lt", make("cast", self.condition(depth - 1), dtype=I64), self.index(1))
        return make("cast", self.index(2), dtype=torch.bool)


@st.composite
def masks(draw: st.DrawFn) -> Node:
    """Masks over the whole op set of integers and bools."""
    return _Drawer(draw).condition(3)

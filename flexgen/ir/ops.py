"""The op table: one row an op. Every other concern (spelling, intervals, derivatives, evaluation) is its own table."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DtypeRule(enum.Enum):
    """What an op demands of its arguments' dtypes and what its result's dtype is."""

    LEAF = "leaf"  # no arguments, or (load) index arguments; the dtype is the node's own
    SAME = "same"  # all arguments share the result's dtype, a number (never bool)
    FLOAT = "float"  # as SAME, and the dtype is floating
    INTEGER = "integer"  # as SAME, and the dtype is an integer
    BITS = "bits"  # as SAME, and the dtype is bool or an integer
    COMPARE = "compare"  # the arguments share a dtype; the result is bool
    SELECT = "select"  # (bool, T, T) -> T
    CAST = "cast"  # any dtype -> the node's own


class OpKind(enum.Enum):
    """The family an op belongs to; used to group documentation and to choose default rules."""

    LEAF = "leaf"
    ARITHMETIC = "arithmetic"
    MATH = "math"
    COMPARE = "compare"
    BITS = "bits"
    SELECT = "select"
    CAST = "cast"


@dataclass(frozen=True, slots=True)
class OpRow:
    """One op.

    Attributes:
        name: the op's name in the IR and its text.
        arity: number of arguments; None for `load`, which takes one index per dimension of its buffer.
        kind: the family.
        rule: the dtype rule that the verifier checks.
        aten: spellings (aten overload packets, without namespace) that convert to this op one to one,
            after argument promotion. Spellings that need rewriting are handled in capture/convert.py.
        commutative: whether the two arguments may be swapped.
    """

    name: str
    arity: int | None
    kind: OpKind
    rule: DtypeRule
    aten: tuple[str, ...] = ()
    commutative: bool = False


def _row(name: str, arity: int | None, kind: OpKind, rule: DtypeRule, *aten: str, commutative: bool = False) -> OpRow:
    return OpRow(name, arity, kind, rule, aten, commutative)


_ROWS = (
    # Leaves. attr: the input's name, the constant's value, the scalar's name, the buffer's name.
    _row("input", 0, OpKind.LEAF, DtypeRule.LEAF),
    _row("const", 0, OpKind.LEAF, DtypeRule.LEAF),
    _row("scalar", 0, OpKind.LEAF, DtypeRule.LEAF),
    _row("load", None, OpKind.LEAF, DtypeRule.LEAF),
    # Arithmetic. floordiv and mod floor (Python's // and %); truncdiv and fmod round toward zero (C's).
    _row("add", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "add", commutative=True),
    _row("sub", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "sub"),
    _row("mul", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "mul", commutative=True),
    _row("div", 2, OpKind.ARITHMETIC, DtypeRule.FLOAT, "div", "true_divide"),
    _row("floordiv", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "floor_divide"),
    _row("truncdiv", 2, OpKind.ARITHMETIC, DtypeRule.SAME),
    _row("mod", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "remainder"),
    _row("fmod", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "fmod"),
    _row("neg", 1, OpKind.ARITHMETIC, DtypeRule.SAME, "neg"),
    _row("abs", 1, OpKind.ARITHMETIC, DtypeRule.SAME, "abs"),
    _row("sign", 1, OpKind.ARITHMETIC, DtypeRule.SAME, "sign"),
    _row("min", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "minimum", commutative=True),  # NaN propagates, as in torch
    _row("max", 2, OpKind.ARITHMETIC, DtypeRule.SAME, "maximum", commutative=True),
    # Floating-point functions.
    _row("pow", 2, OpKind.MATH, DtypeRule.FLOAT),
    _row("sqrt", 1, OpKind.MATH, DtypeRule.FLOAT, "sqrt"),
    _row("rsqrt", 1, OpKind.MATH, DtypeRule.FLOAT, "rsqrt"),
    _row("exp", 1, OpKind.MATH, DtypeRule.FLOAT, "exp"),
    _row("exp2", 1, OpKind.MATH, DtypeRule.FLOAT, "exp2"),
    _row("expm1", 1, OpKind.MATH, DtypeRule.FLOAT, "expm1"),
    _row("log", 1, OpKind.MATH, DtypeRule.FLOAT, "log"),
    _row("log2", 1, OpKind.MATH, DtypeRule.FLOAT, "log2"),
    _row("log1p", 1, OpKind.MATH, DtypeRule.FLOAT, "log1p"),
    _row("sin", 1, OpKind.MATH, DtypeRule.FLOAT, "sin"),
    _row("cos", 1, OpKind.MATH, DtypeRule.FLOAT, "cos"),
    _row("tanh", 1, OpKind.MATH, DtypeRule.FLOAT, "tanh"),
    _row("sigmoid", 1, OpKind.MATH, DtypeRule.FLOAT, "sigmoid"),
    _row("erf", 1, OpKind.MATH, DtypeRule.FLOAT, "erf"),
    _row("floor", 1, OpKind.MATH, DtypeRule.FLOAT, "floor"),
    _row("ceil", 1, OpKind.MATH, DtypeRule.FLOAT, "ceil"),
    _row("trunc", 1, OpKind.MATH, DtypeRule.FLOAT, "trunc"),
    _row("round", 1, OpKind.MATH, DtypeRule.FLOAT, "round"),  # half to even
    # Comparisons.
    _row("eq", 2, OpKind.COMPARE, DtypeRule.COMPARE, "eq", commutative=True),
    _row("ne", 2, OpKind.COMPARE, DtypeRule.COMPARE, "ne", commutative=True),
    _row("lt", 2, OpKind.COMPARE, DtypeRule.COMPARE, "lt"),
    _row("le", 2, OpKind.COMPARE, DtypeRule.COMPARE, "le"),
    _row("gt", 2, OpKind.COMPARE, DtypeRule.COMPARE, "gt"),
    _row("ge", 2, OpKind.COMPARE, DtypeRule.COMPARE, "ge"),
    # Bits. On bool these are the logical operations.
    _row("and", 2, OpKind.BITS, DtypeRule.BITS, "bitwise_and", commutative=True),
    _row("or", 2, OpKind.BITS, DtypeRule.BITS, "bitwise_or", commutative=True),
    _row("xor", 2, OpKind.BITS, DtypeRule.BITS, "bitwise_xor", commutative=True),
    _row("not", 1, OpKind.BITS, DtypeRule.BITS, "bitwise_not"),
    _row("shl", 2, OpKind.BITS, DtypeRule.INTEGER, "bitwise_left_shift"),
    _row("shr", 2, OpKind.BITS, DtypeRule.INTEGER, "bitwise_right_shift"),  # arithmetic
    # Selection and conversion.
    _row("where", 3, OpKind.SELECT, DtypeRule.SELECT),
    _row("cast", 1, OpKind.CAST, DtypeRule.CAST),
)

OPS: dict[str, OpRow] = {row.name: row for row in _ROWS}

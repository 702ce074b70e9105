"""Operations on constants alone, evaluated."""

from __future__ import annotations

from flexgen.ir.dtypes import ARITHMETIC_DTYPES, is_integer, shortest
from flexgen.ir.evaluate import evaluate_constant
from flexgen.ir.graph import Node, const
from flexgen.ir.ops import OPS, DtypeRule


def folded(node: Node) -> Node | None:
    """Return the value of an operation on constants alone; None for others, and for an integer divided by zero."""
    if OPS[node.op].rule is DtypeRule.LEAF or any(arg.op != "const" for arg in node.args):
        return None
    if not {node.dtype, *(arg.dtype for arg in node.args)} <= ARITHMETIC_DTYPES:
        return None
    divides = node.op in ("floordiv", "truncdiv", "mod", "fmod")
    if divides and is_integer(node.dtype) and node.args[1].attr == 0:
        return None
    value = evaluate_constant(node)
    return const(shortest(value, node.dtype) if isinstance(value, float) else value, node.dtype)

"""Values of scalar index expressions on the host, for the guard: exact Python integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

from flexgen.ir.graph import Node, topological

Number = int | float | bool

_OPERATIONS: Mapping[str, Callable[..., Number]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "abs": abs,
    "min": min,
    "max": max,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda value: not value,
    "where": lambda condition, yes, no: yes if condition else no,
}


def all_hold(conditions: Sequence[Node], names: Mapping[str, Number]) -> bool:
    """Whether every condition is true for the given inputs and scalars; False where one cannot be evaluated."""
    return all(host_value(condition, names) is True for condition in conditions)


def host_value(root: Node, names: Mapping[str, Number]) -> Number | None:
    """Return the value of an expression for the given inputs and scalars; None where it cannot be evaluated."""
    values: dict[Node, Number | None] = {}
    for node in topological(root):
        values[node] = _apply(node, [values[arg] for arg in node.args], names)
    return values[root]


def _apply(node: Node, args: list[Number | None], names: Mapping[str, Number]) -> Number | None:
    match node.op:
        case "const":
            return node.attr if not isinstance(node.attr, str) else None
        case "input" | "scalar":
            return names.get(str(node.attr))
        case "cast":
            return args[0] if not node.dtype.is_floating_point else None
    operation = _OPERATIONS.get(node.op)
    if operation is None or any(arg is None for arg in args):
        return None
    if node.op in ("floordiv", "mod") and args[1] == 0:
        return None
    return operation(*args)

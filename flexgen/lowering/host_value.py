"""Values of scalar index expressions on the host, for the guard: exact Python integers."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flexgen.ir.graph import Node, topological

Number = int | float | bool
_Function = Callable[[Mapping[str, Number]], Any]

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
    return predicate(conditions)(names)


def predicate(conditions: Sequence[Node]) -> Callable[[Mapping[str, Number]], bool]:
    """Return `all_hold` of some small conditions, for many calls: each expression becomes a function once."""
    functions = [_function(condition) for condition in conditions]

    def hold(names: Mapping[str, Number]) -> bool:
        try:
            return all([function(names) is True for function in functions])  # noqa: C419 (faster)
        except (_UnknownError, KeyError, ZeroDivisionError):
            return False

    return hold


class _UnknownError(Exception):
    """An expression has no value on the host."""


def _function(node: Node) -> _Function:
    match node.op:
        case "const":
            value = node.attr
            return (lambda names: value) if not isinstance(value, str) else _unknown
        case "input" | "scalar":
            return operator.itemgetter(str(node.attr))
        case "cast":
            return _function(node.args[0]) if not node.dtype.is_floating_point else _unknown
    operation = _OPERATIONS.get(node.op)
    args = [_function(arg) for arg in node.args]
    if operation is None:
        return _unknown
    return lambda names: operation(*[arg(names) for arg in args])


def _unknown(names: Mapping[str, Number]) -> Number:
    raise _UnknownError


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

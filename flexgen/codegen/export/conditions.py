"""Conditions over a launch's lengths and numbers, as Python for the host code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen.codegen.export.names import HostNames
from flexgen.errors import InternalError
from flexgen.ir.graph import Node, topological
from flexgen.ir.sizes import split_size_name

_INFIX: Mapping[str, str] = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "floordiv": "//",
    "mod": "%",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and": "and",
    "or": "or",
}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}
_SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
_LENGTHS = {"Q_LEN": "q_len", "KV_LEN": "kv_len"}
_COMPUTED = frozenset({*_INFIX, "neg", "not", "where", "min", "max", "abs"})


@dataclass(frozen=True, slots=True)
class ConditionText:
    """A condition over q_len, kv_len, captured numbers and captured tensors' sizes.

    Attributes:
        holds, fails: as a Python expression, and its opposite.
        values: the values of what it names, as the inside of an f-string.
    """

    holds: str
    fails: str
    values: str


def condition_text(node: Node, names: HostNames) -> ConditionText:
    """Return the text of a condition."""
    leaves = [part for part in topological(node) if part.op in ("input", "scalar")]
    values = ", ".join(f"{text} = {{{text}}}" for text in dict.fromkeys(_text(leaf, names) for leaf in leaves))
    if node.op not in _OPPOSITE:
        holds = _text(node, names, outermost=True)
        return ConditionText(holds, f"not ({holds})", values)
    op, (left, right) = node.op, (_text(arg, names) for arg in node.args)
    if node.args[0].op == "const":
        op, left, right = _SWAPPED[op], right, left
    return ConditionText(f"{left} {_INFIX[op]} {right}", f"{left} {_INFIX[_OPPOSITE[op]]} {right}", values)


def host_text(node: Node, inputs: Mapping[str, str]) -> str | None:
    """Return an expression of inputs, by their texts, for the host code; None where it needs more than they are."""
    for part in topological(node):
        known = part.op == "input" and part.attr in inputs
        number = part.op == "const" and not isinstance(part.attr, str)
        if not known and not number and part.op not in _COMPUTED and not _is_whole_cast(part):
            return None
    return _text(node, None, inputs, outermost=True)


def _is_whole_cast(node: Node) -> bool:
    return node.op == "cast" and not node.dtype.is_floating_point


def _text(node: Node, names: HostNames | None, inputs: Mapping[str, str] = _LENGTHS, *, outermost: bool = False) -> str:
    operands = [_text(arg, names, inputs) for arg in node.args]
    match node.op:
        case "const":
            return repr(node.attr)
        case "input" if node.attr in inputs:
            return inputs[str(node.attr)]
        case "scalar" if names is not None:
            size = split_size_name(node.attr)
            return f"{names.buffers[size[0]]}.shape[{size[1]}]" if size else names.scalars[str(node.attr)]
        case "cast":
            return _text(node.args[0], names, inputs, outermost=outermost)
        case "neg":
            return f"-{operands[0]}"
        case "not":
            text = f"not {operands[0]}"
        case "where":
            text = f"{operands[1]} if {operands[0]} else {operands[2]}"
        case "min" | "max" | "abs":
            return f"{node.op}({', '.join(_text(arg, names, inputs, outermost=True) for arg in node.args)})"
        case op if op in _INFIX:
            text = f" {_INFIX[op]} ".join(operands)
        case _:
            raise InternalError(f"a launch's condition holds {node.op}, which the host code cannot compute")
    return text if outermost else f"({text})"

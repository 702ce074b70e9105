"""Prints index expressions in infix notation for people: reasons, `explain`, pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from flexgen.ir.graph import Node, topological
from flexgen.ir.origins import Origins

# op: (symbol, binding strength); a stronger operator needs no parentheses inside a weaker one.
_INFIX: Mapping[str, tuple[str, int]] = {
    "or": ("|", 2),
    "xor": ("^", 3),
    "and": ("&", 4),
    "eq": ("==", 1),
    "ne": ("!=", 1),
    "lt": ("<", 1),
    "le": ("<=", 1),
    "gt": (">", 1),
    "ge": (">=", 1),
    "shl": ("<<", 5),
    "shr": (">>", 5),
    "add": ("+", 6),
    "sub": ("-", 6),
    "mul": ("*", 7),
    "div": ("/", 7),
    "floordiv": ("//", 7),
    "mod": ("%", 7),
}
_PREFIX = {"not": "~", "neg": "-"}
_CHAINS = ("and", "or", "xor", "add", "mul")
_UNARY, _ATOM = 8, 9
_LIMIT = 160

_Text = tuple[str, int]


def expression_text(node: Node, origins: Origins | None = None) -> str:
    """Return the expression in Python's notation, conversions of dtype left out, long ones shortened.

    Args:
        origins: where given, a bool below the root that the user named is shown by its name.
    """
    name = (lambda part: origins.variable(part) if part.dtype == torch.bool else None) if origins else _unnamed
    text = _Printer(name).print(node)[0]
    return text if len(text) <= _LIMIT else text[: _LIMIT - 4] + " ..."


def _unnamed(_node: Node) -> str | None:
    return None


class _Printer:
    def __init__(self, name: Callable[[Node], str | None]) -> None:
        self._name = name
        self._left = _LIMIT

    def print(self, node: Node, *, is_root: bool = True) -> _Text:
        name = None if is_root else self._name(node)
        if name is not None:
            return name, _ATOM
        self._left -= 1
        if self._left < 0:
            return "...", _ATOM
        match node.op:
            case "const":
                return _constant(node)
            case "input" | "scalar":
                return str(node.attr), _ATOM
            case "load":
                return f"{node.attr}[{', '.join(self._whole(_as_written(arg)) for arg in node.args)}]", _ATOM
            case "where":
                return self._choice(node)
            case "cast":
                return self.print(node.args[0], is_root=False)
            case op if op in _PREFIX:
                return f"{_PREFIX[op]}{self._operand(node.args[0], _UNARY)}", _UNARY
            case op if op in _INFIX:
                return self._infix(node)
        return f"{node.op}({', '.join(self._whole(arg) for arg in self._arguments(node))})", _ATOM

    def _whole(self, node: Node) -> str:
        return self.print(node, is_root=False)[0]

    def _operand(self, node: Node, strength: int) -> str:
        text, own = self.print(node, is_root=False)
        return text if own >= strength else f"({text})"

    def _infix(self, node: Node) -> _Text:
        symbol, strength = _INFIX[node.op]
        left = self._operand(node.args[0], strength if strength > 1 else strength + 1)
        right = self._operand(node.args[1], strength if node.op in _CHAINS else strength + 1)
        return f"{left} {symbol} {right}", strength

    def _choice(self, node: Node) -> _Text:
        condition, a, b = (self._operand(arg, 1) for arg in node.args)
        return f"{a} if {condition} else {b}", 0

    @staticmethod
    def _arguments(node: Node) -> list[Node]:
        """Operands, nested minima and maxima as one call."""
        if node.op not in ("min", "max"):
            return list(node.args)
        parts: list[Node] = []
        stack = [node]
        while stack:
            part = stack.pop()
            if part.op == node.op:
                stack.extend(reversed(part.args))
            else:
                parts.append(part)
        return parts


def _as_written(position: Node) -> Node:
    """Show table[i] for an index that counts from the end where it is negative, as the user wrote it."""
    if position.op != "where" or _has_size(position.args[2]) or not _has_size(position.args[1]):
        return position
    return position.args[2]


def _has_size(node: Node) -> bool:
    return any(part.op == "scalar" and ".size(" in str(part.attr) for part in topological(node))


def _constant(node: Node) -> _Text:
    value = node.attr
    if isinstance(value, bool) or not isinstance(value, int):
        return repr(value), _ATOM
    magnitude = abs(value)
    if magnitude >= 2**31 and magnitude & (magnitude - 1) == 0:
        return f"{'-' if value < 0 else ''}2**{magnitude.bit_length() - 1}", _UNARY
    return str(value), _ATOM if value >= 0 else _UNARY

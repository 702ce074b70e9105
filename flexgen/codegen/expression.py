"""Python expression text with its precedence, so that printers add exactly the parentheses needed."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Precedence(enum.IntEnum):
    """How tightly an expression binds, by Python's grammar."""

    COMPARE = 30
    OR = 40
    XOR = 45
    AND = 50
    SHIFT = 55
    ADD = 60
    MULTIPLY = 70
    UNARY = 80
    ATOM = 100


@dataclass(frozen=True, slots=True)
class Expression:
    """Text of one expression and the precedence of its outermost operator."""

    text: str
    precedence: Precedence = Precedence.ATOM

    def at(self, precedence: int) -> str:
        """Return the text, in parentheses if it binds less tightly than `precedence`."""
        return self.text if self.precedence >= precedence else f"({self.text})"

    @property
    def atom(self) -> str:
        return self.at(Precedence.ATOM)


def call(function: str, *args: Expression | str) -> Expression:
    """Return `function(args...)`."""
    return Expression(f"{function}({', '.join(arg if isinstance(arg, str) else arg.text for arg in args)})")


def binary(operator: str, precedence: Precedence, left: Expression, right: Expression) -> Expression:
    """Return `left operator right`; the operator groups to the left, comparisons do not chain."""
    left_at = precedence + 1 if precedence == Precedence.COMPARE else precedence
    return Expression(f"{left.at(left_at)} {operator} {right.at(precedence + 1)}", precedence)


def negate(operand: Expression, operator: str = "-") -> Expression:
    """Return `-operand` or another prefix operator."""
    return Expression(f"{operator}{operand.at(Precedence.UNARY)}", Precedence.UNARY)


def method(operand: Expression, text: str) -> Expression:
    """Return `operand.text`."""
    return Expression(f"{operand.atom}.{text}")

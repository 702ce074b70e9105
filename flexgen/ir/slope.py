"""The derivative of a score with respect to one value, kept as a product, so that what cancels is never computed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import reduce

import torch

from flexgen.ir.graph import Node, const, make

_LEAST, _GREATEST = 1e-30, 1e30  # numbers are folded while they and their reciprocals are normal in float32
_DIGITS = 15  # of a folded number: what float64 holds, less the noise of folding


def is_number(node: Node) -> bool:
    """Whether the value is a number of the user's: a constant or a captured scalar, or a conversion of one."""
    while node.op == "cast":
        node = node.args[0]
    return node.op in ("const", "scalar")


def converted(node: Node, dtype: torch.dtype) -> Node:
    return node if node.dtype == dtype else make("cast", node, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Slope:
    """`where(guard, number * powers * above / below, 0)`, a factor of 1 where a part is None.

    The guard is outermost, so that a branch which is not taken adds exactly 0 whatever its value is. Numbers are
    powers of their own: `cap * tanh(score / cap)` has a slope without `cap`, also where `cap` is known only when the
    kernel runs.

    Attributes:
        dtype: dtype of the slope and of its parts; float32 or float64.
        number: product of constants.
        powers: captured scalars and their exponents, none of which is 0, by name.
        above, below: what depends on more than numbers.
        guard: bool; None if the slope holds everywhere.
    """

    dtype: torch.dtype
    number: float = 1.0
    powers: tuple[tuple[Node, int], ...] = ()
    above: Node | None = None
    below: Node | None = None
    guard: Node | None = None

    def times(self, factor: Node) -> Slope:
        if is_number(factor):
            return self._by_number(factor, 1)
        return replace(self, above=self._product(self.above, converted(factor, self.dtype)))

    def over(self, divisor: Node) -> Slope:
        if is_number(divisor):
            return self._by_number(divisor, -1)
        above = self.above if self.below is None else self._quotient(self.above, self.below)
        return replace(self, above=above, below=converted(divisor, self.dtype))

    def scaled(self, number: float) -> Slope:
        product = self.number * number
        if number == 0.0 or _LEAST < abs(product) < _GREATEST:
            return replace(self, number=product)
        above = self._product(self.above, const(self.number, self.dtype))
        return replace(self, number=1.0, above=self._product(above, const(number, self.dtype)))

    def guarded(self, condition: Node) -> Slope:
        """Return the slope where the condition holds, and 0 elsewhere."""
        guard = condition if self.guard is None else make("and", self.guard, condition, dtype=torch.bool)
        return replace(self, guard=guard)

    def cast(self, dtype: torch.dtype) -> Slope:
        above, below = (None if part is None else converted(part, dtype) for part in (self.above, self.below))
        return replace(self, dtype=dtype, above=above, below=below)

    def plus(self, other: Slope) -> Slope:
        """Return the sum; of two branches of one condition it is a choice."""
        if self.guard is other.guard:
            return Slope(self.dtype, above=self._sum(self._core(), other._core()), guard=self.guard)
        fork = _fork(self.guard, other.guard)
        if fork is None:
            return Slope(self.dtype, above=self._sum(self.node(), other.node()))
        taken, rest = (self, other) if fork.first_is_taken else (other, self)
        chosen = make("where", fork.condition, taken._core(), rest._core(), dtype=self.dtype)
        return Slope(self.dtype, above=chosen, guard=fork.outer)

    @property
    def is_zero(self) -> bool:
        return self.number == 0.0

    def node(self) -> Node:
        """Return the slope as one value."""
        return self._choice(self._core())

    def of(self, grad: Node) -> Node:
        """Return the slope times `grad`. What depends on fewer axes than `grad` does is computed by itself."""
        incoming = converted(grad, self.dtype)
        core = self._core()
        if self.below is None or core.axes < grad.axes:
            return self._choice(incoming if core.attr == 1.0 else make("mul", incoming, core, dtype=self.dtype))
        above = self._product(self.above, self._numbers())
        return self._choice(self._quotient(self._product(incoming, above), self.below))

    def _by_number(self, node: Node, exponent: int) -> Slope:
        value = node.attr if node.op == "const" and isinstance(node.attr, int | float) else None
        if value is None:
            powers = dict(self.powers)
            powers[node] = powers.get(node, 0) + exponent
            kept = sorted(((scalar, power) for scalar, power in powers.items() if power), key=_name)
            return replace(self, powers=tuple(kept))
        if exponent == 1 and math.isfinite(value):
            return self.scaled(float(value))
        if exponent == -1 and math.isfinite(value) and value != 0:
            return self.scaled(1.0 / value)
        by = converted(node, self.dtype)
        return replace(self, above=self._product(self.above, by) if exponent == 1 else self._quotient(self.above, by))

    def _core(self) -> Node:
        """Return what the guard guards."""
        above = self._product(self.above, self._numbers())
        if self.below is not None:
            return self._quotient(above, self.below)
        return const(1.0, self.dtype) if above is None else above

    def _numbers(self) -> Node | None:
        number = float(f"{self.number:.{_DIGITS}g}")
        result = None if number == 1.0 else const(number, self.dtype)
        for scalar, power in self.powers:
            for _ in range(abs(power)):
                by = converted(scalar, self.dtype)
                result = self._product(result, by) if power > 0 else self._quotient(result, by)
        return result

    def _choice(self, core: Node) -> Node:
        if self.guard is None:
            return core
        return make("where", self.guard, core, const(0.0, self.dtype), dtype=self.dtype)

    def _product(self, left: Node | None, right: Node | None) -> Node | None:
        if left is None or right is None:
            return right if left is None else left
        return make("mul", left, right, dtype=self.dtype)

    def _quotient(self, dividend: Node | None, divisor: Node) -> Node:
        return make("div", const(1.0, self.dtype) if dividend is None else dividend, divisor, dtype=self.dtype)

    def _sum(self, left: Node, right: Node) -> Node:
        return make("add", left, right, dtype=self.dtype)


def total(slopes: Iterable[Slope]) -> Slope:
    """Return the sum of at least one slope; those that differ in their number alone are added up first."""
    alike: dict[Slope, float] = {}
    for slope in slopes:
        bare = replace(slope, number=1.0)
        alike[bare] = alike.get(bare, 0.0) + slope.number
    scaled = [replace(bare, number=number) for bare, number in alike.items()]
    return reduce(Slope.plus, [slope for slope in scaled if not slope.is_zero] or scaled[:1])


def _name(power: tuple[Node, int]) -> str:
    node = power[0]
    while node.op == "cast":
        node = node.args[0]
    return str(node.attr)


@dataclass(frozen=True, slots=True)
class _Fork:
    """Two guards that are the two outcomes of one condition, under an outer guard that they share."""

    outer: Node | None
    condition: Node
    first_is_taken: bool


def _fork(first: Node | None, second: Node | None) -> _Fork | None:
    if first is None or second is None:
        return None
    outer = None
    if not _are_opposite(first, second):
        if not (first.op == second.op == "and" and first.args[0] is second.args[0]):
            return None
        outer, first, second = first.args[0], first.args[1], second.args[1]
    if not _are_opposite(first, second):
        return None
    is_taken = second.op == "not" and second.args[0] is first
    return _Fork(outer, first if is_taken else second, is_taken)


def _are_opposite(first: Node, second: Node) -> bool:
    return (first.op == "not" and first.args[0] is second) or (second.op == "not" and second.args[0] is first)

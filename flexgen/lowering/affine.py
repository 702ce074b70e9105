"""Linear combinations of integer nodes: the normal form in which index expressions are compared and printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from flexgen.ir.graph import Axis, Node


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant + sum(coefficient * atom)`; atoms are int64 nodes, coefficients are never 0."""

    terms: Mapping[Node, int] = field(default_factory=lambda: MappingProxyType({}))
    constant: int = 0

    @classmethod
    def of(cls, terms: Iterable[tuple[Node, int]], constant: int = 0) -> Linear:
        """Collect equal atoms, in order of first appearance."""
        collected: dict[Node, int] = {}
        for atom, coefficient in terms:
            collected[atom] = collected.get(atom, 0) + coefficient
        return cls(MappingProxyType({atom: c for atom, c in collected.items() if c}), constant)

    @property
    def is_constant(self) -> bool:
        return not self.terms

    @property
    def atom(self) -> Node | None:
        """The node this is, when it is one atom and nothing else."""
        only = next(iter(self.terms.items()), None)
        return only[0] if only and len(self.terms) == 1 and only[1] == 1 and self.constant == 0 else None

    def __iter__(self) -> Iterator[tuple[Node, int]]:
        return iter(self.terms.items())

    def __add__(self, other: Linear) -> Linear:
        return self._plus(other, 1)

    def __sub__(self, other: Linear) -> Linear:
        return self._plus(other, -1)

    def _plus(self, other: Linear, factor: int) -> Linear:
        terms = dict(self.terms)
        for atom, c in other.terms.items():
            total = terms.get(atom, 0) + factor * c
            if total:
                terms[atom] = total
            else:
                del terms[atom]
        return Linear(MappingProxyType(terms), self.constant + factor * other.constant)

    def scaled(self, factor: int) -> Linear:
        terms = {atom: c * factor for atom, c in self.terms.items()} if factor else {}
        return Linear(MappingProxyType(terms), self.constant * factor)

    def plus(self, number: int) -> Linear:
        return Linear(self.terms, self.constant + number)

    def without(self, atom: Node) -> Linear:
        return Linear(
            MappingProxyType({other: c for other, c in self.terms.items() if other is not atom}), self.constant
        )

    def replaced(self, atom: Node, by: Linear) -> Linear:
        return self.without(atom) + by.scaled(self.terms[atom])


@dataclass(frozen=True, slots=True)
class Affine:
    """`coefficient * core + rest`, where only the core depends on the axis that is solved for."""

    coefficient: int
    core: Node
    rest: Linear


def split(linear: Linear, axis: Axis) -> Affine | None:
    """Return the linear as an affine function of its one atom that depends on the axis; None if there are several."""
    cores = [(atom, c) for atom, c in linear if axis in atom.axes]
    if len(cores) != 1:
        return None
    core, coefficient = cores[0]
    return Affine(coefficient, core, linear.without(core))


def depends(linear: Linear, axis: Axis) -> bool:
    return any(axis in atom.axes for atom, _ in linear)

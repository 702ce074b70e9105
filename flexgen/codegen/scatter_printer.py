"""Prints how a backward kernel accumulates the gradient of a captured buffer."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.codegen.source import Arg


@dataclass(frozen=True, slots=True)
class PrintedScatter:
    """Statements that add one scatter's contributions.

    Attributes:
        name: the accumulator that the loop carries, where the index is the same for all tiles of a program.
        zero: its initial value.
        value_name, value: the contribution of each (query, key) pair of a tile.
        live: where a contribution counts, "" everywhere.
        accumulate: the statement that adds a tile to the carried accumulator; "" where each tile is written at once.
        address, mask: where it goes.
        total: what the carried accumulator adds in the end.
        args: captured values and gradient buffers that the statements need.
    """

    name: str
    zero: str
    value_name: str
    value: str
    live: str
    accumulate: str
    address: str
    mask: str
    total: str
    args: tuple[Arg, ...]

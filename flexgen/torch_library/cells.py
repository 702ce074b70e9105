"""Closure cells that mods share with the code that torch.compile is tracing.

Once the traced code has read a cell by its variable's name, torch.compile shows nothing of it as part of a function's
`__closure__`; and it stops where code reads by name a cell that was shown as part of a `__closure__` before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flexgen.capture.slots import StepKind, discover


def share_cells(*mods: Callable[..., Any] | None) -> bool:
    """Whether the code that is being traced has read a cell by name that one of the mods reads too."""
    known = _known_cells()
    return any(cell in known and hasattr(known[cell], "pre_existing_contents") for cell in _cells(mods))


def forget_cells(*mods: Callable[..., Any] | None) -> None:
    """Let the traced code read by name, from now on, what was shown to it as part of a mod's `__closure__`."""
    known = _known_cells()
    for cell in _cells(mods):
        if cell in known and not hasattr(known[cell], "pre_existing_contents"):
            del known[cell]


def _known_cells() -> dict[int, Any]:
    """Return what torch.compile has met so far, by identity; nothing where its internals are others than today's.

    Cells that are shared then stop a trace with an error of torch.compile's, and nothing else changes.
    """
    try:
        translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
        known: dict[int, Any] = translator.output.side_effects.id_to_variable
    except AttributeError:
        return {}
    return known


def _cells(mods: tuple[Callable[..., Any] | None, ...]) -> Iterator[int]:
    named = {f"mod{at}": mod for at, mod in enumerate(mods) if mod is not None}
    for slot in discover(named):
        if slot.step.kind is StepKind.CELL:
            yield int(slot.step.place[1])  # type: ignore[call-overload]

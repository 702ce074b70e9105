"""Re-reading what mods captured, in plain Python that torch.compile traces into: it guards what is read, and lifts it.

The probe does the same faster, with generated code that is opaque to torch.compile. Here each value is read from its
parent by one ordinary access, so torch.compile knows where every tensor and number comes from: a tensor becomes an
input of its graph, a number a guard or a symbol.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from flexgen.capture.probe import Bindings
from flexgen.capture.slots import Slot, SlotKind
from flexgen.errors import CaptureError
from flexgen.ir.graph import Mods

Check = Literal["nothing", "equal", "code", "length", "same"]

_SIMPLE = (bool, type(None), torch.dtype, torch.device, enum.Enum)


@dataclass(frozen=True)
class Visit:
    """One value to read.

    Attributes:
        parent: which earlier value it is read from; None for a mod itself.
        access, key: how: the value of a StepKind, and the step's key.
        check, expected: what must hold of it for the capture to hold; "same" as the earlier value `expected`.
    """

    parent: int | None
    access: str
    key: Any
    check: Check
    expected: Any


@dataclass(frozen=True)
class Reader:
    """How to read one capture's tensors and numbers again.

    Attributes:
        visits: parents first.
        buffers: for each buffer of the mods, the visit that reads it, or a tensor that is read nowhere.
        sizes: for each buffer, those of its sizes that the capture holds for alone; None for any size.
        integers, floats: for each scalar of that dtype, the visit that reads it.
    """

    visits: tuple[Visit, ...]
    buffers: tuple[int | torch.Tensor, ...]
    sizes: tuple[tuple[int | None, ...], ...]
    integers: tuple[int, ...]
    floats: tuple[int, ...]


@dataclass(frozen=True)
class CapturedValues:
    """Captured tensors and numbers, each in the order of the mods' declarations."""

    buffers: list[torch.Tensor]
    integers: list[int]
    floats: list[float]


def read(reader: Reader, score_mod: Any, mask_mod: Any) -> CapturedValues:
    """Return what the mods hold now.

    Raises:
        CaptureError: it is not what was captured, as when traced code changes what a mod reads.
    """
    values: list[Any] = []
    for visit in reader.visits:
        if visit.access == "root":
            value = score_mod if visit.key == "score_mod" else mask_mod
        else:
            value = _step(values[visit.parent], visit)  # type: ignore[index]
        if not _holds(value, visit, values):
            raise _changed(visit.key)
        values.append(value)
    buffers = [values[at] if isinstance(at, int) else at for at in reader.buffers]
    for buffer, sizes in zip(buffers, reader.sizes, strict=True):
        for actual, size in zip(buffer.shape, sizes, strict=True):
            if size is not None and actual != size:  # where torch.compile traces: a guard, of a size it made a symbol
                raise _changed("shape")
    return CapturedValues(buffers, [values[at] for at in reader.integers], [values[at] for at in reader.floats])


def _changed(key: Any) -> CaptureError:
    return CaptureError(
        f"what the mod reads as {key!r} changed while it was traced",
        fix="change what a mod captures outside of the compiled region",
    )


def _step(parent: Any, visit: Visit) -> Any:
    key = visit.key
    match visit.access:
        case "cell":
            return parent.__closure__[key].cell_contents
        case "default":
            return parent.__defaults__[key]
        case "keyword default":
            return parent.__kwdefaults__[key]
        case "global":
            return parent.__globals__[key]
        case "class":
            found = getattr(parent if isinstance(parent, type) else parent.__class__, key)
            return found.fget if isinstance(found, property) else found
        case "item":
            return parent[key]
        case "partial arg":
            return parent.args[key]
        case "partial keyword":
            return parent.keywords[key]
    return getattr(parent, key)


def _holds(value: Any, visit: Visit, values: list[Any]) -> bool:
    match visit.check:
        case "equal":
            return bool(value == visit.expected)
        case "code":
            return bool(value.__code__ is visit.expected)
        case "length":
            return bool(len(value) == visit.expected)
        case "same":
            return bool(value is values[visit.expected])
    return True


def reader_of(slots: Sequence[Slot], bindings: Bindings, mods: Mods) -> Reader:
    """Return the reader of the capture that used the slots so."""
    places: dict[int, int] = {}  # slot -> visit
    visits: list[Visit] = []
    for slot in slots:
        if slot.kind is SlotKind.SAME_PLACE:
            places[slot.index] = places[slot.same_as]  # type: ignore[index]
            continue
        places[slot.index] = len(visits)
        visits.append(_visit(slot, places, slot.index in bindings.run_time))
    numbers = list(zip(mods.scalars, (places[at] for at in bindings.scalars), strict=True))
    return Reader(
        visits=tuple(visits),
        buffers=tuple(places[at] if isinstance(at, int) else at for at in bindings.buffers),
        sizes=tuple(buffer.sizes for buffer in mods.buffers),
        integers=tuple(place for scalar, place in numbers if not scalar.dtype.is_floating_point),
        floats=tuple(place for scalar, place in numbers if scalar.dtype.is_floating_point),
    )


def _visit(slot: Slot, places: dict[int, int], is_run_time: bool) -> Visit:
    step, parent = slot.step, None if slot.parent is None else places[slot.parent]
    if is_run_time:
        return Visit(parent, step.kind.value, step.key, "nothing", None)
    return Visit(parent, step.kind.value, step.key, *_check(slot, places))


def _check(slot: Slot, places: dict[int, int]) -> tuple[Check, Any]:
    """Return what to compare a value with. Types, and what the operator gets, torch.compile guards by itself."""
    value: Any = slot.value
    match slot.kind:
        case SlotKind.NUMBER if value != value:
            return "nothing", None  # nan: torch.compile guards it as the constant that it is
        case SlotKind.NUMBER | SlotKind.TEXT:
            return "equal", value
        case SlotKind.CODE:
            return "code", value.__code__
        case SlotKind.SEQUENCE | SlotKind.MAPPING:
            return "length", len(value)
        case SlotKind.SAME_OBJECT if isinstance(value, torch.Tensor | types.FunctionType):
            return "same", places[slot.same_as]  # type: ignore[index]
        case SlotKind.OBJECT if isinstance(value, _SIMPLE):
            return "equal", value
    return "nothing", None

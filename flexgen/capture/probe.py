"""Re-reading what mods captured, without tracing: generated accessors and guards, a few microseconds in all."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.capture.contents import contents_of
from flexgen.capture.slots import Slot, SlotKind
from flexgen.ir.graph import Buffer

Number = int | float
Found = tuple[tuple[torch.Tensor, ...], tuple[Number, ...]]
Probe = Callable[..., Found | None]


@dataclass(frozen=True, slots=True)
class Bindings:
    """How the slots were used by the capture that a probe guards.

    Attributes:
        touched: the buffer that describes the tensor at a slot, where the trace touched it.
        buffers: for each buffer of the mods, in order, the slot that holds it, or a pinned tensor.
        scalars: for each scalar of the mods, in order, the slot that holds it.
        run_time: the number slots whose value is free.
    """

    touched: Mapping[int, Buffer]
    buffers: Sequence[int | torch.Tensor]
    scalars: Sequence[int]
    run_time: frozenset[int]


class _Text:
    """The generated function's lines and the constants that they refer to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {
            "Tensor": torch.Tensor,
            "MethodType": types.MethodType,
            "partial": functools.partial,
            "contents_of": contents_of,
            "LOW": -(2**63),
            "HIGH": 2**63,
        }

    def constant(self, value: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def miss_if(self, condition: str) -> None:
        self.lines.append(f"    if {condition}: return None")


def _tensor_guard(text: _Text, name: str, tensor: torch.Tensor, buffer: Buffer) -> str:
    """Guard dtype, rank, device, gradient, the strides that are 0 or 1, and the sizes that the mod read."""
    checks = [
        f"{name}.dtype is not {text.constant(buffer.dtype)}",
        f"{name}.dim() != {buffer.rank}",
        f"{name}.device != {text.constant(tensor.device)}",
        f"{name}.requires_grad is not {buffer.requires_grad}",
        f"{name}.is_neg()",
    ]
    checks += [f"{name}.stride({i}) != {kind}" for i, kind in enumerate(buffer.strides) if kind != "*"]
    checks += [f"{name}.size({i}) != {size}" for i, size in enumerate(buffer.sizes) if size is not None]
    return " or ".join(checks)


def _number_guard(name: str, value: Number, *, is_run_time: bool) -> str:
    wrong_type = f"{name}.__class__ is not {type(value).__name__}"
    if is_run_time:
        return wrong_type if isinstance(value, float) else f"{wrong_type} or not LOW <= {name} < HIGH"
    if isinstance(value, float) and (value == 0 or math.isnan(value)):  # -0.0 == 0.0, and nan != nan
        return f"{wrong_type} or repr({name}) != {repr(value)!r}"
    if isinstance(value, float) and math.isinf(value):
        return f"{wrong_type} or repr({name}) != {repr(value)!r}"
    return f"{wrong_type} or {name} != {value!r}"


def _guard(text: _Text, slot: Slot, name: str, bindings: Bindings) -> str | None:
    """Return the condition under which the slot's value is not what the capture saw."""
    value: Any = slot.value
    match slot.kind:
        case SlotKind.TENSOR:
            buffer = bindings.touched.get(slot.index)
            return f"not isinstance({name}, Tensor)" if buffer is None else _tensor_guard(text, name, value, buffer)
        case SlotKind.NUMBER:
            return _number_guard(name, value, is_run_time=slot.index in bindings.run_time)
        case SlotKind.TEXT:
            return f"{name} != {text.constant(value)}"
        case SlotKind.CODE:
            return f"{name}.__code__ is not {text.constant(value.__code__)}"
        case SlotKind.METHOD if isinstance(value, functools.partial):
            bound = f"len({name}.args) != {len(value.args)} or list({name}.keywords) != {list(value.keywords)!r}"
            return f"{name}.__class__ is not partial or {bound}"
        case SlotKind.METHOD:
            return f"{name}.__class__ is not MethodType"
        case SlotKind.SEQUENCE:
            return f"{name}.__class__ is not {text.constant(type(value))} or len({name}) != {len(value)}"
        case SlotKind.MAPPING:
            return f"{name}.__class__ is not {text.constant(type(value))} or list({name}) != {list(value)!r}"
        case SlotKind.CONTENTS:
            kind, held = text.constant(type(value)), text.constant(contents_of(value))
            return f"{name}.__class__ is not {kind} or contents_of({name}) != {held}"
        case SlotKind.OBJECT:
            return f"{name} is not {text.constant(value)}"
        case SlotKind.SAME_OBJECT:
            return f"{name} is not v{slot.same_as}"
        case SlotKind.SAME_PLACE:
            return None


def compile_probe(roots: Sequence[str], slots: Sequence[Slot], bindings: Bindings) -> Probe:
    """Return a function of the mods that gives their tensors and numbers now, or None if a guard misses.

    The slots stand parents first, so each access has its parent's value at hand; a value that can no longer be
    read (an attribute that is gone) is a miss.
    """
    text = _Text()
    for slot in slots:
        condition = _guard(text, slot, f"v{slot.index}", bindings)
        if condition is None:
            continue
        parent = "" if slot.parent is None else f"v{_holder(slots, slot.parent)}"
        text.lines.append(f"    v{slot.index} = {slot.step.access.replace('{}', parent, 1)}")
        text.miss_if(condition)
    buffers = [f"v{at}" if isinstance(at, int) else text.constant(at) for at in bindings.buffers]
    scalars = [f"v{_holder(slots, at)}" for at in bindings.scalars]
    text.lines.append(f"    return ({_tuple(buffers)}), ({_tuple(scalars)})")
    return _compiled(roots, text)


def _holder(slots: Sequence[Slot], index: int) -> int:
    """Return the slot whose variable holds the value at a slot."""
    slot = slots[index]
    return slot.same_as if slot.kind is SlotKind.SAME_PLACE and slot.same_as is not None else index


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def _compiled(roots: Sequence[str], text: _Text) -> Probe:
    source = "\n".join([f"def read({', '.join(roots)}):", *text.lines])
    namespace = dict(text.constants)
    exec(compile(source, "<flexgen capture guards>", "exec"), namespace)
    read: Callable[..., Found | None] = namespace["read"]

    def probe(*mods: object) -> Found | None:
        try:
            return read(*mods)
        except (AttributeError, ValueError, LookupError, TypeError):
            return None  # a cell is empty, an attribute or a key is gone

    return probe

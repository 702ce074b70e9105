"""Substitution: a copy of a mod in which some captured numbers are replaced, everything else shared."""

from __future__ import annotations

import copy
import functools
import types
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from flexgen.capture.slots import Slot, StepKind


class CannotSubstitute(Exception):
    """A number is reached through something that cannot be copied (a class, an object that refuses)."""


def _affected(slots: Sequence[Slot], replaced: Mapping[int, object]) -> set[int]:
    """Return the slots that hold, at any depth, a replaced number; references back to such a slot count too."""
    affected = set(replaced)
    while True:
        size = len(affected)
        for slot in reversed(slots):
            if slot.same_as is not None and slot.same_as in affected:
                affected.add(slot.index)
            if slot.index in affected and slot.parent is not None:
                affected.add(slot.parent)
        if len(affected) == size:
            return affected


class _Rebuilder:
    def __init__(self, slots: Sequence[Slot], replaced: Mapping[int, object]) -> None:
        self._affected = _affected(slots, replaced)
        self._children: dict[int, list[Slot]] = {}
        self._slots = slots
        self._done: dict[int, Any] = dict(replaced)
        for slot in slots:
            if slot.parent is not None and slot.index in self._affected:
                self._children.setdefault(slot.parent, []).append(slot)

    def value(self, slot: Slot) -> Any:
        if slot.same_as is not None:
            return self.value(self._slots[slot.same_as])
        if slot.index not in self._affected:
            return slot.value
        if slot.index not in self._done:
            self._done[slot.index] = self._copy(slot)
        return self._done[slot.index]

    def _copy(self, slot: Slot) -> Any:
        children = self._children.get(slot.index, [])
        if any(child.step.kind in (StepKind.CLASS, StepKind.COMPUTED) for child in children):
            raise CannotSubstitute(slot.path)
        match slot.value:
            case types.FunctionType() as function:
                return self._function(slot, function, children)
            case types.MethodType() as method:
                return types.MethodType(
                    *self._parts(children, {"__func__": method.__func__, "__self__": method.__self__})
                )
            case functools.partial() as partial:
                return self._partial(partial, children)
            case list() | tuple() | deque() | dict() as container:
                return self._container(container, children)
        return self._object(slot, children)

    def _parts(self, children: Sequence[Slot], parts: dict[str, Any]) -> list[Any]:
        parts.update({str(child.step.key): self.value(child) for child in children})
        return list(parts.values())

    def _function(self, slot: Slot, function: types.FunctionType, children: Sequence[Slot]) -> types.FunctionType:
        """Copy the function before its children, so that a function that refers to itself finds its own copy."""
        cells = [types.CellType() if cell_is_new else cell for cell_is_new, cell in self._cells(function, children)]
        namespace = function.__globals__
        if any(child.step.kind is StepKind.GLOBAL for child in children):
            namespace = dict(namespace)
        new = types.FunctionType(function.__code__, namespace, function.__name__, None, tuple(cells))
        new.__dict__.update(function.__dict__)
        new.__qualname__, new.__module__ = function.__qualname__, function.__module__
        self._done[slot.index] = new
        defaults, keywords = list(function.__defaults__ or ()), dict(function.__kwdefaults__ or {})
        places: dict[StepKind, Any] = {
            StepKind.GLOBAL: namespace,
            StepKind.DEFAULT: defaults,
            StepKind.KEYWORD_DEFAULT: keywords,
            StepKind.ATTRIBUTE: new.__dict__,
        }
        for child in children:
            if child.step.kind is StepKind.CELL:
                cells[int(child.step.key)].cell_contents = self.value(child)
            else:
                places[child.step.kind][child.step.key] = self.value(child)
        new.__defaults__, new.__kwdefaults__ = tuple(defaults) or None, keywords or None
        return new

    def _cells(self, function: types.FunctionType, children: Sequence[Slot]) -> list[tuple[bool, types.CellType]]:
        new = {child.step.key for child in children if child.step.kind is StepKind.CELL}
        return [(i in new, cell) for i, cell in enumerate(function.__closure__ or ())]

    def _partial(self, partial: functools.partial[Any], children: Sequence[Slot]) -> functools.partial[Any]:
        func, args, keywords = partial.func, list(partial.args), dict(partial.keywords)
        for child in children:
            match child.step.kind:
                case StepKind.FUNCTION:
                    func = self.value(child)
                case StepKind.PARTIAL_ARG:
                    args[int(child.step.key)] = self.value(child)
                case _:
                    keywords[str(child.step.key)] = self.value(child)
        return functools.partial(func, *args, **keywords)

    def _container(self, container: Any, children: Sequence[Slot]) -> Any:
        new = {child.step.key: self.value(child) for child in children}
        if isinstance(container, dict):
            return {**container, **new}
        items = [new.get(i, item) for i, item in enumerate(container)]
        if isinstance(container, list):
            return items
        if isinstance(container, deque):
            return deque(items, container.maxlen)
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)

    def _object(self, slot: Slot, children: Sequence[Slot]) -> Any:
        """Copy an object without running its code: a fresh instance with the same dictionary, partly replaced."""
        original = slot.value
        if isinstance(original, type):
            raise CannotSubstitute(slot.path)
        new = self._done[slot.index] = _shallow_copy(original)
        for child in children:
            self._set_attribute(new, original, child)
        return new

    def _set_attribute(self, copy: Any, original: object, child: Slot) -> None:
        if not hasattr(copy, "__dict__"):
            object.__setattr__(copy, str(child.step.key), self.value(child))
            return
        table = child.step.access.removeprefix("{}.").partition("[")[0]
        if table in ("_parameters", "_buffers", "_modules"):
            if copy.__dict__[table] is getattr(original, table):
                copy.__dict__[table] = dict(copy.__dict__[table])
            copy.__dict__[table][child.step.key] = self.value(child)
        else:
            copy.__dict__[str(child.step.key)] = self.value(child)


def _shallow_copy(original: object) -> Any:
    """Return another object with the same attributes, whose dictionary (if it has one) is its own."""
    if not hasattr(original, "__dict__"):  # __slots__
        return copy.copy(original)
    new = _bare_instance(original)
    new.__dict__.update(original.__dict__)
    return new


def _bare_instance(original: object) -> Any:
    """Return an instance of the same class without `__init__`; classes written in C want their own `__new__`."""
    if isinstance(original, types.ModuleType):
        return types.ModuleType(original.__name__)
    owner = type(original)
    try:
        return object.__new__(owner)
    except TypeError:
        return owner.__new__(owner)


def substitute(slots: Sequence[Slot], replaced: Mapping[int, object]) -> dict[str, Any]:
    """Return the mods, by name, with the numbers at the given slots replaced. Shared state is never modified.

    Raises:
        CannotSubstitute: a number is reached through something that cannot be copied.
    """
    rebuilder = _Rebuilder(slots, replaced)
    roots = [slot for slot in slots if slot.parent is None]
    try:
        return {str(root.step.key): rebuilder.value(root) for root in roots}
    except (TypeError, AttributeError, RecursionError) as error:
        raise CannotSubstitute(str(error)) from error

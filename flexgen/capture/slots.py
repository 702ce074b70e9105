"""Which values a callable can read: closure cells, defaults, attributes, partial arguments, globals, and theirs."""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from flexgen.capture.contents import contents_of

# Code of these is not descended into through globals: it is not the user's, and it does not change.
_FOREIGN = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton", "sympy", "einops", "jaxtyping", "flexgen"}
_MAX_SLOTS = 4000
_MAX_ITEMS = 512
_ATTRIBUTE_READS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"})
_GLOBAL_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ANY_NAME = "*"  # among names of attributes: code makes some of them up, as in getattr(self, f"window_{kind}")


class SlotKind(enum.Enum):
    """How a value is guarded."""

    TENSOR = "tensor"
    NUMBER = "number"  # an int or a float, never a bool
    TEXT = "text"  # str and bytes, by equality
    CODE = "code"  # a Python function, by its code object
    METHOD = "method"  # a bound method or a partial: its parts are slots of their own
    SEQUENCE = "sequence"  # list, tuple or deque: type and length; items are slots of their own
    MAPPING = "mapping"  # dict: its keys; values are slots of their own
    CONTENTS = "contents"  # a set, an array or a long list: type, and a copy of what it holds
    OBJECT = "object"  # by identity; the attributes that the code names are slots of their own
    SAME_OBJECT = "same object"  # an object that an earlier slot holds, by identity with it
    SAME_PLACE = "same place"  # a place that an earlier slot reads: needs no guard


class StepKind(enum.Enum):
    """How a slot is reached from its parent; tells how to substitute it."""

    ROOT = "root"
    CELL = "cell"
    DEFAULT = "default"
    KEYWORD_DEFAULT = "keyword default"
    GLOBAL = "global"
    PARTIAL_ARG = "partial arg"
    PARTIAL_KEYWORD = "partial keyword"
    FUNCTION = "function"  # of a partial or a bound method
    RECEIVER = "receiver"  # of a bound method
    ATTRIBUTE = "attribute"
    ITEM = "item"
    CLASS = "class"  # a function found on the class; it cannot be substituted
    COMPUTED = "computed"  # an attribute that a descriptor or `__getattr__` gives; it cannot be substituted


@dataclass(frozen=True, slots=True)
class Step:
    """One step from a parent's value: `access` is Python text with `{}` for the parent."""

    kind: StepKind
    key: str | int
    access: str
    name: str
    place: tuple[object, ...]
    value: object = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Slot:
    """One value that a mod can read.

    Attributes:
        index: position in the list of slots; parents come first.
        parent: index of the parent slot, or None for a mod itself.
        path: the whole access as Python text; names the place across captures.
        same_as: for SAME_OBJECT and SAME_PLACE, the index of the slot that holds the value.
    """

    index: int
    parent: int | None
    step: Step
    path: str
    kind: SlotKind
    same_as: int | None = None

    @property
    def value(self) -> object:
        return self.step.value


@dataclass(frozen=True, slots=True)
class _Reads:
    """The global and attribute names that a code object (with the functions nested in it) reads, in order."""

    globals: tuple[str, ...]
    attributes: tuple[str, ...]


@functools.lru_cache(maxsize=1024)
def _reads(code: types.CodeType) -> _Reads:
    global_names: dict[str, None] = {}
    attributes: dict[str, None] = {}
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_READS:
            global_names[instruction.argval] = None
        elif instruction.opname in _ATTRIBUTE_READS:
            attributes[instruction.argval] = None
    if not global_names.keys().isdisjoint(("getattr", "vars")) or "__dict__" in attributes:
        attributes[_ANY_NAME] = None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            nested = _reads(constant)
            global_names.update(dict.fromkeys(nested.globals))
            attributes.update(dict.fromkeys(nested.attributes))
        elif isinstance(constant, str) and constant.isidentifier():
            attributes[constant] = None  # getattr(self, "bias")
    return _Reads(tuple(global_names), tuple(attributes))


def _is_foreign(module_name: object) -> bool:
    return isinstance(module_name, str) and module_name.partition(".")[0] in _FOREIGN


def is_foreign_function(function: types.FunctionType) -> bool:
    """Whether the function belongs to torch, the standard library or another package that mods only call."""
    return _is_foreign(function.__module__)


def _kind(value: object) -> SlotKind:
    match value:
        case torch.Tensor():
            return SlotKind.TENSOR
        case bool():
            return SlotKind.OBJECT
        case int() | float() if type(value) in (int, float):
            return SlotKind.NUMBER
        case str() | bytes():
            return SlotKind.TEXT
        case types.FunctionType():
            return SlotKind.CODE
        case types.MethodType() | functools.partial():
            return SlotKind.METHOD
        case list() | tuple() | deque() if len(value) <= _MAX_ITEMS:
            return SlotKind.SEQUENCE
        case dict() if len(value) <= _MAX_ITEMS and all(map(_is_plain_key, value)):
            return SlotKind.MAPPING
    return SlotKind.OBJECT if contents_of(value) is None else SlotKind.CONTENTS


def _is_plain_key(key: object) -> bool:
    """Whether a key of a dict can be written down."""
    return type(key) in (str, int, bool, bytes) or (type(key) is tuple and all(map(_is_plain_key, key)))


def _cell_steps(function: types.FunctionType) -> Iterator[Step]:
    for i, (name, cell) in enumerate(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet: reading it is the mod's own NameError
            continue
        yield Step(StepKind.CELL, i, f"{{}}.__closure__[{i}].cell_contents", name, ("cell", id(cell)), value)


def _default_steps(function: types.FunctionType) -> Iterator[Step]:
    code, defaults = function.__code__, function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for i, value in enumerate(defaults):
        name = code.co_varnames[first + i]
        yield Step(StepKind.DEFAULT, i, f"{{}}.__defaults__[{i}]", name, ("default", id(function), i), value)
    for name, value in (function.__kwdefaults__ or {}).items():
        access = f"{{}}.__kwdefaults__[{name!r}]"
        yield Step(StepKind.KEYWORD_DEFAULT, name, access, name, ("kwdefault", id(function), name), value)


def _global_steps(function: types.FunctionType) -> Iterator[Step]:
    namespace = function.__globals__
    for name in _reads(function.__code__).globals:
        if name in namespace and not _is_foreign_name(namespace[name]):
            place = ("global", id(namespace), name)
            yield Step(StepKind.GLOBAL, name, f"{{}}.__globals__[{name!r}]", name, place, namespace[name])


def _is_foreign_name(value: object) -> bool:
    """Whether a global is a module, class or function that is not the user's: it needs no guard."""
    if isinstance(value, types.ModuleType):
        return _is_foreign(value.__name__)
    return isinstance(value, type | types.BuiltinFunctionType | types.FunctionType) and _is_foreign(value.__module__)


def _function_steps(function: types.FunctionType) -> Iterator[Step]:
    yield from _cell_steps(function)
    yield from _default_steps(function)
    if not is_foreign_function(function):
        yield from _global_steps(function)


def _method_steps(method: types.MethodType) -> Iterator[Step]:
    receiver, function = method.__self__, method.__func__
    place = ("receiver", id(receiver), id(function))
    yield Step(StepKind.RECEIVER, "__self__", "{}.__self__", "self", place, receiver)
    is_of_function = isinstance(receiver, type) and issubclass(receiver, torch.autograd.Function)
    if is_of_function and _is_foreign(function.__module__):
        return  # its `apply`, into which torch.compile does not look
    yield Step(StepKind.FUNCTION, "__func__", "{}.__func__", "function", ("function", id(function)), function)


def _partial_steps(partial: functools.partial[object]) -> Iterator[Step]:
    yield Step(StepKind.FUNCTION, "func", "{}.func", "function", ("func", id(partial)), partial.func)
    names = _parameter_names(partial.func)
    for i, value in enumerate(partial.args):
        name = names[i] if i < len(names) else f"argument_{i}"
        yield Step(StepKind.PARTIAL_ARG, i, f"{{}}.args[{i}]", name, ("partial", id(partial), i), value)
    for name, value in partial.keywords.items():
        access = f"{{}}.keywords[{name!r}]"
        yield Step(StepKind.PARTIAL_KEYWORD, name, access, name, ("partial", id(partial), name), value)


def _parameter_names(function: Callable[..., object]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def _item_steps(
    value: list[object] | tuple[object, ...] | deque[object] | dict[object, object], name: str
) -> Iterator[Step]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        label = key if isinstance(key, str) else f"{name}_{key}"
        yield Step(StepKind.ITEM, key, f"{{}}[{key!r}]", label, ("item", id(value), key), item)  # type: ignore[arg-type]


_MISSING = object()


def _attribute_steps(value: object, attributes: tuple[str, ...]) -> Iterator[Step]:
    """Yield the attributes, among those that the code names, that an object holds itself or finds on its class."""
    own = getattr(value, "__dict__", {})
    made_up = _plain_names(own) if _ANY_NAME in attributes else ()
    for name in dict.fromkeys((*attributes, *made_up, *_state_of_foreign_module(value))):
        if name in own and not (isinstance(value, type) and isinstance(own[name], staticmethod | classmethod)):
            yield Step(StepKind.ATTRIBUTE, name, f"{{}}.{name}", name, ("attribute", id(value), name), own[name])
        else:  # a method of a class, too: reading it gives no `staticmethod`, but what is wrapped in it
            yield from tuple(_registered_step(value, name)) or _computed_step(value, name)
    yield from _call_steps(value)


def _plain_names(own: Mapping[str, object]) -> Iterator[str]:
    """Yield the names of numbers and texts, which are cheap to guard."""
    return (name for name, value in own.items() if value is None or type(value) in (bool, int, float, str))


def _state_of_foreign_module(value: object) -> Iterator[str]:
    """Yield the names of what a module of torch's own holds, as Sequential its modules: its code is not looked at."""
    if isinstance(value, torch.nn.Module) and _is_foreign(type(value).__module__):
        for table in (value._parameters, value._buffers, value._modules, value.__dict__):
            yield from (name for name in table if not name.startswith("_"))


def _computed_step(value: object, name: str) -> Iterator[Step]:
    """Yield an attribute that a descriptor or a `__getattr__` gives, where it is the same each time."""
    owner = type(value)
    if isinstance(value, type | torch.nn.Module) or _is_foreign(owner.__module__):
        return
    on_class = inspect.getattr_static(owner, name, _MISSING)
    if on_class is _MISSING and not hasattr(owner, "__getattr__"):
        return
    try:
        found, again = getattr(value, name), getattr(value, name)
    except Exception:  # there is no such attribute; or it is the user's code that fails, at the read that the mod makes
        return
    is_plain = _kind(found) in (SlotKind.NUMBER, SlotKind.TEXT) and type(found) is type(again) and found == again
    if found is again or is_plain:
        yield Step(StepKind.COMPUTED, name, f"{{}}.{name}", name, ("attribute", id(value), name), found)


def _own_steps(function: types.FunctionType, attributes: tuple[str, ...]) -> Iterator[Step]:
    """Yield what a function holds in attributes that the code names."""
    for name in attributes:
        if name in function.__dict__:
            place = ("attribute", id(function), name)
            yield Step(StepKind.ATTRIBUTE, name, f"{{}}.{name}", name, place, function.__dict__[name])


def _registered_step(value: object, name: str) -> Iterator[Step]:
    if isinstance(value, torch.nn.Module):
        for table in ("_parameters", "_buffers", "_modules"):
            held = getattr(value, table)
            if name in held:
                access = f"{{}}.{table}[{name!r}]"
                yield Step(StepKind.ATTRIBUTE, name, access, name, ("item", id(held), name), held[name])
                return
    yield from _class_step(value, name)


def _class_step(value: object, name: str) -> Iterator[Step]:
    owner = value if isinstance(value, type) else type(value)
    found = inspect.getattr_static(owner, name, _MISSING)
    place = ("class", id(owner), name)
    if _is_foreign(owner.__module__):
        return
    match found:
        case types.FunctionType():
            access = f"{{}}.{name}.__func__" if _is_bound(value, name, found) else _on_class(value, name)
            yield Step(StepKind.CLASS, name, access, name, place, found)
        case property(fget=types.FunctionType() as getter):
            yield Step(StepKind.CLASS, name, _on_class(value, name) + ".fget", name, place, getter)
        case staticmethod() | classmethod():
            yield Step(StepKind.CLASS, name, _on_class(value, name), name, place, getattr(owner, name))
        case types.MemberDescriptorType() if not isinstance(value, type) and hasattr(value, name):  # __slots__
            held = getattr(value, name)
            yield Step(StepKind.ATTRIBUTE, name, f"{{}}.{name}", name, ("attribute", id(value), name), held)
        case torch.Tensor() | int() | float() | str() | tuple() | list() | dict():
            yield Step(StepKind.ATTRIBUTE, name, f"{{}}.{name}", name, place, found)


def _is_bound(value: object, name: str, function: types.FunctionType) -> bool:
    """Whether an instance shows a function of its class as a method, in whose place an attribute may come to stand."""
    if name.startswith("__"):
        return False  # a call looks it up on the class
    try:
        return getattr(value, name).__func__ is function
    except Exception:  # a class, or one with a `__getattribute__` of its own
        return False


def _on_class(value: object, name: str) -> str:
    return f"{{}}.{name}" if isinstance(value, type) else f"{{}}.__class__.{name}"


def _call_steps(value: object) -> Iterator[Step]:
    """Yield what calling the object runs: a module's `forward`, another object's `__call__`."""
    name = "forward" if isinstance(value, torch.nn.Module) else "__call__"
    if not isinstance(value, type) and callable(value) and name not in getattr(value, "__dict__", {}):
        yield from _class_step(value, name)


def _is_opaque(value: object) -> bool:
    """Whether attributes of this object are not looked at: a module, class or builtin that is not the user's."""
    match value:
        case types.ModuleType():
            return _is_foreign(value.__name__)
        case type():
            return _is_foreign(value.__module__)
    return isinstance(value, types.BuiltinFunctionType)


def _children(slot: Slot, attributes: tuple[str, ...]) -> Iterator[Step]:
    value = slot.value
    match slot.kind:
        case SlotKind.CODE if isinstance(value, types.FunctionType):
            yield from _function_steps(value)
            yield from _own_steps(value, attributes)
        case SlotKind.METHOD if isinstance(value, types.MethodType):
            yield from _method_steps(value)
        case SlotKind.METHOD if isinstance(value, functools.partial):
            yield from _partial_steps(value)
        case SlotKind.SEQUENCE | SlotKind.MAPPING if isinstance(value, list | tuple | deque | dict):
            yield from _item_steps(value, slot.step.name)
        case SlotKind.OBJECT if not _is_opaque(value):
            yield from _attribute_steps(value, attributes)


def _has_identity(kind: SlotKind, value: object) -> bool:
    """Whether it means something that two places hold the very same object."""
    return kind not in (SlotKind.NUMBER, SlotKind.TEXT) and not isinstance(value, bool | None)


class _Walk:
    """One breadth-first walk from the mods, with a fixed set of attribute names."""

    def __init__(self, attributes: tuple[str, ...]) -> None:
        self.attributes = attributes
        self.slots: list[Slot] = []
        self.named: dict[str, None] = {}
        self._places: dict[tuple[object, ...], int] = {}
        self._objects: dict[int, int] = {}

    def run(self, roots: Mapping[str, object]) -> None:
        queue: deque[Slot] = deque()
        for name, root in roots.items():
            step = Step(StepKind.ROOT, name, name, name, ("root", name), root)
            queue.append(self._add(None, step))
        while queue and len(self.slots) < _MAX_SLOTS:
            slot = queue.popleft()
            if slot.same_as is None:
                self._note_names(slot.value)
                queue.extend([self._add(slot, step) for step in _children(slot, self.attributes)])

    def _note_names(self, value: object) -> None:
        if isinstance(value, types.FunctionType) and not is_foreign_function(value):
            self.named.update(dict.fromkeys(_reads(value.__code__).attributes))

    def _add(self, parent: Slot | None, step: Step) -> Slot:
        kind, same_as = _kind(step.value), self._places.get(step.place)
        if same_as is not None:
            kind = SlotKind.SAME_PLACE
        elif _has_identity(kind, step.value) and id(step.value) in self._objects:
            kind, same_as = SlotKind.SAME_OBJECT, self._objects[id(step.value)]
        path = step.access if parent is None else step.access.replace("{}", parent.path, 1)
        slot = Slot(len(self.slots), None if parent is None else parent.index, step, path, kind, same_as)
        self.slots.append(slot)
        if same_as is None:
            self._places[step.place] = slot.index
            self._objects[id(step.value)] = slot.index
        return slot


def discover(roots: Mapping[str, object]) -> tuple[Slot, ...]:
    """Return every value that the callables can read, parents first; a place or object met twice is marked so.

    Attributes are those whose name stands anywhere in the reachable code, so that aliases (`cfg = self.cfg`) and
    loops over objects are covered; the walk repeats until the set of names is stable.
    """
    attributes: tuple[str, ...] = ()
    while True:
        walk = _Walk(attributes)
        walk.run(roots)
        names = tuple(walk.named)
        if set(names) <= set(attributes):
            return tuple(walk.slots)
        attributes = tuple(dict.fromkeys(attributes + names))


def with_hidden_tensors(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> tuple[Slot, ...]:
    """Return the slots and, for tensors that none of them holds, the attribute of a known object that does.

    Code can reach an attribute whose name stands nowhere (`getattr(self, name)`, `vars(self)`). A tensor found
    nowhere stays out: the capture keeps that very tensor.
    """
    held = {id(slot.value) for slot in slots}
    found = list(slots)
    for tensor in tensors:
        if id(tensor) not in held:
            holder = next((item for slot in slots if (item := _attribute_holding(slot, tensor)) is not None), None)
            if holder is not None:
                parent, step = holder
                path = step.access.replace("{}", parent.path, 1)
                found.append(Slot(len(found), parent.index, step, path, SlotKind.TENSOR))
    return tuple(found)


def _attribute_holding(slot: Slot, tensor: torch.Tensor) -> tuple[Slot, Step] | None:
    value = slot.value
    if slot.kind is not SlotKind.OBJECT or not hasattr(value, "__dict__"):
        return None
    tables = {"{}.__dict__[%r]": vars(value)}
    if isinstance(value, torch.nn.Module):
        tables |= {"{}._parameters[%r]": value._parameters, "{}._buffers[%r]": value._buffers}
    for access, table in tables.items():
        for name, item in table.items():
            if item is tensor:
                step = Step(StepKind.ATTRIBUTE, name, access % name, name, ("attribute", id(value), name), item)
                return slot, step
    return None

"""Mods that torch.compile does not show as they are, such as functions that the traced code defines, and partials.

There is no Python object to capture, so such a mod is called once under torch.compile's own tracing, on tensors of the
meta device, with a mode that records each operation. The record is a constant of the trace; replayed as a function, it
is captured like any mod. Tensors that are no result of the record are captured ones, and arguments of the operator; so
are integers that are symbols of the graph being traced, such as lengths, whose values the record does not hold.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flexgen.capture.live import LiveMods, NumberHistory
from flexgen.capture.slots import SlotKind, StepKind, discover
from flexgen.errors import FlexgenError
from flexgen.options import Options
from flexgen.torch_library.call import read_mods
from flexgen.torch_library.spec import Starts, print_options, spec_of

_INDICES = 4  # b, h, q_idx, kv_idx

_FIRST_STAND_IN = 1 << 20  # for a symbol's value while a record is captured; distinct ones tell the symbols apart

Item = tuple[
    str, Any
]  # ("value", place), ("captured", place), ("symbol", place), ("items", items), ("constant", value)


@dataclass(frozen=True)
class RecordedForm:
    """The operator's texts, and which of the recorded captured tensors and symbols are its operands, in order."""

    spec: str
    options: str
    buffers: tuple[int, ...]
    integers: tuple[int, ...]


class Captures:
    """What records of the mods of one call captured, in the order in which it was met.

    Attributes:
        tensors: captured tensors.
        symbols: captured integers that are symbols of the traced graph.
        keeps_symbols: whether symbols stay such; otherwise each is a constant, which torch.compile guards.
    """

    def __init__(self, *, keeps_symbols: bool) -> None:
        self.tensors: list[torch.Tensor] = []
        self.symbols: list[int] = []
        self.keeps_symbols = keeps_symbols

    def is_symbol(self, number: int) -> bool:
        """Whether an integer stays a symbol."""
        return self.keeps_symbols and not torch.fx.experimental.symbolic_shapes.has_static_value(number)

    def sizes(self, tensor: torch.Tensor) -> tuple[int | None, ...]:
        """Return a captured tensor's sizes, None for those that stay symbols."""
        return tuple([None if self.is_symbol(size) else int(_guarded(size)) for size in tensor.shape])


# Before torch 2.13, torch.compile cannot look into every closure's cells, nor read the global tensors of a function
# that the traced code makes, nor in 2.11 take a bound method apart.
_SHOWS_CELLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def shows_no_values(mod: Any) -> bool:
    """Whether torch.compile does not let a mod's values be looked at: a partial, or a function of the traced code."""
    if isinstance(mod, functools.partial) or (isinstance(mod, types.MethodType) and not _SHOWS_CELLS):
        return True
    if not isinstance(mod, types.FunctionType):
        return False
    if not _SHOWS_CELLS:
        return bool(mod.__code__.co_freevars) or _reads_global_tensor(mod)
    try:
        _ = mod.__closure__
    except AttributeError:
        return True
    return False


def _reads_global_tensor(mod: Any) -> bool:
    slots = discover({"mod": mod})
    through_global: set[int | None] = set()
    for slot in slots:
        if slot.step.kind is StepKind.GLOBAL or slot.parent in through_global:
            through_global.add(slot.index)
    return any(slot.kind is SlotKind.TENSOR and slot.index in through_global for slot in slots)


# torch.compile runs it while it traces.
_reads_global_tensor._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Recorder(TorchFunctionMode):
    """Records torch operations.

    Args:
        captures: what is already known as captured; new ones are appended.
        values: what the record's places hold, the mod's inputs first; results are appended.
    """

    def __init__(self, captures: Captures, values: list[Any]) -> None:
        super().__init__()
        self.captures = captures
        self.values = values
        self.steps: list[tuple[Any, Any, Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        step = (func, self.item(tuple(args)), tuple([(name, self.item(value)) for name, value in kwargs.items()]))
        result = _on_meta(func, args, kwargs)
        self.steps.append(step)
        self.values.append(result)
        return result

    def item(self, value: Any) -> Item:
        """Return what stands for a value in the record."""
        if isinstance(value, tuple | list):
            return "items", tuple([self.item(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return self._number(value)
        for place, known in enumerate(self.values):
            if known is value:
                return "value", place
        tensors = self.captures.tensors
        for place, tensor in enumerate(tensors):
            if tensor is value:
                return "captured", place
        tensors.append(value)
        return "captured", len(tensors) - 1

    def _number(self, value: Any) -> Item:
        """Return what stands for a value that is no tensor: torch.compile may have made a symbol of a number."""
        if type(value) not in (int, float):
            return "constant", value
        if type(value) is int and self.captures.is_symbol(value):
            self.captures.symbols.append(value)
            return "symbol", len(self.captures.symbols) - 1
        return "constant", _guarded(value)


def _guarded(number: Any) -> Any:
    """Return a number as a constant that a guard holds on to."""
    return torch.fx.experimental.symbolic_shapes.guard_scalar(number)  # an import would load sympy for everyone


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a result's shape and dtype."""
    moved = [_meta(arg) for arg in args]
    if func is torch.Tensor.__getitem__:
        indices = moved[1] if isinstance(moved[1], tuple) else (moved[1],)
        if all(isinstance(index, torch.Tensor | int) for index in indices):  # a 0-d index has no value to index with
            return torch.ops.aten.index(moved[0], [_index(index) for index in indices])
        return moved[0][tuple([0 if _is_element(index) else index for index in indices])]
    return func(*moved, **{name: _meta(value) for name, value in kwargs.items()})


def _is_element(index: Any) -> bool:
    """Whether an index among slices takes one element, and so may be any number where only the shape matters."""
    return isinstance(index, torch.Tensor) and index.dim() == 0 and index.dtype != torch.bool


def _index(index: Any) -> torch.Tensor:
    return index if isinstance(index, torch.Tensor) else torch.empty((), dtype=torch.int64, device="meta")


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else torch.empty_like(value, device="meta")
    if isinstance(value, tuple):
        return tuple([_meta(item) for item in value])
    return [_meta(item) for item in value] if isinstance(value, list) else value


def record(mod: Any, score_dtype: torch.dtype | None, captures: Captures) -> Any:
    """Return the record of a mod, for `form_of_records`; None for None.

    Args:
        score_dtype: dtype of the score; None for a mask_mod.
        captures: of both mods, appended to.
    """
    if mod is None:
        return None
    inputs = [torch.empty((), dtype=torch.int64, device="meta") for _ in range(_INDICES)]
    if score_dtype is not None:
        inputs = [torch.empty((), dtype=score_dtype, device="meta"), *inputs]
    recorder = Recorder(captures, list(inputs))
    with recorder:
        result = mod(*inputs)
    return tuple(recorder.steps), recorder.item(result)


def form_of_records(
    score: Any,
    mask: Any,
    kinds: tuple[Any, ...],
    symbol_count: int,
    options: tuple[tuple[str, Any], ...],
    query_dtype: torch.dtype,
    starts: Starts,
) -> RecordedForm | None:
    """Return the form of a call by recorded mods; None where a symbol's value is needed to capture them.

    Args:
        score, mask: records.
        kinds: (dtype, sizes, requires_grad) of each captured tensor; None for a size that is a symbol.
        symbol_count: how many symbols were captured.
        starts: the mods' b, h and q_idx of the call's first batch, head and row.
    """
    captured = [_stand_in(*kind) for kind in kinds]
    symbols = [_FIRST_STAND_IN + place for place in range(symbol_count)]
    replayed = [_replay(recorded, captured, symbols) for recorded in (score, mask)]
    numbers = _changing(replayed, symbols)
    try:
        reading = read_mods(LiveMods(replayed[0], replayed[1], numbers), query_dtype)
    except FlexgenError:
        if symbols or any(None in sizes for _, sizes, _ in kinds):  # such as a view that needs a size
            return None
        raise
    if numbers.needed_constant:
        return None
    places = [next(i for i, tensor in enumerate(captured) if tensor is buffer) for buffer in reading.buffers]
    integers = [int(number) - _FIRST_STAND_IN for number in reading.scalars]
    texts = (spec_of(reading.captured, starts), print_options(Options.of(dict(options))))
    return RecordedForm(*texts, tuple(places), tuple(integers))


# torch.compile runs it while it traces and takes the result for a constant: it depends on constants alone.
form_of_records._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _stand_in(dtype: torch.dtype, sizes: tuple[int | None, ...], requires_grad: bool) -> torch.Tensor:
    """Return a tensor without data that stands for a captured one; a size that is a symbol may be anything."""
    shape = [_FIRST_STAND_IN if size is None else size for size in sizes]
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(requires_grad)


def _changing(mods: list[Callable[..., Any] | None], symbols: list[int]) -> NumberHistory:
    """Return a history by which the symbols' stand-ins, and no other numbers, are arguments from the start."""
    slots = discover({name: mod for name, mod in zip(("score_mod", "mask_mod"), mods, strict=True) if mod is not None})
    held = {slot.index for slot in slots if slot.value is symbols}
    return NumberHistory(changing={slot.path for slot in slots if slot.parent in held})


def _replay(recorded: Any, captured: list[torch.Tensor], symbols: list[int]) -> Callable[..., Any] | None:
    """Return the function that was recorded."""
    if recorded is None:
        return None
    steps, result = recorded

    def recorded_mod(*inputs: torch.Tensor) -> Any:
        values: list[Any] = list(inputs)
        for func, args, kwargs in steps:
            named = {name: _restored(item, values, captured, symbols) for name, item in kwargs}
            values.append(func(*_restored(args, values, captured, symbols), **_off_meta(named)))
        return _restored(result, values, captured, symbols)

    return recorded_mod


def _restored(item: Item, values: list[Any], captured: list[torch.Tensor], symbols: list[int]) -> Any:
    match item:
        case ("value", place):
            return values[place]
        case ("captured", place):
            return captured[place]
        case ("symbol", place):
            return symbols[place]
        case ("items", items):
            return tuple([_restored(one, values, captured, symbols) for one in items])
    return item[1]


def _off_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out the device that a mod saw only because it was recorded there."""
    return {name: value for name, value in kwargs.items() if name != "device" or torch.device(value).type != "meta"}

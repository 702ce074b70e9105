"""Mods that torch.compile does not show as they are, such as functions that the traced code defines, and partials.

There is no Python object to capture, so such a mod is called once under torch.compile's own tracing, on tensors of the
meta device, with a mode that records each operation. The record is a constant of the trace; replayed as a function, it
is captured like any mod. Tensors that are no result of the record are captured ones, and arguments of the operator.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from flexgen.capture.live import LiveMods
from flexgen.options import Options
from flexgen.torch_library.call import read_mods
from flexgen.torch_library.spec import Starts, print_options, spec_of

_INDICES = 4  # b, h, q_idx, kv_idx

Item = tuple[str, Any]  # ("value", place), ("captured", place), ("items", items) or ("constant", value)


@dataclass(frozen=True)
class RecordedForm:
    """The operator's texts, and which of the recorded captured tensors are its buffers, in order."""

    spec: str
    options: str
    order: tuple[int, ...]


# Before torch 2.13, torch.compile cannot look into every closure's cells, nor in 2.11 take a bound method apart.
_SHOWS_CELLS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


def shows_no_values(mod: Any) -> bool:
    """Whether torch.compile does not let a mod's values be looked at: a partial, or a function of the traced code."""
    if isinstance(mod, functools.partial) or (isinstance(mod, types.MethodType) and not _SHOWS_CELLS):
        return True
    if not isinstance(mod, types.FunctionType):
        return False
    if not _SHOWS_CELLS:
        return bool(mod.__code__.co_freevars)
    try:
        _ = mod.__closure__
    except AttributeError:
        return True
    return False


class Recorder(TorchFunctionMode):
    """Records torch operations.

    Args:
        captured: tensors that are already known as captured; new ones are appended.
        values: what the record's places hold, the mod's inputs first; results are appended.
    """

    def __init__(self, captured: list[torch.Tensor], values: list[Any]) -> None:
        super().__init__()
        self.captured = captured
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
            return "constant", _constant(value)
        for place, known in enumerate(self.values):
            if known is value:
                return "value", place
        for place, tensor in enumerate(self.captured):
            if tensor is value:
                return "captured", place
        self.captured.append(value)
        return "captured", len(self.captured) - 1


def _constant(value: Any) -> Any:
    """Return a value that a guard holds on to: torch.compile may have made a symbol of a number."""
    if type(value) in (int, float):
        return torch.fx.experimental.symbolic_shapes.guard_scalar(value)
    return value


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a result's shape and dtype."""
    moved = [_meta(arg) for arg in args]
    if func is torch.Tensor.__getitem__:
        indices = moved[1] if isinstance(moved[1], tuple) else (moved[1],)
        if all(isinstance(index, torch.Tensor | int) for index in indices):  # a 0-d index has no value to index with
            return torch.ops.aten.index(moved[0], [_index(index) for index in indices])
    return func(*moved, **{name: _meta(value) for name, value in kwargs.items()})


def _index(index: Any) -> torch.Tensor:
    return index if isinstance(index, torch.Tensor) else torch.empty((), dtype=torch.int64, device="meta")


def _meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else torch.empty_like(value, device="meta")
    if isinstance(value, tuple):
        return tuple([_meta(item) for item in value])
    return [_meta(item) for item in value] if isinstance(value, list) else value


def record(mod: Any, score_dtype: torch.dtype | None, captured: list[torch.Tensor]) -> Any:
    """Return the record of a mod, for `form_of_records`; None for None.

    Args:
        score_dtype: dtype of the score; None for a mask_mod.
        captured: the captured tensors of both mods, appended to.
    """
    if mod is None:
        return None
    inputs = [torch.empty((), dtype=torch.int64, device="meta") for _ in range(_INDICES)]
    if score_dtype is not None:
        inputs = [torch.empty((), dtype=score_dtype, device="meta"), *inputs]
    recorder = Recorder(captured, list(inputs))
    with recorder:
        result = mod(*inputs)
    return tuple(recorder.steps), recorder.item(result)


def form_of_records(
    score: Any,
    mask: Any,
    kinds: tuple[Any, ...],
    options: tuple[tuple[str, Any], ...],
    query_dtype: torch.dtype,
    starts: Starts,
) -> RecordedForm:
    """Return the form of a call by recorded mods.

    Args:
        score, mask: records.
        kinds: (dtype, shape, requires_grad) of each captured tensor.
        starts: the mods' b, h and q_idx of the call's first batch, head and row.
    """
    captured = [torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad) for dtype, shape, grad in kinds]
    mods = LiveMods(_replay(score, captured), _replay(mask, captured))
    reading = read_mods(mods, query_dtype)
    places = [next(i for i, tensor in enumerate(captured) if tensor is buffer) for buffer in reading.buffers]
    return RecordedForm(spec_of(reading.captured, starts), print_options(Options.of(dict(options))), tuple(places))


# torch.compile runs it while it traces and takes the result for a constant: it depends on constants alone.
form_of_records._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _replay(recorded: Any, captured: list[torch.Tensor]) -> Callable[..., Any] | None:
    """Return the function that was recorded."""
    if recorded is None:
        return None
    steps, result = recorded

    def recorded_mod(*inputs: torch.Tensor) -> Any:
        values: list[Any] = list(inputs)
        for func, args, kwargs in steps:
            named = {name: _restored(item, values, captured) for name, item in kwargs}
            values.append(func(*_restored(args, values, captured), **_off_meta(named)))
        return _restored(result, values, captured)

    return recorded_mod


def _restored(item: Item, values: list[Any], captured: list[torch.Tensor]) -> Any:
    match item:
        case ("value", place):
            return values[place]
        case ("captured", place):
            return captured[place]
        case ("items", items):
            return tuple([_restored(one, values, captured) for one in items])
    return item[1]


def _off_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out the device that a mod saw only because it was recorded there."""
    return {name: value for name, value in kwargs.items() if name != "device" or torch.device(value).type != "meta"}

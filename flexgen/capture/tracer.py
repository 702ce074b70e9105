"""Tracing: runs a mod on 0-d meta tensors, with a function mode for its source and a dispatch mode for its aten ops."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from flexgen.capture.call import Call, Context, convert
from flexgen.capture.convert import converter_of
from flexgen.capture.creation import constant
from flexgen.capture.gradient import stopped
from flexgen.capture.intercept import INTERCEPTED
from flexgen.capture.metadata import result_metadata
from flexgen.capture.numbers import NeedsConstant, number_node
from flexgen.capture.refusals import unsupported
from flexgen.capture.source import is_user_file, origin_at
from flexgen.capture.stand_in import empty_stand_in
from flexgen.capture.tensors import CapturedTensors
from flexgen.capture.values import Dim, Indices, Refused, Value, filled, scalar_value
from flexgen.errors import CaptureError, FlexgenError, InternalError, SourceSpan
from flexgen.ir.graph import Node, input_node
from flexgen.ir.origins import Origin

_CUSTOM_FUNCTION_CODE: CodeType = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_PROPERTY_READ = "__get__"
_FOREIGN_WHY = "the operation belongs to another library, so flexgen does not know what it computes."
_FOREIGN_FIX = "write it with torch's own operations, or map it in flexgen.capture.convert.CUSTOM_OPS."


class Tracer:
    """The state of one trace: which tensors stand for which values.

    Attributes:
        context: what converters build with.
        captured: the captured tensors, shared by both mods of a pair.
        problems: located errors of operations that cannot be compiled, collected.
    """

    def __init__(self, context: Context, captured: CapturedTensors) -> None:
        self.context = context
        self.captured = captured
        self.problems: list[FlexgenError] = []
        self._values: dict[int, Value] = {}
        self._alive: list[torch.Tensor] = []  # an id names a tensor only while it lives
        self._constants: set[int] = set()
        self._viewed: set[int] = set()
        self._custom_function: str | None = None
        self._refused_functions: set[str] = set()
        self._dispatch_mode = _DispatchMode(self)

    # Running the mod.

    def run(self, mod: Callable[..., object], input_dtypes: Mapping[str, torch.dtype]) -> object:
        """Call the mod on stand-ins for its inputs and return what it returned, whatever modes are active outside."""
        inputs = [self._new(scalar_value(input_node(name, dtype))) for name, dtype in input_dtypes.items()]
        with _no_modes_from_outside(), self._dispatch_mode, _FunctionMode(self):
            return _call_mod(mod, inputs)

    def result(self, returned: object) -> Value | None:
        """Return the value of a tensor that the mod returned; None for anything but a tensor."""
        return self.value_of(self.swap(returned)) if isinstance(returned, torch.Tensor) else None

    @property
    def span(self) -> SourceSpan | None:
        origin = self.context.builder.origin
        return origin.span if origin else None

    def report(self, error: FlexgenError) -> None:
        if all((error.what, error.where) != (known.what, known.where) for known in self.problems):
            self.problems.append(error)

    # Tensors and values.

    def is_traced(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is a stand-in or captured; else the mod made it from constants."""
        return id(tensor) in self._values or self._is_captured(tensor)

    def _is_captured(self, tensor: torch.Tensor) -> bool:
        return id(tensor) not in self._values and id(tensor) not in self._constants

    def swap(self, arg: Any) -> Any:
        """Return an argument with captured tensors replaced by their stand-ins."""
        if isinstance(arg, torch.Tensor):
            return self.stand_in(arg) if self._is_captured(arg) else arg
        if type(arg) in (list, tuple):
            return type(arg)(self.swap(item) for item in arg)
        return arg

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        name = self.captured.name(tensor)
        meta = self.captured.stand_in(tensor)
        if id(meta) not in self._values:
            if tensor.requires_grad:
                self.context.gradient_buffers.add(name)
            self._register(meta, self._buffer_value(name, tensor))
        return meta

    def _buffer_value(self, name: str, tensor: torch.Tensor) -> Value:
        builder = self.context.builder
        dims = tuple(Dim(size, (name, i)) for i, size in enumerate(tensor.shape))

        def element(indices: Indices) -> Node:
            return builder.node("load", *indices, attr=name, dtype=tensor.dtype)

        return Value(dims, tensor.dtype, element, captured=name)

    def value_of(self, tensor: torch.Tensor) -> Value:
        """Return the value of a stand-in, a captured tensor, or a tensor of constants."""
        found = self._values.get(id(tensor))
        if found is not None:
            return found
        if self._is_captured(tensor) and self.captured.is_known(tensor):
            return self._values[id(self.stand_in(tensor))]
        return constant(self.context, tensor)

    def _register(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        self._values[id(tensor)] = value
        self._alive.append(tensor)
        return tensor

    def _new(self, value: Value) -> torch.Tensor:
        return self._register(empty_stand_in(value.shape, value.dtype), value)

    def new_view(self, base: torch.Tensor, value: Value) -> torch.Tensor:
        """Return a new stand-in that shares memory with `base` in torch, so neither may be written to."""
        made = self._new(value)
        self._viewed.update((id(base), id(made)))
        return made

    def keep_constants(self, result: Any) -> Any:
        """Note tensors that the mod made from constants alone."""
        for tensor in _tensors_in(result):
            if id(tensor) not in self._values and id(tensor) not in self._constants:
                self._constants.add(id(tensor))
                self._alive.append(tensor)
        return result

    # The function mode's part: source, and what aten never sees.

    def function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        origin = self._locate()
        intercept = INTERCEPTED.get(func)
        if intercept is not None:
            result = self.keep_constants(intercept(self, func, args, kwargs))
        else:
            result = self._plain_function(func, args, kwargs)
        if origin is not None and origin.variable is not None and isinstance(result, torch.Tensor):
            value = self._values.get(id(result))
            if value is not None and not value.dims:
                self.context.builder.assign(value.node, origin)
        return result

    def _plain_function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        swapped = {key: self.swap(value) for key, value in kwargs.items()}
        if swapped.get("device") is not None:
            swapped["device"] = "cpu"  # constants are evaluated here; stand-ins live nowhere
        result = func(*(self.swap(arg) for arg in args), **swapped)
        return result if func.__name__ == _PROPERTY_READ else self.keep_constants(result)

    def _locate(self) -> Origin | None:
        """Find the user's innermost frame, and whether a custom autograd function is running."""
        frame, found = sys._getframe(3), None
        self._custom_function = None
        while frame is not None and frame.f_code is not _call_mod.__code__:
            code = frame.f_code
            if found is None and is_user_file(code.co_filename):
                found = frame
            if code is _CUSTOM_FUNCTION_CODE:
                self._custom_function = getattr(frame.f_locals.get("cls"), "__name__", "Function")
            frame = frame.f_back  # type: ignore[assignment]
        origin = None if found is None else _origin(found.f_code, found.f_lasti)
        self.context.builder.origin = None if origin is None else Origin(None, origin.span)
        return origin

    # The dispatch mode's part: one aten operation.

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.report(unsupported(_bare_name(func), self.span))
        if not any(self._is_symbolic(arg) for arg in (*args, *kwargs.values())):
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            return self.keep_constants(func(*args, **kwargs))
        self._check_plain(func, args, kwargs)
        self._check_custom_function(func)
        if func._schema.is_mutable:
            return self._mutate(func, args, kwargs)
        converter = converter_of(func._schema.name)
        if converter is None:
            return self._decompose(func, args, kwargs)
        result = result_metadata(func, args, kwargs)
        self._convert(converter, func, args, kwargs, result)
        return result

    def _is_symbolic(self, arg: Any) -> bool:
        if isinstance(arg, torch.Tensor):
            return id(arg) in self._values or (self._is_captured(arg) and self.captured.is_known(arg))
        if isinstance(arg, list | tuple):
            return any(self._is_symbolic(item) for item in arg)
        return number_node(arg) is not None

    def _convert(self, converter: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Give each result tensor its value; a refused operation gets a placeholder, so that tracing continues."""
        results = list(_tensors_in(result))
        try:
            call = self._call(func, args, kwargs, results[0])
            converted = converter(call)
            values = converted if isinstance(converted, tuple) else (converted,)
            values = tuple(self._with_gradient_rule(value) for value in values)
        except Refused as refused:
            self.report(refused.error)
            values = tuple(filled(tensor.shape, 0, tensor.dtype) for tensor in results)
        for tensor, value in zip(results, values, strict=True):
            if value.shape != tuple(tensor.shape) or value.dtype != tensor.dtype:
                raise InternalError(
                    f"{func} became {value.dtype}{value.shape}, not {tensor.dtype}{tuple(tensor.shape)}"
                )
            self._register(tensor, value)
        self._note_views(func, args, results)

    def _with_gradient_rule(self, value: Value) -> Value:
        """Apply the user's `no_grad`; a custom function's forward always runs under one, which means nothing here."""
        if torch.is_grad_enabled() or self._custom_function is not None:
            return value
        return stopped(self.context, value)

    def _note_views(self, func: Any, args: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            self._viewed.update(id(tensor) for tensor in (*_tensors_in(args), *results))

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: torch.Tensor) -> Call:
        bound = tuple(self._as_values(arg) for arg in _bind(func, args, kwargs))
        return Call(_bare_name(func), func._overloadname, bound, result.dtype, tuple(result.shape), self.context)

    def _check_plain(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Ask for a constant where a captured number decides a shape or an axis (an index may stay free)."""
        if func is torch.ops.aten.select.int:
            return
        for arg, (_, _, is_value) in zip(_bind(func, args, kwargs), _parameters(func), strict=True):
            for item in arg if isinstance(arg, list | tuple) else (arg,):
                number = None if is_value else number_node(item)
                if number is not None:
                    raise NeedsConstant(number.names)

    def _as_values(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            return self.value_of(arg)
        if isinstance(arg, list | tuple):
            return [self._as_values(item) for item in arg]
        return arg

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Trace an operation through torch's decomposition of it, or refuse it."""
        decomposition = decomposition_table.get(func)
        if decomposition is None and func._can_decompose():
            decomposition = func.decompose
        if decomposition is None or func.namespace not in ("aten", "prims"):
            return self._refuse(func, args, kwargs)
        with self._dispatch_mode:
            result = decomposition(*args, **kwargs)
        return self._refuse(func, args, kwargs) if result is NotImplemented else result

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if func.namespace in ("aten", "prims"):
            self.report(unsupported(_bare_name(func), self.span))
        else:
            self.report(unsupported(name, self.span, _FOREIGN_WHY, _FOREIGN_FIX))
        result = result_metadata(func, args, kwargs)
        for tensor in _tensors_in(result):
            self._register(tensor, filled(tensor.shape, 0, tensor.dtype))
        return result

    def _check_custom_function(self, func: Any) -> None:
        """A score_mod's gradient is derived from its value; a custom backward would silently be ignored."""
        name = self._custom_function
        is_mapped = converter_of(func._schema.name) is not None and func.namespace not in ("aten", "prims")
        if name is None or is_mapped or self.context.kind == "mask" or name in self._refused_functions:
            return
        self._refused_functions.add(name)
        self.report(
            unsupported(
                f"the custom autograd function {name}",
                self.span,
                "flexgen derives the gradient from the forward, so the function's own backward would be ignored.",
                "write its forward inline if the derivative of that is meant.",
            )
        )

    # In-place operations: a new value for the same tensor.

    def _mutate(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, name = args[0], _bare_name(func)
        value = self._values.get(id(target)) if isinstance(target, torch.Tensor) else None
        if value is None or value.captured is not None or value.dims or id(target) in self._viewed or "out" in kwargs:
            self.report(_written(name, value, self.span))
            return target
        functional = _functional(func)
        if functional is None:
            return self._refuse_in_place(name, target)
        with self._dispatch_mode:
            updated = functional(*args, **kwargs)
        self._register(target, convert(self.context, self.value_of(updated), target.dtype))
        return target

    def _refuse_in_place(self, name: str, target: torch.Tensor) -> torch.Tensor:
        self.report(unsupported(name, self.span))
        return target


@contextmanager
def _no_modes_from_outside() -> Iterator[None]:
    """Trace the same whether the caller is under fake tensors, autocast, no_grad or another default device."""
    with _disable_current_modes(), torch._C._DisableAutocast(), torch.enable_grad(), torch.device("cpu"):
        yield


def _written(name: str, value: Value | None, span: SourceSpan | None) -> FlexgenError:
    what = "a tensor" if value is None or value.captured is None else f"the captured tensor `{value.captured}`"
    return CaptureError(
        f"the mod writes to {what} (`{name}`)",
        where=span,
        why="a mod is a function of its inputs; kernels evaluate it many times, in no defined order.",
        fix="use a new value, `x = x + y`, or update the tensor outside the mod.",
    )


def _functional(func: Any) -> Any:
    """Return the operation that computes what an in-place one stores."""
    name = _bare_name(func)
    if name == "copy_":
        return lambda target, source, *_: torch.ops.aten.to.other(source, target)
    if name in ("zero_", "fill_"):
        return lambda target, value=0: torch.ops.aten.full_like(target, value)
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    return getattr(packet, func._overloadname, None) if name.endswith("_") and packet is not None else None


def _bare_name(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


def _tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, list | tuple):
        return [tensor for item in result for tensor in _tensors_in(item)]
    return []


@functools.lru_cache(maxsize=2048)
def _parameters(func: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Return, for each argument, its name, its default, and whether it is a value (a tensor or a Scalar)."""
    arguments = [(argument, str(argument.type)) for argument in func._schema.arguments]
    return tuple((arg.name, arg.default_value, "Tensor" in kind or "number" in kind) for arg, kind in arguments)


def _bind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return all arguments in schema order, defaults filled in."""
    parameters = _parameters(func)[len(args) :]
    return [*args, *(kwargs.get(name, default) for name, default, _ in parameters)]


@functools.lru_cache(maxsize=8192)
def _origin(code: CodeType, instruction: int) -> Origin | None:
    return origin_at(code, instruction)


def _call_mod(mod: Callable[..., object], inputs: Sequence[torch.Tensor]) -> object:
    """Call the mod; the walk from an operation to the user's frame ends at this function's frame."""
    return mod(*inputs)


class _FunctionMode(TorchFunctionMode):
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.function(func, args, kwargs or {})


class _DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tracer = tracer

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the handler for dynamo: that imports dynamo at the first operation, a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._tracer.dispatch(func, args, kwargs or {})

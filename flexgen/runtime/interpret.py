"""Run an emitted kernel on CPU tensors through Triton's interpreter, from any thread, beside compilation."""

from __future__ import annotations

import itertools
import linecache
import threading
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import torch
import triton.language

from flexgen.codegen.source import LineOrigin
from flexgen.errors import FlexgenError, InternalError, KernelCompileError, SourceSpan
from flexgen.runtime.arguments import TypedArg, is_pointer
from flexgen.runtime.element_types import triton_name
from flexgen.runtime.interpreter import rewrite
from flexgen.runtime.interpreter.builder import Value
from flexgen.runtime.interpreter.language import Language, interpreted_language, is_jitted
from flexgen.runtime.interpreter.memory import NULL, bounded_pointer, tensor_region
from flexgen.runtime.line_origin import with_origin

_translated: weakref.WeakKeyDictionary[ModuleType, dict[str, Any]] = weakref.WeakKeyDictionary()
_translated_lock = threading.Lock()


def interpret(
    module: ModuleType,
    entry: str,
    grid: tuple[int, int, int],
    args: Sequence[object],
    arg_types: Sequence[TypedArg] | None = None,
    line_map: Sequence[LineOrigin] = (),
) -> None:
    """Run `module.entry` for every program of `grid`, reading and writing the CPU tensors of `args` in place.

    Any sizes and strides work, overlapping ones too. Accesses outside of the elements of a tensor are errors.

    Args:
        args: one value per parameter of the kernel: CPU tensors, ints, floats, bools, or None for a null pointer.
        arg_types: types of the numbers. Without them an int is i32 where it fits, else i64, and a float is fp32.
        line_map: where each line of the module comes from, for errors.

    Raises:
        KernelMemoryError: the kernel touched memory outside of its tensors.
        KernelCompileError: the kernel is not valid Triton, or uses what only a GPU has; names the emitted line.
    """
    language = interpreted_language()
    kernel = _kernel(language, module, entry)
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    kinds: Sequence[TypedArg | None] = [None] * len(args) if arg_types is None else arg_types
    values = [_argument(language, *named) for named in zip(names, args, kinds, strict=True)]
    try:
        _run_grid(language, kernel, grid, values)
    except FlexgenError as error:
        if error.where is None:
            error.where = _emitted_line(error.__traceback__, module)
            error.why = with_origin(error.why, error.where, line_map)
        raise
    except Exception as error:
        where = _emitted_line(error.__traceback__, module)
        raise KernelCompileError(
            f"the interpreter cannot run {entry}: {type(error).__name__}: {error}",
            where=where,
            why=with_origin(None, where, line_map),
        ) from error


def _run_grid(
    language: Language, kernel: Callable[..., object], grid: tuple[int, int, int], values: list[object]
) -> None:
    position = language.builder.position
    position.extent = grid
    columns, rows, layers = (range(extent) for extent in grid)
    with np.errstate(all="ignore"):  # infinities and NaN are ordinary values of a kernel
        for z, y, x in itertools.product(layers, rows, columns):
            position.index = (x, y, z)
            kernel(*values)


def _argument(language: Language, name: str, value: object, kind: TypedArg | None) -> object:
    """Return a value as the tensor of Triton's that the compiled kernel would see."""
    match value:
        case torch.Tensor():
            return _pointer(language, name, value)
        case None:
            return _null(language, kind)
        case bool() | int() | float():
            return language.intrinsics.scalar(value, _scalar_type(language, value, kind))
        case _:
            raise InternalError(f"argument {name!r} of a kernel is a {type(value).__name__}, not a tensor or a number")


def _pointer(language: Language, name: str, tensor: torch.Tensor) -> object:
    if tensor.device.type != "cpu":
        raise InternalError(f"argument {name!r} of an interpreted kernel is on {tensor.device}, not on the CPU")
    tl = language.tl
    bounded = bounded_pointer(
        tl.pointer_type, tl.str_to_ty(triton_name(tensor.dtype), None), tensor_region(name, tensor)
    )
    return tl.tensor(Value(np.array([tensor.data_ptr()], dtype=np.uint64), bounded), bounded)


def _null(language: Language, kind: TypedArg | None) -> object:
    tl = language.tl
    element = kind.type.removeprefix("*") if kind is not None and is_pointer(kind) else "i8"
    bounded = bounded_pointer(tl.pointer_type, tl.str_to_ty(element, None), NULL)
    return tl.tensor(Value(np.zeros(1, dtype=np.uint64), bounded), bounded)


def _scalar_type(language: Language, value: bool | int | float, kind: TypedArg | None) -> Any:
    tl = language.tl
    if kind is not None:
        return tl.str_to_ty(kind.type, None)
    if isinstance(value, float):
        return tl.float32
    if isinstance(value, bool):
        return tl.int1
    return tl.int32 if -(2**31) <= value < 2**31 else tl.int64


def _kernel(language: Language, module: ModuleType, entry: str) -> Any:
    with _translated_lock:
        namespace = _translated.get(module)
        if namespace is None:
            namespace = _translated[module] = _translate(language, module)
    kernel = namespace.get(entry)
    if not is_jitted(getattr(module, entry, None)) or kernel is None:
        raise InternalError(f"module {module.__name__} has no kernel {entry!r}")
    return kernel


def _translate(language: Language, module: ModuleType) -> dict[str, Any]:
    """Return the globals of an emitted module with everything of Triton's replaced by the private copy's."""
    tl = language.tl
    originals = vars(module)
    namespace = {name: _translate_value(language, value) for name, value in originals.items()}
    # In a kernel these three names mean Triton's functions.
    namespace |= {"range": language.intrinsics.loop, "min": tl.minimum, "max": tl.maximum}
    namespace |= language.intrinsics.names()
    jitted = {name for name, value in originals.items() if is_jitted(value)}
    rewrite.define_functions(_source_of(module), str(module.__file__), jitted, namespace)
    return namespace


def _translate_value(language: Language, value: Any) -> Any:
    if value is triton.language:
        return language.tl
    if isinstance(value, triton.language.constexpr):
        return language.tl.constexpr(_translate_value(language, value.value))
    if isinstance(value, triton.language.dtype):
        return language.tl.str_to_ty(value.name, None)
    if str(getattr(value, "__module__", "")).startswith("triton.language."):  # imported by name
        return getattr(language.tl, getattr(value, "__name__", ""), value)
    return value


def _source_of(module: ModuleType) -> str:
    """Return a module's text as Python's line cache has it, which `load_module` primes with what it verified."""
    return "".join(linecache.getlines(str(module.__file__), vars(module)))


def _emitted_line(traceback: TracebackType | None, module: ModuleType) -> SourceSpan | None:
    """Return the innermost line of the emitted module that was running."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == module.__file__:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    if line is None:
        return None
    text = _source_of(module).splitlines()[line - 1]
    return SourceSpan(str(module.__file__), line, 0, line, len(text), text)

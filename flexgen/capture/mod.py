"""One mod through the tracer: checks its signature, traces it, and turns what it returned into the root of a graph."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from flexgen.capture.builder import NodeBuilder
from flexgen.capture.call import Context
from flexgen.capture.names import sanitise
from flexgen.capture.numbers import NeedsConstant, number_node
from flexgen.capture.source import definition_of, user_span_of_traceback
from flexgen.capture.tensors import CapturedTensors
from flexgen.capture.tracer import Tracer
from flexgen.capture.values import Refused
from flexgen.errors import CaptureError, FlexgenError, SourceSpan, UnsupportedOpError, first_line
from flexgen.ir.graph import Node, const

Kind = Literal["score", "mask"]

_INDICES = ("b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True, slots=True)
class TracedMod:
    """A traced mod, before its buffers are described."""

    kind: Kind
    name: str
    root: Node
    sizes_read: frozenset[tuple[str, int]]


def trace_mod(
    kind: Kind, mod: Callable[..., object], captured: CapturedTensors, builder: NodeBuilder, score_dtype: torch.dtype
) -> TracedMod:
    """Trace one mod.

    Raises:
        CaptureError: the mod raised, branched on a traced value, or returned something other than one element.
        UnsupportedOpError: it uses operations that are not compiled; all of them are listed.
    """
    inputs = {"score": score_dtype} if kind == "score" else {}
    inputs |= dict.fromkeys(_INDICES, torch.int64)
    code = code_of(mod)
    _check_signature(kind, mod, list(inputs), definition_of(code))
    context = Context(kind, builder)
    tracer = Tracer(context, captured)
    root = _run(tracer, mod, inputs, score_dtype, definition_of(code))
    builder.origin = None
    if tracer.problems:
        raise UnsupportedOpError(tracer.problems)
    return TracedMod(kind, mod_name(mod, f"{kind}_mod"), root, frozenset(context.sizes_read))


def _run(
    tracer: Tracer,
    mod: Callable[..., object],
    inputs: dict[str, torch.dtype],
    dtype: torch.dtype,
    where: SourceSpan | None,
) -> Node:
    try:
        returned = tracer.run(mod, inputs)
        return _root(tracer, returned, dtype, where)
    except NeedsConstant:
        raise
    except FlexgenError as error:
        raise _with_problems(tracer, error) from error.__cause__
    except Refused as refused:
        raise _with_problems(tracer, refused.error) from None
    except Exception as error:
        raise _with_problems(tracer, _raised(tracer, mod, error, where)) from error


def _with_problems(tracer: Tracer, error: FlexgenError) -> FlexgenError:
    """Return the error together with the operations that were refused before it."""
    return UnsupportedOpError([*tracer.problems, error]) if tracer.problems else error


def _raised(tracer: Tracer, mod: Callable[..., object], error: Exception, where: SourceSpan | None) -> CaptureError:
    return CaptureError(
        f"{mod_name(mod, 'the mod')} raised {type(error).__name__}: {first_line(error)}",
        where=user_span_of_traceback(error.__traceback__) or where,
        why="mods are traced by calling them once with 0-d tensors for score, b, h, q_idx and kv_idx.",
        fix=_numpy_fix(mod) or "make the mod run on 0-d tensors; captured values are read as they are now.",
    )


def _numpy_fix(mod: Callable[..., object]) -> str | None:
    """Say what to do about a captured numpy array, which a traced index cannot index."""
    function = inspect.unwrap(mod) if inspect.isfunction(mod) else mod
    captured = inspect.getclosurevars(function) if inspect.isfunction(function) else None
    named = {**captured.globals, **captured.nonlocals} if captured else {}
    arrays = [name for name, value in named.items() if isinstance(value, np.ndarray)]
    if not arrays:
        return None
    return f"capture {arrays[0]} as a tensor: torch.from_numpy({arrays[0]}), made outside of the mod."


def _root(tracer: Tracer, returned: object, dtype: torch.dtype, where: SourceSpan | None) -> Node:
    """Return the root that a mod's return value stands for: a bool of a mask, a float of a score."""
    kind = tracer.context.kind
    if isinstance(returned, np.generic):
        returned = returned.item()
    value = tracer.result(returned)
    if value is None:
        node = _number_root(tracer, returned, dtype, where)
    elif value.dims:
        raise _wrong_result(kind, f"a tensor of shape {value.shape}", where, "index or reduce it to one element.")
    else:
        node = value.node
    if kind == "mask":
        if node.dtype != torch.bool:
            raise _not_bool(str(node.dtype), where)
        return node
    return tracer.context.builder.cast(node, dtype)


def _number_root(tracer: Tracer, returned: object, dtype: torch.dtype, where: SourceSpan | None) -> Node:
    captured_number = number_node(returned)
    if captured_number is not None:
        return captured_number.expr
    if not isinstance(returned, bool | int | float):
        shown = "None" if returned is None else f"a {type(returned).__name__}"
        raise _wrong_result(tracer.context.kind, shown, where, "return one tensor element (is a `return` missing?).")
    if tracer.context.kind == "score":
        return const(float(returned), dtype)
    if not isinstance(returned, bool):
        raise _not_bool(f"the number {returned!r}", where)
    return const(returned, torch.bool)


def _wrong_result(kind: Kind, what: str, where: SourceSpan | None, fix: str) -> CaptureError:
    return CaptureError(
        f"the {kind}_mod returned {what}",
        where=where,
        why=f"a {kind}_mod computes one element: a 0-d tensor or a number.",
        fix=fix,
    )


def _not_bool(what: str, where: SourceSpan | None) -> CaptureError:
    return CaptureError(
        f"the mask_mod returned {what}, not bool",
        where=where,
        why="True keeps a score and False masks it; a number could mean a weight.",
        fix="return a comparison such as `q_idx >= kv_idx`, or convert with `.bool()`.",
    )


def _check_signature(kind: Kind, mod: Callable[..., object], inputs: list[str], where: SourceSpan | None) -> None:
    if not callable(mod):
        raise CaptureError(f"the {kind}_mod is {mod!r}, which is not callable", fix="pass a function.")
    try:
        signature = inspect.signature(mod)
    except (TypeError, ValueError):
        return  # a builtin without a signature: the call itself will tell
    try:
        signature.bind(*inputs)
    except TypeError as error:
        raise CaptureError(
            f"{mod_name(mod, kind + '_mod')}{signature} cannot be called as a {kind}_mod: {error}",
            where=where,
            why=f"a {kind}_mod takes {len(inputs)} arguments: ({', '.join(inputs)}).",
            fix="give the mod these parameters (their names are free), or bind the others with functools.partial.",
        ) from None


def code_of(mod: Any) -> types.CodeType | None:
    """Return the code that calling the mod runs, where it is Python."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    if isinstance(mod, torch.nn.Module):
        mod = mod.forward
    if not isinstance(mod, types.FunctionType | types.MethodType):
        mod = type(mod).__call__ if callable(mod) else None
    return getattr(mod, "__code__", None)


def mod_name(mod: Any, fallback: str) -> str:
    """Return the user's name for a mod as an identifier: its function's, or its class's."""
    while isinstance(mod, functools.partial):
        mod = mod.func
    name = getattr(mod, "__name__", None) or type(mod).__name__
    return sanitise(name, fallback) if name != "<lambda>" else fallback

"""Tensor methods that never reach aten, or reach it too late: truth values, indexing, sizes, devices, printing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from flexgen.capture.call import Context
from flexgen.capture.gradient import stopped
from flexgen.capture.indexing import getitem
from flexgen.capture.source import branch_at
from flexgen.capture.tensors import CapturedTensors
from flexgen.capture.values import Refused, Value
from flexgen.errors import CaptureError, FlexgenError, SourceSpan


class Tracing(Protocol):
    """What an interceptor needs of the tracer."""

    context: Context
    captured: CapturedTensors

    @property
    def span(self) -> SourceSpan | None: ...
    def report(self, error: FlexgenError) -> None: ...
    def is_traced(self, tensor: torch.Tensor) -> bool: ...
    def swap(self, arg: Any) -> Any: ...
    def value_of(self, tensor: torch.Tensor) -> Value: ...
    def new_view(self, base: torch.Tensor, value: Value) -> torch.Tensor: ...


Interceptor = Callable[[Tracing, Any, Sequence[Any], Mapping[str, Any]], Any]

_BOOLEAN_ADVICE = {
    "and": "write `&` between the two conditions, each in parentheses.",
    "or": "write `|` between the two conditions, each in parentheses.",
    "not": "write `~condition`, or torch.logical_not.",
    "in": "write `(x == a) | (x == b)`; for many values, index a captured bool table.",
    "a chained comparison": "write `(a <= x) & (x < b)`.",
    "if": "write torch.where(condition, then, otherwise); for conditions, `&`, `|` and `~`.",
    "min()": "write torch.minimum(a, b) or x.clamp(max=b).",
    "max()": "write torch.maximum(a, b) or x.clamp(min=b).",
}
_ANY_ADVICE = "write torch.where(condition, then, otherwise) for a choice, and `&`, `|`, `~` for conditions."


def _truth(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not tracer.is_traced(args[0]):
        return func(*args, **kwargs)
    span = tracer.span
    construct = branch_at(span) if span is not None else None
    what = f"Python `{construct}`" if construct else "a Python truth test"
    raise CaptureError(
        f"{what} on a value that differs from element to element",
        where=span,
        why="a mod is compiled once for all elements, so Python cannot decide by one element's value.",
        fix=_BOOLEAN_ADVICE.get(construct or "", _ANY_ADVICE) + " (torch.where, `&`, `|` and `~` all compile.)",
    )


def _number(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Refuse `int(x)`, `x.item()`, `x.tolist()`, `range(x)`: they need the value itself."""
    if not tracer.is_traced(args[0]):
        return func(*args, **kwargs)
    name = func.__name__.strip("_")
    raise CaptureError(
        f"`{name}` needs the value of a traced tensor as a Python number",
        where=tracer.span,
        why="the value differs from element to element and is only known inside the kernel.",
        fix="keep it a tensor: `.long()`, `.float()`, torch.where, `//` and indexing all work on tensors.",
    )


def _printed(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not tracer.is_traced(args[0]):
        return func(*args, **kwargs)
    raise CaptureError(
        "the mod prints or formats a traced value",
        where=tracer.span,
        why="the value only exists inside the kernel.",
        fix="print outside the mod, or evaluate the mod on real tensors: `mod(score, b, h, q_idx, kv_idx)`.",
    )


def _refuser(what: str, why: str, fix: str) -> Interceptor:
    def refuse(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> NoReturn:
        raise CaptureError(what, where=tracer.span, why=why, fix=fix)

    return refuse


def _getitem(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source, index = args
    items = index if isinstance(index, tuple) else (index,)
    tensors = [source, *(item for item in items if isinstance(item, torch.Tensor))]
    if not any(tracer.is_traced(tensor) for tensor in tensors):
        return func(*args, **kwargs)
    base = tracer.swap(source)
    try:
        value = getitem(tracer.context, tracer.value_of(base), [_index_item(tracer, item) for item in items])
        value = value if torch.is_grad_enabled() else stopped(tracer.context, value)
    except Refused as refused:
        raise refused.error from None
    return tracer.new_view(base, value)


def _index_item(tracer: Tracing, item: Any) -> Any:
    if isinstance(item, list | range):
        item = torch.tensor(list(item), dtype=torch.int64, device="cpu")
    if isinstance(item, torch.Tensor):
        return tracer.value_of(tracer.swap(item))
    if isinstance(item, bool):
        tracer.context.refuse("indexing with a bool", fix="use torch.where.")
    return item


def _setitem(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if not any(isinstance(arg, torch.Tensor) and tracer.is_traced(arg) for arg in _flat(args)):
        return func(*args, **kwargs)
    raise CaptureError(
        "the mod assigns to elements of a tensor (`x[i] = y`)",
        where=tracer.span,
        why="a mod is a function of its inputs; kernels evaluate it many times, in no defined order.",
        fix="build the value with torch.where, or fill the tensor outside the mod.",
    )


def _flat(args: Sequence[Any]) -> list[Any]:
    return [item for arg in args for item in (arg if isinstance(arg, tuple) else (arg,))]


def _shape(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Read sizes (`shape`, `size()`, `len`, `numel`): the ones read become constants that are guarded."""
    swapped = tracer.swap(args[0])
    if tracer.is_traced(swapped):
        dims = tracer.value_of(swapped).dims
        one = args[1] if len(args) > 1 else kwargs.get("dim")
        if func is torch.Tensor.__len__:
            one = 0
        tracer.context.mark(*(dims if not isinstance(one, int) or not dims else (dims[one],)))
    return func(swapped, *args[1:], **kwargs)


def _device(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tracer.captured.device if tracer.is_traced(args[0]) else func(*args, **kwargs)


def _is_cuda(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tracer.captured.device.type == "cuda" if tracer.is_traced(args[0]) else func(*args, **kwargs)


def _unmoved(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return tracer.swap(args[0])


def _to(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Convert the dtype; a device is ignored, since the kernel decides where things are."""
    tensor = tracer.swap(args[0])
    wanted = [tracer.swap(arg) for arg in args[1:]] + [kwargs.get("dtype"), tracer.swap(kwargs.get("other"))]
    dtypes = [arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in wanted]
    dtype = next((arg for arg in dtypes if isinstance(arg, torch.dtype)), None)
    return tensor if dtype is None else torch.ops.aten.to.dtype(tensor, dtype)


def _data(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor = tracer.swap(args[0])
    return torch.ops.aten.detach(tensor) if tracer.is_traced(tensor) else func(*args, **kwargs)


def _new_tensor(tracer: Tracing, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensor = tracer.swap(args[0])
    data = args[1] if len(args) > 1 else kwargs.get("data")
    return torch.tensor(data, dtype=kwargs.get("dtype") or tensor.dtype, device="cpu")


_T: Any = torch.Tensor  # getters such as `Tensor.shape.__get__` are unknown to the type stubs
_NO_AUTOGRAD = _refuser(
    "the mod runs autograd",
    "gradients are derived from the mod's value by the backward kernels.",
    "remove the call from the mod.",
)

INTERCEPTED: dict[Any, Interceptor] = {
    **dict.fromkeys((_T.__bool__, _T.__contains__, _T.is_nonzero), _truth),
    **dict.fromkeys((_T.__int__, _T.__float__, _T.__index__, _T.__complex__, _T.item, _T.tolist, _T.numpy), _number),
    **dict.fromkeys((_T.__repr__, _T.__format__), _printed),
    **dict.fromkeys((_T.backward, _T.requires_grad_, _T.register_hook, torch.autograd.grad), _NO_AUTOGRAD),
    **dict.fromkeys((_T.shape.__get__, _T.size, _T.numel, _T.nelement, _T.__len__, _T.stride), _shape),
    **dict.fromkeys((_T.cuda, _T.cpu), _unmoved),
    _T.__getitem__: _getitem,
    _T.__setitem__: _setitem,
    _T.device.__get__: _device,
    _T.is_cuda.__get__: _is_cuda,
    _T.to: _to,
    _T.new_tensor: _new_tensor,
    _T.data.__get__: _data,
}

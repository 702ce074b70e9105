"""The dtype and shape of an operation's result, found by running it on samples."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexgen.capture import stand_in
from flexgen.capture.call import hint
from flexgen.capture.indexing import INDEXING

_MAX_SAMPLE_ELEMENTS = 1 << 16
_MAX_DENSE_ELEMENTS = 1 << 12  # torch warns of some operations on expanded tensors

Place = str  # "cpu" or "meta"


def result_metadata(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the operation's result on stand-ins: meta tensors, in the structure that the operation returns.

    Elementwise operations run on ones on the CPU: the meta device implements them in Python, which is slower and
    imports torch's compiler (a second) at the first. Views, indexing and large tensors run on the meta device.
    """
    place = "cpu" if _can_run_on_ones(func, (*args, *kwargs.values())) else "meta"
    samples = {key: torch.device(place) if key == "device" else _sample(arg, place) for key, arg in kwargs.items()}
    return _stand_in(func(*(_sample(arg, place) for arg in args), **samples))


def _can_run_on_ones(func: Any, args: Sequence[Any]) -> bool:
    name = str(func._schema.name).partition("::")[2]
    is_view = any(argument.alias_info is not None for argument in func._schema.arguments)
    return not is_view and name not in INDEXING and all(_is_small(arg) for arg in args)


def _is_small(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return all(_is_small(item) for item in arg)
    return not isinstance(arg, torch.Tensor) or arg.numel() <= _MAX_SAMPLE_ELEMENTS


@functools.lru_cache(maxsize=256)
def _ones(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return ones of any dtype (so that an integer division is defined); large ones share one element of memory."""
    ones = torch.ones((), dtype=torch.float32, device="cpu").to(dtype).expand(shape)
    return ones.contiguous() if ones.numel() <= _MAX_DENSE_ELEMENTS else ones


def _sample(arg: Any, place: Place) -> Any:
    if isinstance(arg, torch.Tensor):
        if place == "cpu":
            return _ones(tuple(arg.shape), arg.dtype)
        return stand_in.like(arg)
    if isinstance(arg, list | tuple):
        return type(arg)(_sample(item, place) for item in arg)
    return hint(arg)


def _stand_in(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return stand_in.like(result)
    if isinstance(result, list | tuple):
        return type(result)(_stand_in(item) for item in result)
    return result

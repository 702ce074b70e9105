"""What a kernel that drops weights prints more than another: two functions, their calls, and three arguments."""

from __future__ import annotations

import torch

from flexgen.codegen.dialects.triton import pointer_type
from flexgen.codegen.render import render_part
from flexgen.codegen.source import Arg, Role
from flexgen.lowering.dropout import Draws

_SCALAR_TYPES = {torch.float32: "fp32", torch.float64: "fp64"}


def dropout_functions(draws: Draws, *, transposed: bool = False) -> list[str]:
    """Return the device functions `dropout_stream` and `is_kept`; none where nothing is dropped.

    Args:
        transposed: tiles of scores are [keys, queries].
    """
    if draws is Draws.NONE:
        return []
    names = ("stream", draws.value)
    return [render_part(f"triton/dropout/{name}.py.jinja", transposed=transposed) for name in names]


def dropout_args(draws: Draws, accumulator_dtype: torch.dtype) -> list[Arg]:
    """Return the kernel arguments: the seed, and what probability and scale amount to."""
    if draws is Draws.NONE:
        return []
    return [
        Arg("dropout_seed_ptr", Role.TENSOR, "dropout_seed", None, pointer_type(torch.int64), False),
        Arg("drop_below", Role.DROPOUT, "drop_below", None, "u32", False),
        Arg("keep_scale", Role.DROPOUT, "keep_scale", None, _SCALAR_TYPES[accumulator_dtype], False),
    ]


def kept_call(draws: Draws, q_idx: str, kv_idx: str) -> str:
    """Return the call that says which pairs of a tile keep their weight, "" where all do.

    Args:
        q_idx, kv_idx: the tile's indices, broadcast to it.
    """
    match draws:
        case Draws.NONE:
            return ""
        case Draws.GROUPED:
            return "is_kept(stream, drop_below, q_start, kv_start)"
        case Draws.SINGLE:
            return f"is_kept(stream, drop_below, {q_idx}, {kv_idx})"

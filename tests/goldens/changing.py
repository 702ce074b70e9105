"""Lowers mods whose captured numbers change: a builder that yields its mods changes a number after the yield."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import flexgen
from flexgen.lowered import Lowered


def lower_after_change(
    build: Callable[[], Any],
    compile_mods: Callable[[Any], flexgen.Attention],
    lower: Callable[[flexgen.Attention], Lowered],
) -> Lowered:
    """Lower what `build` returns; where it yields instead, lower once there and again after it has run to its end."""
    if not inspect.isgeneratorfunction(build):
        return lower(compile_mods(build()))
    steps = build()
    attention = compile_mods(next(steps))
    lower(attention)
    assert next(steps, None) is None
    return lower(attention)

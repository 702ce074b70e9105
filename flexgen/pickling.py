"""Mods that cannot be pickled by name, refused with what to do instead."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from flexgen.errors import ModPicklingError

_BY_VALUE = frozenset({"cloudpickle", "dill"})  # picklers that write a function's code, not its name


def check_pickles(*mods: Any) -> None:
    """Refuse mods that pickle cannot find again by name; call it from `__reduce__`.

    Raises:
        ModPicklingError: a mod is a lambda or defined inside of a function, and the pickler writes names.
    """
    for function in (function for mod in mods for function in _functions(mod)):
        if not _is_found_by_name(function) and not _pickles_by_value():
            kind = "a lambda" if function.__name__ == "<lambda>" else "defined inside of a function, or replaced"
            raise ModPicklingError(
                f"the mod {function.__qualname__} of {function.__module__} cannot be pickled",
                why=f"it is {kind}, so loading could not find it by its name",
                fix="define it at the top level of a module; pass what it captures through functools.partial, or as "
                "attributes of an object whose method it is; to keep a model's parameters, save its state_dict()",
            )


def _functions(mod: Any) -> Iterator[types.FunctionType]:
    while isinstance(mod, functools.partial):
        mod = mod.func
    if isinstance(mod, types.FunctionType):
        yield mod


def _is_found_by_name(function: types.FunctionType) -> bool:
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is function


def _pickles_by_value() -> bool:
    """Whether one of the calls that led here is of a pickler that writes functions by value."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _BY_VALUE:
            return True
        frame = frame.f_back
    return False

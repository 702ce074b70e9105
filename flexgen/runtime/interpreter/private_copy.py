"""Import Triton's language and interpreter a second time, to change the copies and leave the originals alone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language.extra

# Inside the triton package, so that relative imports resolve to the rest of it.
_LANGUAGE = "triton.flexgen_interpreted_language"
_INTERPRETER = "triton.runtime.flexgen_interpreter"


def copy_language() -> Any:
    """Return a copy of triton.language with its submodules; device libraries, which only a GPU has, are shared."""
    sys.modules[f"{_LANGUAGE}.extra"] = triton.language.extra
    return _import_copy(_LANGUAGE, "triton.language")


def submodule(name: str) -> Any:
    """Return a submodule of the copy of the language, such as `core`."""
    return importlib.import_module(f"{_LANGUAGE}.{name}")


def copy_interpreter(tl: Any) -> Any:
    """Return a copy of triton.runtime.interpreter that knows the copied language `tl`."""
    interpreter: Any = _import_copy(_INTERPRETER, "triton.runtime.interpreter")
    interpreter.tl = tl
    interpreter._get_np_dtype = _remembering_names(interpreter._get_np_dtype)
    return interpreter


def _import_copy(name: str, original: str) -> ModuleType:
    found = importlib.util.find_spec(original)
    assert found is not None and found.origin is not None
    spec = importlib.util.spec_from_file_location(
        name, found.origin, submodule_search_locations=found.submodule_search_locations
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _remembering_names(np_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Put a table in front of the function, keyed by the types' names: pointer types are not hashable."""
    table: dict[str, Any] = {}

    @functools.wraps(np_dtype_of)
    def lookup(dtype: Any) -> Any:
        found = table.get(dtype.name)
        if found is None:
            found = table[dtype.name] = np_dtype_of(dtype)
        return found

    return lookup

"""The mods behind tests/golden/mods: one op or idiom each, named after what its golden file shows."""

from __future__ import annotations

from tests.goldens.mods import arithmetic, captures, functions, indices, names, run_time, selection
from tests.goldens.mods.case import ModCase

MODULES = (arithmetic, functions, selection, indices, captures, run_time, names)
CASES: tuple[ModCase, ...] = tuple(
    value for module in MODULES for value in vars(module).values() if isinstance(value, ModCase)
)

"""Imports go one way, from the command line down to the errors, and the IR knows nothing but torch's dtypes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "flexgen"

# A module may import from its own layer and from those above it in this list.
LAYERS = (
    {"collector", "errors", "option_docs", "options", "problem"},
    {"ir"},
    {"capture"},
    {"lowering"},
    {"codegen"},
    {"runtime"},
    {
        "api",
        "attention",
        "aux_outputs",
        "backends",
        "block_mask",
        "block_states",
        "dropout",
        "explain",
        "extras",
        "fitting",
        "jagged",
        "explain_score",
        "explain_work",
        "export",
        "export_binary",
        "lowered",
        "patch",
        "pickling",
        "prepared_backward",
        "pipeline",
        "torch_library",
        "sinks",
        "tables",
        "training",
        "tuning",
        "warm_calls",
        "work",
    },
    {"distributed", "integrations"},
    {"fuzzing"},
    {"commands", "cli", "__main__"},
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# Where a library may be imported at all; anything may import what is not named here.
ALLOWED_IN = {
    "jinja2": {"codegen"},
    "rich": {"commands"},
    "matplotlib": {"commands"},
    "attn_gym": set(),
    "hypothesis": {"fuzzing"},
    "transformers": {"integrations"},
}
IR_MAY_IMPORT = {"torch", "flexgen", "numpy"}

MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def imported_names(path: Path) -> Iterator[str]:
    """Yield the dotted names a module imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=module, level=0, names=aliases):
                yield from (f"{module}.{alias.name}" for alias in aliases)
            case ast.ImportFrom():
                raise AssertionError(f"{path.name} has a relative import; spell the whole name")


def part_of(dotted: str) -> str | None:
    """Return which part of flexgen a dotted name lies in ("ir" for flexgen.ir.graph.Node), or None if in none."""
    names = dotted.split(".")
    return names[1] if names[0] == "flexgen" and len(names) > 1 else None


def own_part(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_from_its_layer_and_above(path: Path) -> None:
    own = own_part(path)
    assert own in LAYER_OF, f"say in LAYERS where {own} belongs"
    parts = {part for part in map(part_of, imported_names(path)) if part in LAYER_OF}
    below = {part for part in parts if LAYER_OF[part] > LAYER_OF[own]}
    assert not below, f"{own} imports from {sorted(below)}, which stand below it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_libraries_stay_in_their_part(path: Path) -> None:
    own = own_part(path)
    libraries = {name.split(".")[0] for name in imported_names(path)}
    strays = {library for library in libraries if own not in ALLOWED_IN.get(library, {own})}
    assert not strays, f"{own} imports {sorted(strays)}"


def test_the_ir_knows_only_torch() -> None:
    for path in (PACKAGE / "ir").rglob("*.py"):
        libraries = {name.split(".")[0] for name in imported_names(path)} - sys.stdlib_module_names
        assert libraries <= IR_MAY_IMPORT, path.name

"""The Gluon dialect: the one place that knows Gluon's names, which Triton versions have them, and their spelling.

Gluon is Triton's dialect of explicit layouts. Scalars and elementwise tensors are written with the same words as in
plain Triton, in a namespace of its own, so what the printers printed is translated word by word.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from flexgen.errors import InternalError


@dataclass(frozen=True, slots=True)
class Spelling:
    """The words of Gluon's that the templates use and that were renamed between releases of Triton.

    Attributes:
        load_tile: of the module tma, what starts a copy of a tile into shared memory.
    """

    load_tile: str


# By the first release that has them.
SPELLINGS = {"3.6": Spelling("async_copy_global_to_shared"), "3.9": Spelling("async_load")}
# Releases whose names and meaning the templates were written for, and the spelling for each.
SUPPORTED_TRITON = {"3.6": "3.6", "3.7": "3.6", "3.8": "3.6", "3.9": "3.9"}
OLDEST = "3.6"  # also where there is no Triton: kernels are emitted all the same

LANGUAGE = "triton.experimental.gluon.language"
HOPPER = f"{LANGUAGE}.nvidia.hopper"

# What the templates use, by module.
REQUIRED = {
    "triton.experimental.gluon": ("jit",),
    LANGUAGE: (
        *("NVMMADistributedLayout", "NVMMASharedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout"),
        *("allocate_shared_memory", "warp_specialize", "convert_layout", "inline_asm_elementwise", "arange", "full"),
        *("load", "store", "where", "maximum", "minimum", "sum", "max", "min", "exp2", "log", "cdiv", "static_range"),
    ),
    HOPPER: ("fence_async_shared", "mbarrier", "tma", "warpgroup_mma", "warpgroup_mma_wait"),
    f"{HOPPER}.mbarrier": ("MBarrierLayout", "init", "expect", "wait", "arrive"),
}

# Words of plain Triton that Gluon has under the same name.
_SAME = frozenset(
    {
        *("abs", "arange", "cdiv", "ceil", "constexpr", "cos", "erf", "exp", "exp2", "floor", "inline_asm_elementwise"),
        *("load", "log", "log2", "max", "maximum", "min", "minimum", "program_id", "rsqrt", "sin", "sqrt", "store"),
        *("sum", "where", "int1", "int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32"),
        *("float64", "float8e4nv", "float8e5"),
    }
)
_KEPT = frozenset({"PropagateNan"})  # Gluon takes plain Triton's own

# Words that Gluon lacks or that need a layout: functions of the module instead, from templates of the same name.
HELPERS = frozenset({"sigmoid", "broadcast_to", "full"})

_WORD = re.compile(r"\btl\.(\w+)")


def translate(text: str) -> str:
    """Return printed Triton text in Gluon's words.

    Raises:
        InternalError: for a word that has no row here.
    """
    return _WORD.sub(_word, text).replace("@triton.jit", "@gluon.jit")


def _word(match: re.Match[str]) -> str:
    word = match.group(1)
    if word in _SAME:
        return f"gl.{word}"
    if word in HELPERS:
        return word
    if word in _KEPT:
        return match.group()
    raise InternalError(f"Gluon has no spelling for tl.{word}")


def helpers_in(lines: Iterable[str]) -> list[str]:
    """Return the helper functions that Triton text needs in Gluon, in a fixed order."""
    words = {word for line in lines for word in _WORD.findall(line)}
    return sorted(words & HELPERS)


@cache
def why_unavailable() -> str | None:
    """Return why the installed Triton cannot compile these kernels; None if it can, or if there is no Triton.

    Without Triton kernels are only emitted.
    """
    version = _installed()
    if version is None:
        return None
    release = _release(version)
    if release is None:
        return f"Triton {version} is none of the versions whose Gluon is known: {', '.join(SUPPORTED_TRITON)}"
    names = {**REQUIRED, f"{HOPPER}.tma": (SPELLINGS[SUPPORTED_TRITON[release]].load_tile,)}
    missing = [f"{module}.{name}" for module, found in names.items() for name in found if not _has(module, name)]
    return f"Triton {version} has no {missing[0]}" if missing else None


@cache
def installed_spelling() -> str:
    """Return the key in SPELLINGS of what kernels are written in for the installed Triton."""
    return spelling_of(_installed())


def spoken_releases() -> list[str]:
    """Return the supported releases of Triton whose words kernels are written in here."""
    return [release for release, spelling in SUPPORTED_TRITON.items() if spelling == installed_spelling()]


def spelling_of(version: str | None) -> str:
    """Return the key in SPELLINGS for a version of Triton, as 3.7.1; for an unknown one, or none, the oldest."""
    release = _release(version) if version is not None else None
    return SUPPORTED_TRITON[release] if release is not None else OLDEST


def _installed() -> str | None:
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return None


def _release(version: str) -> str | None:
    """Return the supported release that a version belongs to, as 3.7 for 3.7.1."""
    release = ".".join(version.split(".")[:2])
    return release if release in SUPPORTED_TRITON else None


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name)
    except ImportError:
        return False


def shared_layout(block: tuple[int, ...], dtype: str) -> object:
    """Return Gluon's layout of a tile in shared memory that the copy engine fills and matrix instructions read.

    Args:
        block: the tile's shape.
        dtype: the element's name in Gluon, such as "bfloat16".
    """
    language = import_module(LANGUAGE)
    return language.NVMMASharedLayout.get_default_for(list(block), getattr(language, dtype))


def ast_source() -> type:
    """Return Gluon's counterpart of Triton's ASTSource: what `triton.compile` takes."""
    found: type = import_module("triton.experimental.gluon._runtime").GluonASTSource
    return found

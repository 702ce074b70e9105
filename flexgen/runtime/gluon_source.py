"""What Triton's compiler takes for a Gluon kernel: full descriptor types, which name the tile's layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from flexgen.codegen.dialects.gluon import ast_source, shared_layout

_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\]>")
_ELEMENTS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def gluon_source(function: Any, signature: Mapping[str, str], attrs: Mapping[tuple[int], Any]) -> Any:
    """Return the source of a Gluon kernel, for `triton.compile`."""
    types = {name: _with_layout(kind) for name, kind in signature.items()}
    return ast_source()(fn=function, signature=types, constexprs={}, attrs=dict(attrs))


def _with_layout(kind: str) -> str:
    """Return a signature type; a descriptor's with the layout of its tile, as this version of Triton writes it."""
    found = _DESCRIPTOR.fullmatch(kind)
    if found is None:
        return kind
    block = tuple(int(size) for size in found[2].split(","))
    return f"tensordesc<{found[1]}[{found[2]}],{shared_layout(block, _ELEMENTS[found[1]])!r}>"

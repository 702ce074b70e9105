"""The table from aten (and prims) operations to converters; another library's operation is one more entry."""

from __future__ import annotations

from collections.abc import Callable

from flexgen.capture.call import Call
from flexgen.capture.creation import CREATION
from flexgen.capture.gradient import GRADIENT_STOPS
from flexgen.capture.indexing import INDEXING
from flexgen.capture.pointwise import POINTWISE
from flexgen.capture.reductions import REDUCTIONS
from flexgen.capture.values import Value
from flexgen.capture.views import VIEWS

Converter = Callable[[Call], Value | tuple[Value, ...]]

# Operations of other libraries whose meaning, derivative included, is that of an operation in the tables.
CUSTOM_OPS: dict[str, Converter] = {
    "approx::tanh": POINTWISE["tanh"],  # attn_gym's softcap
}

CONVERTERS: dict[str, Converter] = {
    **POINTWISE,
    **VIEWS,
    **REDUCTIONS,
    **INDEXING,
    **CREATION,
    **GRADIENT_STOPS,
}


def converter_of(qualified_name: str) -> Converter | None:
    """Return the converter of `namespace::name`, or None where there is none (a decomposition may exist)."""
    namespace, _, name = qualified_name.partition("::")
    if namespace in ("aten", "prims"):
        return CONVERTERS.get(name)
    return CUSTOM_OPS.get(qualified_name)

"""The values of the IR: interned expression nodes, captured buffers and scalars, graphs, and a pair of mods."""

from __future__ import annotations

import enum
import math
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from flexgen.ir.ops import OPS


class Axis(enum.Enum):
    """An axis of the score tensor that a value may depend on."""

    B = "b"
    H = "h"
    Q = "q"
    KV = "kv"


ALL_AXES = frozenset(Axis)

# The inputs of mods, and `grad`, which derivatives of a score mod read beside them: the gradient of what it returned.
# Analysis adds inputs of its own (the corners of a tile, lengths), which depend on no axis.
INPUT_AXES: dict[str, frozenset[Axis]] = {
    "score": ALL_AXES,
    "b": frozenset({Axis.B}),
    "h": frozenset({Axis.H}),
    "q_idx": frozenset({Axis.Q}),
    "kv_idx": frozenset({Axis.KV}),
    "grad": ALL_AXES,
}
MOD_INPUTS: dict[str, tuple[str, ...]] = {
    "score": ("score", "b", "h", "q_idx", "kv_idx"),
    "mask": ("b", "h", "q_idx", "kv_idx"),
}

Attr = str | int | float | bool | None


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Node:
    """One scalar operation. Interned: two nodes are equal exactly when they are the same object.

    Attributes:
        op: a name in `OPS`.
        args: operand nodes; for `load`, one integer index per dimension of the buffer.
        attr: the input's, scalar's or buffer's name, or the constant's value; else None.
        dtype: dtype of the value.
        axes: the score axes that the value depends on.
    """

    op: str
    args: tuple[Node, ...]
    attr: Attr
    dtype: torch.dtype
    axes: frozenset[Axis]

    def __repr__(self) -> str:
        """Show the node and its arguments; what is below them may be deep, and shared many times over."""
        shown = [repr(self.attr)] if self.attr is not None else []
        shown += [f"{arg.op}(...)" if arg.args else repr(arg) for arg in self.args]
        return f"{self.op}({', '.join(shown)})"


_interned: weakref.WeakValueDictionary[tuple[object, ...], Node] = weakref.WeakValueDictionary()
_intern_lock = threading.Lock()


def _attr_key(attr: Attr) -> object:
    """Tell apart 0, False, 0.0 and -0.0, and make NaN equal to itself."""
    if isinstance(attr, float):
        return ("float", attr.hex() if math.isfinite(attr) else repr(attr))
    return (type(attr).__name__, attr)


def make(op: str, *args: Node, attr: Attr = None, dtype: torch.dtype) -> Node:
    """Return the interned node; `axes` follows from the arguments (for an input, from its name)."""
    if op not in OPS:
        raise KeyError(f"no op {op!r} in the op table")
    key = (op, tuple(id(arg) for arg in args), _attr_key(attr), dtype)
    with _intern_lock:
        found = _interned.get(key)
        if found is None:
            axes = frozenset().union(*(arg.axes for arg in args)) if args else frozenset()
            if op == "input":
                axes = INPUT_AXES.get(str(attr), frozenset())
            found = Node(op, args, attr, dtype, axes)
            _interned[key] = found
    return found


def const(value: int | float | bool, dtype: torch.dtype) -> Node:
    """Return a constant, its value converted to the Python type that `dtype` calls for."""
    if dtype == torch.bool:
        return make("const", attr=bool(value), dtype=dtype)
    return make("const", attr=float(value) if dtype.is_floating_point else int(value), dtype=dtype)


def input_node(name: str, dtype: torch.dtype = torch.int64) -> Node:
    """Return an input; the indices of a mod are int64, as in torch's eager flex_attention."""
    return make("input", attr=name, dtype=dtype)


def topological(*roots: Node) -> Iterator[Node]:
    """Yield every node under the roots once, arguments before users, in a stable order. Never recurses."""
    seen: set[Node] = set()
    stack: list[Node | None] = list(reversed(roots))
    while stack:
        node = stack.pop()
        if node is None:  # the arguments of the node below it are done
            node = stack.pop()
            assert node is not None
            yield node
        elif node not in seen:
            seen.add(node)
            if node.args:
                stack += (node, None)
                stack += [arg for arg in reversed(node.args) if arg not in seen]
            else:
                yield node


StrideClass = Literal["0", "1", "*"]  # broadcast, unit, known at run time only


@dataclass(frozen=True, slots=True)
class Buffer:
    """A captured tensor: what of it is static.

    Attributes:
        name: unique among the mods' buffers and scalars; from the closure variable; a Python identifier.
        dtype: element dtype.
        sizes: one entry a dimension: a number where the mod read the size (guarded), else None (run time).
        strides: one class a dimension.
        requires_grad: whether a gradient may be asked for.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    strides: tuple[StrideClass, ...]
    requires_grad: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, slots=True)
class Scalar:
    """A captured Python number that is a run-time argument: int64 or float64 in meaning, weakly typed in torch."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Graph:
    """One captured mod: `root` over the inputs, loads of `buffers` and `scalars`.

    Attributes:
        kind: "score" (root is floating) or "mask" (root is bool).
        name: the user's function name, sanitised to an identifier.
    """

    kind: Literal["score", "mask"]
    name: str
    root: Node
    buffers: tuple[Buffer, ...] = ()
    scalars: tuple[Scalar, ...] = ()

    def nodes(self) -> Iterator[Node]:
        return topological(self.root)


@dataclass(frozen=True, slots=True)
class Mods:
    """The two mods of an attention; None where the user gave none (identity score, all-true mask)."""

    score: Graph | None = None
    mask: Graph | None = None

    def graphs(self) -> tuple[Graph, ...]:
        return tuple(graph for graph in (self.score, self.mask) if graph is not None)

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """Buffers of both mods, each once, in the order score then mask."""
        return tuple(dict.fromkeys(buffer for graph in self.graphs() for buffer in graph.buffers))

    @property
    def scalars(self) -> tuple[Scalar, ...]:
        return tuple(dict.fromkeys(scalar for graph in self.graphs() for scalar in graph.scalars))

"""Building IR nodes while a mod is traced: constants, casts, index arithmetic, and where each node came from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexgen.ir.dtypes import fits
from flexgen.ir.graph import Attr, Node, const, make
from flexgen.ir.origins import Origin

_LEAVES = frozenset({"input", "const", "scalar"})
_NONNEGATIVE_INPUTS = frozenset({"b", "h", "q_idx", "kv_idx"})
_WRAP_FREE = (torch.int32, torch.int64)  # casting an index to these keeps its sign


class NodeBuilder:
    """Makes nodes and notes, for each, the place in the user's source that is being traced.

    Attributes:
        origins: every place a node came from, first one first.
        origin: the place being traced now.
    """

    def __init__(self) -> None:
        self.origins: dict[Node, list[Origin]] = {}
        self.origin: Origin | None = None
        self._nonnegative: dict[Node, bool] = {}

    @contextmanager
    def at(self, origin: Origin | None) -> Iterator[None]:
        """Attribute the nodes made inside to `origin`."""
        before, self.origin = self.origin, origin
        try:
            yield
        finally:
            self.origin = before

    def node(self, op: str, *args: Node, attr: Attr = None, dtype: torch.dtype) -> Node:
        made = make(op, *args, attr=attr, dtype=dtype)
        if self.origin is not None and op not in _LEAVES:
            known = self.origins.setdefault(made, [])
            if self.origin not in known:
                known.append(self.origin)
        return made

    def assign(self, node: Node, origin: Origin) -> None:
        """Note that the user assigned this node to a variable: of an operation's nodes, only its result bears it."""
        if node.op in _LEAVES or origin.variable is None:
            return
        known = self.origins.setdefault(node, [])
        bare = Origin(None, origin.span)
        if bare in known:
            known[known.index(bare)] = origin
        elif origin not in known:
            known.append(origin)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return the node as `dtype`; constants change in place where no rounding is involved."""
        if node.dtype == dtype:
            return node
        is_whole = node.op == "const" and not node.dtype.is_floating_point and isinstance(node.attr, int)
        if is_whole and _is_exact(constant_index(node), dtype):
            return const(constant_index(node), dtype)
        return self.node("cast", node, dtype=dtype)

    def binary(self, op: str, left: Node, right: Node) -> Node:
        return self.node(op, left, right, dtype=left.dtype)

    def compare(self, op: str, left: Node, right: Node) -> Node:
        return self.node(op, left, right, dtype=torch.bool)

    def where(self, condition: Node, left: Node, right: Node) -> Node:
        return self.node("where", condition, left, right, dtype=left.dtype)

    # Index arithmetic of capture's own (views, wrapping): int64, folded, since the user did not write it.

    def index_const(self, value: int) -> Node:
        return const(value, torch.int64)

    def index_add(self, left: Node, right: Node) -> Node:
        if left.op == "const" and right.op == "const":
            return self.index_const(constant_index(left) + constant_index(right))
        if _is(left, 0) or _is(right, 0):
            return right if _is(left, 0) else left
        return self.node("add", self.cast(left, torch.int64), self.cast(right, torch.int64), dtype=torch.int64)

    def index_mul(self, left: Node, factor: int) -> Node:
        if left.op == "const" or factor == 0:
            return self.index_const(constant_index(left) * factor if factor else 0)
        if factor == 1:
            return left
        return self.node("mul", self.cast(left, torch.int64), self.index_const(factor), dtype=torch.int64)

    def index_divmod(self, left: Node, divisor: int) -> tuple[Node, Node]:
        if left.op == "const":
            quotient, rest = divmod(constant_index(left), divisor)
            return self.index_const(quotient), self.index_const(rest)
        if divisor == 1:
            return left, self.index_const(0)
        wide, by = self.cast(left, torch.int64), self.index_const(divisor)
        return self.node("floordiv", wide, by, dtype=torch.int64), self.node("mod", wide, by, dtype=torch.int64)

    def wrapped(self, index: Node, size: Node) -> Node:
        """Return the index counted from the start: a negative one counts from the end, as in torch."""
        if self.is_nonnegative(index):
            return index
        if index.op == "const" and size.op == "const":
            return self.index_const(constant_index(index) + constant_index(size))
        wide = self.cast(index, torch.int64)
        from_end = self.index_add(wide, size) if index.op != "const" else self._from_end(size, -constant_index(index))
        if index.op == "const":
            return from_end
        is_negative = self.compare("lt", wide, self.index_const(0))
        return self.where(is_negative, from_end, wide)

    def _from_end(self, size: Node, distance: int) -> Node:
        return self.node("sub", size, self.index_const(distance), dtype=torch.int64)

    def is_nonnegative(self, node: Node) -> bool:
        """Whether an integer value is provably never negative (overflow aside). Never recurses."""
        stack = [node]
        while stack:
            top = stack[-1]
            pending = [arg for arg in top.args if arg not in self._nonnegative]
            if top in self._nonnegative or not pending:
                stack.pop()
                self._nonnegative.setdefault(top, self._sign_rule(top))
            else:
                stack.extend(pending)
        return self._nonnegative[node]

    def _sign_rule(self, node: Node) -> bool:
        known = [self._nonnegative[arg] for arg in node.args]
        match node.op:
            case "input":
                return node.attr in _NONNEGATIVE_INPUTS
            case "const":
                return not isinstance(node.attr, str) and node.attr is not None and node.attr >= 0
            case "scalar":
                return ".size(" in str(node.attr)
            case "load":
                return node.dtype in (torch.bool, torch.uint8)
            case "add" | "mul" | "floordiv" | "truncdiv" | "min" | "or":
                return all(known)
            case "max" | "and":
                return any(known)
            case "mod":  # has the sign of the divisor
                return known[1]
            case "fmod" | "shr" | "shl":
                return known[0]
            case "abs":
                return True
            case "where":
                return known[1] and known[2]
            case "cast":
                return node.args[0].dtype == torch.bool or (known[0] and node.dtype in _WRAP_FREE)
        return node.dtype == torch.bool


def _is_exact(value: int, dtype: torch.dtype) -> bool:
    """Whether a whole number keeps its value in the dtype."""
    return abs(value) * torch.finfo(dtype).eps <= 2 if dtype.is_floating_point else fits(value, dtype)


def constant_index(node: Node) -> int:
    """Return the value of an integer constant."""
    if not isinstance(node.attr, int):
        raise TypeError(f"{node!r} is no integer constant")
    return node.attr


def _is(node: Node, value: int) -> bool:
    return node.op == "const" and node.attr == value

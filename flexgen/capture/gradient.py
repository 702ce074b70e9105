"""Gradient stops (`detach`, `.data`, `no_grad`) in a score_mod: allowed where no gradient would flow, else refused."""

from __future__ import annotations

from collections.abc import Callable

from flexgen.capture.call import Call, Context
from flexgen.capture.values import Indices, Value, scalar_value
from flexgen.ir.graph import Node, topological


def _carries_gradient(context: Context, node: Node) -> bool:
    if context.kind == "mask" or not node.dtype.is_floating_point:
        return False
    return any(
        (part.op == "input" and part.attr == "score") or (part.op == "load" and part.attr in context.gradient_buffers)
        for part in topological(node)
    )


def stopped(context: Context, source: Value) -> Value:
    """Return the value itself if no gradient flows through it.

    Raises:
        Refused: the score, or a captured tensor that requires a gradient, flows through it. The backward kernel is
            derived from the forward, in which a gradient stop cannot be seen.
    """
    if not source.dtype.is_floating_point or context.kind == "mask":
        return source

    def element(indices: Indices) -> Node:
        node = source.at(indices)
        if _carries_gradient(context, node):
            context.refuse(
                "stopping a gradient (detach, .data, no_grad)",
                "the backward kernels are derived from the mod's value, so the gradient would flow all the same.",
                "detach the captured tensor outside the mod; the score itself cannot be detached.",
            )
        return node

    if not source.dims:
        return scalar_value(element(()))
    return Value(source.dims, source.dtype, element, source.depth + 1, source.captured)


def _detach(call: Call) -> Value:
    return stopped(call.context, call.args[0])


GRADIENT_STOPS: dict[str, Callable[[Call], Value]] = {"detach": _detach, "stop_gradient": _detach}

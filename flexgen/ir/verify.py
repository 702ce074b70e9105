"""Checks the rules that every graph of the IR obeys; a broken one is flexgen's own fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flexgen.errors import InternalError
from flexgen.ir.dtypes import dtype_name, fits, is_integer
from flexgen.ir.graph import MOD_INPUTS, Attr, Buffer, Graph, Mods, Node, Scalar, make
from flexgen.ir.ops import OPS, DtypeRule
from flexgen.ir.sizes import SIZE_DTYPE, split_size_name
from flexgen.ir.text import print_graph

_MOST_PROBLEMS = 10
_MOST_LINES = 200
_FLOATING_INPUTS = frozenset({"score", "grad"})


def verify(subject: Mods | Graph, why: str | None = None) -> None:
    """Check a graph, or both mods and that they agree on what they captured.

    Args:
        why: who would be to blame.

    Raises:
        InternalError: a rule is broken; the message lists the broken rules and holds the IR.
    """
    mods = subject if isinstance(subject, Mods) else None
    graphs = mods.graphs() if mods is not None else (subject,) if isinstance(subject, Graph) else ()
    problems = [problem for graph in graphs for problem in _graph_problems(graph)]
    if mods is not None:
        problems.extend(_mods_problems(mods))
    refuse(problems, lambda: "\n".join(print_graph(graph) for graph in graphs), why)


def refuse(problems: list[str], text: Callable[[], str], why: str | None = None) -> None:
    """Raise an InternalError of the problems, if there are any, with the text of the IR they are about."""
    if problems:
        shown = [f"  {problem}" for problem in problems[:_MOST_PROBLEMS]]
        lines = text().split("\n")
        cut = [f"({len(lines) - _MOST_LINES} more lines)"] if len(lines) > _MOST_LINES else []
        told = "\n".join([f"the IR breaks {len(problems)} rule(s):", *shown, *lines[:_MOST_LINES], *cut])
        raise InternalError(told, why=why)


def _mods_problems(mods: Mods) -> Iterator[str]:
    if mods.score is not None and mods.score.kind != "score":
        yield f"the score mod is a {mods.score.kind} graph"
    if mods.mask is not None and mods.mask.kind != "mask":
        yield f"the mask mod is a {mods.mask.kind} graph"
    yield from _repeated_names(mods.buffers, mods.scalars)


def _repeated_names(buffers: tuple[Buffer, ...], scalars: tuple[Scalar, ...]) -> Iterator[str]:
    names = [buffer.name for buffer in buffers] + [scalar.name for scalar in scalars]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"{name!r} names more than one captured value"


def _graph_problems(graph: Graph) -> Iterator[str]:
    nodes = list(graph.nodes())
    yield from _root_problems(graph)
    yield from _declaration_problems(graph)
    yield from _use_problems(graph, nodes)
    yield from expression_problems(nodes, graph, MOD_INPUTS[graph.kind])


def expression_problems(nodes: list[Node], graph: Graph, inputs: tuple[str, ...]) -> Iterator[str]:
    """Yield the rules broken by nodes that read these inputs and what the graph declares."""
    yield from _input_problems(graph, nodes, inputs)
    for node in nodes:
        for problem in _node_problems(node, graph):
            yield f"{_summary(node)}: {problem}"


def _summary(node: Node) -> str:
    """Name a node without its arguments, which may be deep."""
    attr = "" if node.attr is None else f"[{node.attr!r}]"
    return f"{node.op}{attr}({', '.join(dtype_name(arg.dtype) for arg in node.args)}) -> {dtype_name(node.dtype)}"


def _root_problems(graph: Graph) -> Iterator[str]:
    dtype = graph.root.dtype
    if graph.kind == "mask" and dtype != torch.bool:
        yield f"the root of a mask is bool, not {dtype_name(dtype)}"
    if graph.kind == "score" and not dtype.is_floating_point:
        yield f"the root of a score is floating, not {dtype_name(dtype)}"


def _declaration_problems(graph: Graph) -> Iterator[str]:
    yield from _repeated_names(graph.buffers, graph.scalars)
    for buffer in graph.buffers:
        if len(buffer.sizes) != len(buffer.strides):
            yield f"buffer {buffer.name!r} has {len(buffer.sizes)} sizes and {len(buffer.strides)} strides"
    names = [buffer.name for buffer in graph.buffers] + [scalar.name for scalar in graph.scalars]
    yield from (f"{name!r} is no identifier" for name in names if not name.isidentifier())


def _use_problems(graph: Graph, nodes: list[Node]) -> Iterator[str]:
    used = used_captures(nodes)
    declared = [buffer.name for buffer in graph.buffers] + [scalar.name for scalar in graph.scalars]
    yield from (f"{name!r} is declared but not used" for name in declared if name not in used)


def used_captures(nodes: list[Node]) -> set[str]:
    """Return the names of the buffers that are loaded from or measured, and of the scalars, among the nodes."""
    used = {str(node.attr) for node in nodes if node.op in ("load", "scalar")}
    sizes = (split_size_name(node.attr) for node in nodes if node.op == "scalar")
    return used | {size[0] for size in sizes if size}


def _input_problems(graph: Graph, nodes: list[Node], inputs: tuple[str, ...]) -> Iterator[str]:
    dtypes: dict[Attr, torch.dtype] = {}
    for node in nodes:
        if node.op != "input":
            continue
        if dtypes.setdefault(node.attr, node.dtype) != node.dtype:
            yield f"input {node.attr!r} is read in two dtypes"
        if node.attr not in inputs:
            yield f"{node.attr!r} is no input of a {graph.kind} mod"
        elif not (node.dtype.is_floating_point if node.attr in _FLOATING_INPUTS else is_integer(node.dtype)):
            yield f"input {node.attr!r} cannot be {dtype_name(node.dtype)}"


def _node_problems(node: Node, graph: Graph) -> Iterator[str]:
    row = OPS.get(node.op)
    if row is None:
        yield "no such operation"
        return
    if make(node.op, *node.args, attr=node.attr, dtype=node.dtype) is not node:
        yield "the node is not interned, or its axes are not those of its arguments"
    if row.arity is not None and len(node.args) != row.arity:
        yield f"takes {row.arity} arguments"
        return
    if row.rule is DtypeRule.LEAF:
        yield from _LEAF_RULES[node.op](node, graph)
        return
    if node.attr is not None:
        yield "only leaves have an attribute"
    yield from _dtype_problems(row.rule, node)


def _dtype_problems(rule: DtypeRule, node: Node) -> Iterator[str]:
    dtype = node.dtype
    match rule:
        case DtypeRule.SAME | DtypeRule.FLOAT | DtypeRule.INTEGER | DtypeRule.BITS:
            if any(arg.dtype != dtype for arg in node.args):
                yield "the arguments have the dtype of the result"
            if not _ALLOWED[rule](dtype):
                yield f"not defined on {dtype_name(dtype)}"
        case DtypeRule.COMPARE:
            if dtype != torch.bool or node.args[0].dtype != node.args[1].dtype:
                yield "compares two values of one dtype and gives bool"
        case DtypeRule.SELECT:
            if node.args[0].dtype != torch.bool or any(arg.dtype != dtype for arg in node.args[1:]):
                yield "selects by a bool between two values of the result's dtype"
        case DtypeRule.CAST:
            if dtype.is_complex:
                yield "complex values are not supported"
        case DtypeRule.LEAF:
            raise AssertionError("leaves have rules of their own")


_ALLOWED: dict[DtypeRule, Callable[[torch.dtype], bool]] = {
    DtypeRule.SAME: lambda dtype: dtype.is_floating_point or is_integer(dtype),
    DtypeRule.FLOAT: lambda dtype: dtype.is_floating_point,
    DtypeRule.INTEGER: is_integer,
    DtypeRule.BITS: lambda dtype: dtype == torch.bool or is_integer(dtype),
}


def _input_rule(node: Node, _: Graph) -> Iterator[str]:
    if not isinstance(node.attr, str):
        yield "the attribute is the input's name"


def _const_rule(node: Node, _: Graph) -> Iterator[str]:
    value, dtype = node.attr, node.dtype
    wanted = bool if dtype == torch.bool else float if dtype.is_floating_point else int
    if type(value) is not wanted:
        yield f"the value of a {dtype_name(dtype)} constant is a {wanted.__name__}"
    elif wanted is int and isinstance(value, int) and not fits(value, dtype):
        yield f"{value} does not fit {dtype_name(dtype)}"


def _scalar_rule(node: Node, graph: Graph) -> Iterator[str]:
    size = split_size_name(node.attr)
    if size is not None:
        yield from _size_rule(node, size, graph)
        return
    scalar = next((scalar for scalar in graph.scalars if scalar.name == node.attr), None)
    if scalar is None:
        yield "the scalar is not declared"
    elif scalar.dtype != node.dtype:
        yield f"the scalar is declared {dtype_name(scalar.dtype)}"


def _size_rule(node: Node, size: tuple[str, int], graph: Graph) -> Iterator[str]:
    buffer = _declared_buffer(size[0], graph)
    if buffer is None or size[1] >= buffer.rank:
        yield "the size of a dimension that is not declared"
    if node.dtype != SIZE_DTYPE:
        yield f"a size is {dtype_name(SIZE_DTYPE)}"


def _load_rule(node: Node, graph: Graph) -> Iterator[str]:
    buffer = _declared_buffer(node.attr, graph)
    if buffer is None:
        yield "the buffer is not declared"
        return
    if len(node.args) != buffer.rank:
        yield f"the buffer has {buffer.rank} dimensions"
    if node.dtype != buffer.dtype:
        yield f"the buffer is declared {dtype_name(buffer.dtype)}"
    if not all(is_integer(arg.dtype) for arg in node.args):
        yield "indices are integers"


def _declared_buffer(name: Attr, graph: Graph) -> Buffer | None:
    return next((buffer for buffer in graph.buffers if buffer.name == name), None)


_LEAF_RULES: dict[str, Callable[[Node, Graph], Iterator[str]]] = {
    "input": _input_rule,
    "const": _const_rule,
    "scalar": _scalar_rule,
    "load": _load_rule,
}

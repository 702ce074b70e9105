"""The readable text of mods, in the user's names; `parse.py` reads it back.

    mask doc_mask(b, h, q_idx, kv_idx)   buffers: document_id int32[*](1)   scalars: window int64
      # same_doc = document_id[q_idx] == document_id[kv_idx]
      same_doc = eq(load(document_id, q_idx), load(document_id, kv_idx))   bool  {q, kv}
      # return same_doc & (q_idx - kv_idx <= window)
      return and(same_doc, le(sub(q_idx, kv_idx), window))   bool  {q, kv}

A buffer is written `name dtype[sizes](stride classes)`, then `grad` if a gradient may be asked for; a size known
only at run time is `*` there and `name.size(0)` as a value. Line ends mean nothing to the parser, so a long line
wraps. Constants have a dtype after a colon unless it is the usual one: int64, float32, bool. Names that are no
plain identifiers stand in double quotes, with the escapes of JSON. `#` starts a comment.
"""

from __future__ import annotations

import json
from collections import Counter

import torch

from flexgen.ir.dtypes import dtype_name
from flexgen.ir.graph import MOD_INPUTS, Axis, Buffer, Graph, Mods, Node, topological
from flexgen.ir.names import Names, is_safe, safe_name
from flexgen.ir.origins import Origins
from flexgen.ir.sizes import split_size_name

LINE_LENGTH = 110
LONGEST_NESTED = 64  # characters; a statement adds a name, a dtype and the axes
_DEEPEST_NESTED = 4
_GRADIENT = "grad"  # behind a buffer; so no line below it starts with that name
_LEAVES = frozenset({"input", "const", "scalar"})


def print_mods(mods: Mods, origins: Origins | None = None) -> str:
    """Return the text of both mods, score first; with origins, in the user's names and with the user's lines."""
    return "\n".join(print_graph(graph, origins) for graph in mods.graphs())


def print_graph(graph: Graph, origins: Origins | None = None) -> str:
    """Return the text of one mod, ending in a newline."""
    return GraphPrinter(graph, origins or Origins(), (graph.root,)).text()


def input_dtype(name: str) -> torch.dtype:
    """Return the dtype that an input has unless the text says otherwise."""
    return torch.float32 if name in ("score", "grad") else torch.int64


def constant_dtype(value: object) -> torch.dtype:
    """Return the dtype that a constant has unless the text says otherwise."""
    if isinstance(value, bool):
        return torch.bool
    return torch.float32 if isinstance(value, float) else torch.int64


def print_axes(axes: frozenset[Axis]) -> str:
    return "{" + ", ".join(axis.value for axis in Axis if axis in axes) + "}"


def print_name(name: object) -> str:
    """Return the name bare where it is a plain identifier, else quoted."""
    return str(name) if is_safe(str(name)) else json.dumps(str(name))


def print_buffer(buffer: Buffer) -> str:
    sizes = ", ".join("*" if size is None else str(size) for size in buffer.sizes)
    gradient = f" {_GRADIENT}" if buffer.requires_grad else ""
    name = print_name(buffer.name)
    return f"{name} {dtype_name(buffer.dtype)}[{sizes}]({', '.join(buffer.strides)}){gradient}"


def print_constant(node: Node) -> str:
    text = repr(node.attr)
    return text if node.dtype == constant_dtype(node.attr) else f"{text}:{dtype_name(node.dtype)}"


class GraphPrinter:
    """Prints one graph: decides which values get a line of their own and nests the others in their user's line.

    Args:
        graph: its name and declarations.
        origins: the user's names and lines.
        roots: the values to print; a graph alone has one.
    """

    def __init__(self, graph: Graph, origins: Origins, roots: tuple[Node, ...]) -> None:
        self._graph = graph
        self._origins = origins
        self._roots = frozenset(roots)
        self._nodes = list(topological(*roots))
        self._uses = Counter(arg for node in self._nodes for arg in node.args)
        used_inputs = [node for node in self._nodes if node.op == "input"]
        self._input_dtypes = {str(node.attr): node.dtype for node in used_inputs}
        declared = [buffer.name for buffer in graph.buffers] + [scalar.name for scalar in graph.scalars]
        self._names = Names([_GRADIENT, *MOD_INPUTS[graph.kind], *self._input_dtypes, *declared])
        self._texts: dict[Node, str] = {}
        self._depths: dict[Node, int] = {}
        self._lines: list[str] = []
        self._user_line: str | None = None

    def text(self) -> str:
        self._print_header(self._graph.kind, MOD_INPUTS[self._graph.kind])
        self._print_inner_values()
        self._print_root("return ", self._graph.root)
        return "\n".join(self._lines) + "\n"

    def _print_inner_values(self) -> None:
        for node in self._nodes:
            if node.op in _LEAVES:
                self._texts[node], self._depths[node] = self._leaf(node), 0
            elif self._has_own_line(node):
                self._print_assignment(node)
            elif node not in self._roots:
                self._texts[node] = self._call(node, LONGEST_NESTED)

    def _has_own_line(self, node: Node) -> bool:
        is_shared = self._uses[node] > (0 if node in self._roots else 1)
        return is_shared or self._origins.variable(node) is not None

    def _print_header(self, kind: str, inputs: tuple[str, ...]) -> None:
        graph = self._graph
        parameters = dict.fromkeys((*inputs, *self._input_dtypes))
        head = f"{kind} {print_name(graph.name)}({', '.join(map(self._parameter, parameters))})"
        buffers = ", ".join(map(print_buffer, graph.buffers))
        scalars = ", ".join(f"{print_name(scalar.name)} {dtype_name(scalar.dtype)}" for scalar in graph.scalars)
        sections = [f"buffers: {buffers}"] * bool(buffers) + [f"scalars: {scalars}"] * bool(scalars)
        line = "   ".join([head, *sections])
        if len(line) <= LINE_LENGTH:
            self._lines.append(line)
        else:
            self._add(head, "    ")
            for section in sections:
                self._add(f"    {section}", "      ")

    def _parameter(self, name: str) -> str:
        dtype = self._input_dtypes.get(name, input_dtype(name))
        return print_name(name) if dtype == input_dtype(name) else f"{print_name(name)}: {dtype_name(dtype)}"

    def _leaf(self, node: Node) -> str:
        match node.op:
            case "const":
                return print_constant(node)
            case "input":
                return print_name(node.attr) if is_safe(str(node.attr)) else f"input({print_name(node.attr)})"
        size = split_size_name(node.attr)
        if size is not None:
            return f"{print_name(size[0])}.size({size[1]})"
        name = str(node.attr)
        is_ambiguous = name in MOD_INPUTS[self._graph.kind] or name in self._input_dtypes
        return f"scalar({print_name(name)})" if is_ambiguous or not is_safe(name) else name

    def _call(self, node: Node, longest: int) -> str:
        """Return the node as a call of at most `longest` characters, giving arguments lines until it fits."""
        for arg in node.args:
            if self._depths[arg] >= _DEEPEST_NESTED:
                self._print_assignment(arg)
        while len(text := self._spell(node)) > longest:
            widest = max((arg for arg in node.args if self._depths[arg] > 0), key=self._width, default=None)
            if widest is None:
                break
            self._print_assignment(widest)
        self._depths[node] = 1 + max((self._depths[arg] for arg in node.args), default=0)
        return text

    def _width(self, node: Node) -> int:
        return len(self._texts[node])

    def _spell(self, node: Node) -> str:
        parts = [self._texts[arg] for arg in node.args]
        if node.op == "load":
            parts.insert(0, print_name(node.attr))
        if node.op == "cast":
            parts.append(dtype_name(node.dtype))
        return f"{node.op}({', '.join(parts)})"

    def _print_assignment(self, node: Node) -> None:
        variable = self._origins.variable(node)
        annotation = f"   {dtype_name(node.dtype)}  {print_axes(node.axes)}"
        room = LINE_LENGTH - len(f"  {safe_name(variable or 'v1000')}_2 = {annotation}")
        text = self._texts[node] if node in self._texts else self._call(node, room)
        name = self._names.unique(variable) if variable else self._names.temporary()
        self._print_user_line(node)
        self._add(f"  {name} = {text}{annotation}")
        self._texts[node] = name
        self._depths[node] = 0

    def _print_root(self, lead: str, root: Node, note: str = "") -> None:
        if root in self._texts:
            self._add(f"  {lead}{self._texts[root]}{note}")
            return
        annotation = f"   {dtype_name(root.dtype)}  {print_axes(root.axes)}{note}"
        text = self._call(root, LINE_LENGTH - len(f"  {lead}{annotation}"))
        self._print_user_line(root)
        self._add(f"  {lead}{text}{annotation}")

    def _print_user_line(self, node: Node) -> None:
        span = self._origins.span(node)
        line = printable(span.text.strip()) if span else ""
        if line and line != self._user_line:
            self._user_line = line
            self._lines.append(f"  # {line}"[:LINE_LENGTH])

    def _add(self, line: str, continuation: str = "      ") -> None:
        """Append a line, wrapped at spaces that follow a comma where it is too long; line ends mean nothing."""
        while len(line) > LINE_LENGTH:
            cut = line.rfind(", ", len(continuation) + 1, LINE_LENGTH)
            if cut < 0 or '"' in line:
                break
            self._lines.append(line[: cut + 1])
            line = continuation + line[cut + 2 :]
        self._lines.append(line)


def printable(line: str) -> str:
    """Return the line with every character that could end a line, or hide or reorder text, escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line.replace("\t", " "))

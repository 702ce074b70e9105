"""Digests of mods, the same in every process: one of what they compute, one of everything emitted text may show."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from flexgen.errors import SourceSpan
from flexgen.ir.dtypes import dtype_name
from flexgen.ir.graph import Buffer, Mods, Node, topological
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.sizes import split_size_name
from flexgen.ir.text import print_mods


def structure_digest(mods: Mods) -> str:
    """Return the SHA-256, in hexadecimal, of what the mods compute. Names do not enter; buffers and scalars are
    told apart by their position in `mods.buffers` and `mods.scalars`."""
    return _sha256(_structure(mods))


def text_digest(mods: Mods, origins: Origins | None = None) -> str:
    """Return the SHA-256, in hexadecimal, of the mods' text and of the user's variables and source lines.

    File names and absolute line numbers do not enter: moving a mod within its file changes no emitted text.
    """
    origin_records = _origin_records(mods, origins) if origins is not None else ()
    return _sha256((print_mods(mods), *origin_records))


def _sha256(records: Iterable[str]) -> str:
    state = hashlib.sha256()
    for record in records:
        encoded = record.encode("utf-8", "backslashreplace")
        state.update(len(encoded).to_bytes(8, "little") + encoded)
    return state.hexdigest()


def _structure(mods: Mods) -> Iterator[str]:
    buffers = {buffer.name: f"buffer {index}" for index, buffer in enumerate(mods.buffers)}
    scalars = {scalar.name: f"scalar {index}" for index, scalar in enumerate(mods.scalars)}
    yield from (_buffer_record(buffer) for buffer in mods.buffers)
    yield from (f"scalar {dtype_name(scalar.dtype)}" for scalar in mods.scalars)
    numbers: dict[Node, int] = {}
    for node in topological(*(graph.root for graph in mods.graphs())):
        numbers[node] = len(numbers)
        args = ",".join(str(numbers[arg]) for arg in node.args)
        yield f"{node.op} {_attr_record(node, buffers, scalars)} {dtype_name(node.dtype)} ({args})"
    yield from (f"{graph.kind} {numbers[graph.root]}" for graph in mods.graphs())


def _buffer_record(buffer: Buffer) -> str:
    return f"buffer {dtype_name(buffer.dtype)} {buffer.sizes} {buffer.strides} {buffer.requires_grad}"


def _attr_record(node: Node, buffers: dict[str, str], scalars: dict[str, str]) -> str:
    name = str(node.attr)
    match node.op:
        case "load":
            return buffers[name]
        case "scalar":
            size = split_size_name(name)
            return f"{buffers[size[0]]} size {size[1]}" if size else scalars[name]
    return f"{type(node.attr).__name__} {node.attr!r}"


def _origin_records(mods: Mods, origins: Origins) -> Iterator[str]:
    nodes = list(topological(*(graph.root for graph in mods.graphs())))
    first_lines: dict[str, int] = {}
    for span in (origin.span for node in nodes for origin in origins.of(node)):
        if span is not None:
            first_lines[span.file] = min(span.line, first_lines.get(span.file, span.line))
    for number, node in enumerate(nodes):
        yield from (f"{number} {_origin_record(origin, first_lines)}" for origin in origins.of(node))


def _origin_record(origin: Origin, first_lines: dict[str, int]) -> str:
    return repr((origin.variable, _span_record(origin.span, first_lines) if origin.span else None))


def _span_record(span: SourceSpan, first_lines: dict[str, int]) -> tuple[object, ...]:
    first = first_lines[span.file]
    file = list(first_lines).index(span.file)
    return (file, span.line - first, span.column, span.end_line - first, span.end_column, span.text)

"""The cache key of an emitted kernel: digests of its mods, its plan, and flexgen's own sources."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import torch

from flexgen.ir.graph import Mods, Node, topological
from flexgen.ir.origins import Origins
from flexgen.lowering.decision import Decision


def kernel_key(mods: Mods, origins: Origins, plan: object) -> str:
    """Return 32 hexadecimal digits that differ whenever the emitted text may differ."""
    spans = [
        (origins.variable(node), span.text if (span := origins.span(node)) else None)
        for graph in mods.graphs()
        for node in graph.nodes()
    ]
    parts = (canonical(mods), canonical(spans), canonical(plan), fingerprint())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def canonical(value: object) -> str:
    """Return a text that is equal exactly for equal values, in every process."""
    match value:
        case None | bool() | int() | float() | str():
            return repr(value)
        case Node():
            return _canonical_node(value)
        case enum.Enum():
            return f"{type(value).__name__}.{value.name}"
        case torch.dtype():
            return str(value)
        case frozenset():
            return "{" + ",".join(sorted(canonical(item) for item in value)) + "}"
        case tuple() | list():
            return "(" + ",".join(canonical(item) for item in value) + ")"
        case Decision():
            return canonical((value.name, value.value, value.because))
        case _ if dataclasses.is_dataclass(value):
            fields = (f"{f.name}={canonical(getattr(value, f.name))}" for f in dataclasses.fields(value))
            return f"{type(value).__name__}({','.join(fields)})"
    raise TypeError(f"no canonical text for {type(value).__name__}")


def _canonical_node(root: Node) -> str:
    numbers: dict[Node, int] = {}
    lines = []
    for node in topological(root):
        args = ",".join(str(numbers[arg]) for arg in node.args)
        lines.append(f"{node.op}({args};{node.attr!r}:{node.dtype})")
        numbers[node] = len(numbers)
    return ";".join(lines)


@cache
def fingerprint() -> str:
    """Return a digest of the sources that decide what is emitted: lowering, codegen and templates."""
    digest = hashlib.sha256()
    root = resources.files("flexgen")
    for folder in ("ir", "lowering", "codegen", "templates"):
        for path, content in _files(root / folder, folder):
            digest.update(path.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _files(folder: Traversable, name: str) -> Iterable[tuple[str, bytes]]:
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.is_dir():
            yield from _files(entry, f"{name}/{entry.name}")
        elif entry.name.endswith((".py", ".jinja")):
            yield f"{name}/{entry.name}", entry.read_bytes()

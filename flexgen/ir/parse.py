"""Reads the text that `text.py` prints back into the very nodes it was printed from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

import torch

from flexgen.errors import IRTextError, SourceSpan
from flexgen.ir.dtypes import DTYPES, dtype_name
from flexgen.ir.graph import Buffer, Graph, Mods, Node, Scalar, StrideClass, input_node, make
from flexgen.ir.ops import OPS, DtypeRule
from flexgen.ir.sizes import SIZE_DTYPE, size_name
from flexgen.ir.text import constant_dtype, input_dtype, print_axes

_TOKEN = re.compile(
    r"""(?P<skip>[ \n]+|\#[^\n]*)
      | (?P<number>-?(?:[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?|inf\b))
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<string>"(?:[^"\\\n]|\\[^\n])*")
      | (?P<mark>[()\[\]{}:,=.*])
      | (?P<end>\Z)""",
    re.VERBOSE,
)
_LITERALS: dict[str, float | bool] = {"True": True, "False": False, "nan": float("nan")}
_DEEPEST = 200
_Item = TypeVar("_Item")


def parse_mods(text: str) -> Mods:
    """Return the mods whose text this is.

    Raises:
        IRTextError: the text is not the text of mods; the error shows the place.
    """
    reader = _Reader(text)
    graphs: dict[str, Graph] = {}
    while reader.peek.kind != "end":
        start = reader.peek
        graph = _GraphParser(reader).graph()
        if graph.kind in graphs:
            raise reader.error(f"a second {graph.kind} graph", start)
        graphs[graph.kind] = graph
    return Mods(graphs.get("score"), graphs.get("mask"))


def parse_graph(text: str) -> Graph:
    """Return the one graph whose text this is; raises IRTextError as `parse_mods` does."""
    reader = _Reader(text)
    graph = _GraphParser(reader).graph()
    if reader.peek.kind != "end":
        raise reader.error("more text after the graph", reader.peek)
    return graph


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int


class _Reader:
    """A cursor over the tokens of a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._tokenize()
        self.peek = next(self._tokens)

    def _tokenize(self) -> Iterator[_Token]:
        position = 0
        while True:
            found = _TOKEN.match(self._text, position)
            if found is None or found.lastgroup is None:
                raise self.error("a character that no text of mods holds", _Token("bad", " ", position))
            if found.lastgroup != "skip":
                yield _Token(found.lastgroup, found.group(), position)
            position = found.end()

    def next(self) -> _Token:
        token = self.peek
        if token.kind != "end":
            self.peek = next(self._tokens)
        return token

    def accept(self, text: str) -> bool:
        """Step over the token if it is this name or mark; say whether it was."""
        if self.peek.text != text or self.peek.kind == "string":
            return False
        self.next()
        return True

    def expect(self, text: str) -> None:
        token = self.peek
        if not self.accept(text):
            raise self.error(f"expected {text!r} here", token)

    def take(self, kind: str) -> _Token:
        if self.peek.kind != kind:
            raise self.error(f"expected a {kind} here", self.peek)
        return self.next()

    def name(self) -> str:
        """Take a bare or a quoted name."""
        if self.peek.kind != "string":
            return self.take("name").text
        token = self.next()
        try:
            return str(json.loads(token.text))
        except ValueError:
            raise self.error("not a string of JSON", token) from None

    def listed(self, item: Callable[[], _Item], close: str) -> list[_Item]:
        """Take items between commas up to the closing mark, which it also takes."""
        items: list[_Item] = []
        while not self.accept(close):
            if items:
                self.expect(",")
            items.append(item())
        return items

    def error(self, what: str, token: _Token) -> IRTextError:
        before = self._text[: token.start]
        line, column = before.count("\n") + 1, token.start - (before.rfind("\n") + 1)
        shown = self._text.split("\n")[line - 1]
        span = SourceSpan("<ir>", line, column, line, column + len(token.text), shown)
        return IRTextError(f"this IR text does not parse: {what}", where=span)


class _GraphParser:
    """Parses one graph: its header, its assignments, its return."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self._values: dict[str, Node] = {}
        self._inputs: dict[str, Node] = {}
        self._buffers: dict[str, Buffer] = {}
        self._scalars: dict[str, Scalar] = {}

    def graph(self) -> Graph:
        reader = self._reader
        start = reader.take("name")
        if start.text not in ("score", "mask"):
            raise reader.error("expected 'score' or 'mask' here", start)
        kind = cast(Literal["score", "mask"], start.text)
        name = reader.name()
        reader.expect("(")
        reader.listed(self._parameter, ")")
        if reader.accept("buffers"):
            self._declarations(self._buffer)
        if reader.accept("scalars"):
            self._declarations(self._scalar)
        while not reader.accept("return"):
            self._assignment()
        root = self._expression(0)
        if reader.peek.text in DTYPES:
            self._annotation(root)
        return Graph(kind, name, root, tuple(self._buffers.values()), tuple(self._scalars.values()))

    def _parameter(self) -> None:
        token = self._reader.peek
        name = self._reader.name()
        dtype = self._dtype() if self._reader.accept(":") else input_dtype(name)
        self._inputs[name] = self._define(name, input_node(name, dtype), token)

    def _declarations(self, declaration: Callable[[], None]) -> None:
        self._reader.expect(":")
        declaration()
        while self._reader.accept(","):
            declaration()

    def _buffer(self) -> None:
        reader = self._reader
        start = reader.peek
        name, dtype = reader.name(), self._dtype()
        reader.expect("[")
        sizes = reader.listed(self._size, "]")
        reader.expect("(")
        strides = reader.listed(self._stride, ")")
        if len(sizes) != len(strides) or name in self._buffers:
            raise reader.error("as many strides as sizes, and each buffer once, are declared", start)
        self._buffers[name] = Buffer(name, dtype, tuple(sizes), tuple(strides), reader.accept("grad"))

    def _scalar(self) -> None:
        token = self._reader.peek
        name = self._reader.name()
        if name in self._scalars:
            raise self._reader.error("this scalar is declared twice", token)
        self._scalars[name] = Scalar(name, self._dtype())

    def _size(self) -> int | None:
        return None if self._reader.accept("*") else self._integer()

    def _stride(self) -> StrideClass:
        token = self._reader.next()
        if token.text not in ("0", "1", "*"):
            raise self._reader.error("a stride class is 0, 1 or *", token)
        return cast(StrideClass, token.text)

    def _assignment(self) -> None:
        token = self._reader.take("name")
        self._reader.expect("=")
        node = self._expression(0)
        self._annotation(node)
        self._define(token.text, node, token)

    def _define(self, name: str, node: Node, token: _Token) -> Node:
        if name in self._values:
            raise self._reader.error("this name is defined twice", token)
        self._values[name] = node
        return node

    def _annotation(self, node: Node) -> None:
        token = self._reader.peek
        dtype = self._dtype()
        self._reader.expect("{")
        axes = self._reader.listed(self._reader.name, "}")
        if dtype != node.dtype or "{" + ", ".join(axes) + "}" != print_axes(node.axes):
            computed = f"{dtype_name(node.dtype)}  {print_axes(node.axes)}"
            raise self._reader.error(f"the expression is {computed}", token)

    def _expression(self, depth: int) -> Node:
        reader = self._reader
        token = reader.peek
        if depth > _DEEPEST:
            raise reader.error("nested too deeply; give inner values a line", token)
        if token.kind == "number" or token.text in _LITERALS:
            return self._constant()
        name = reader.name()
        if reader.accept("."):
            return self._buffer_size(name, token)
        if token.kind == "name" and reader.accept("("):
            return self._call(token, depth)
        if name in self._values:
            return self._values[name]
        return self._scalar_node(name, token)

    def _constant(self) -> Node:
        token = self._reader.next()
        value = _LITERALS[token.text] if token.text in _LITERALS else self._number(token)
        dtype = self._dtype() if self._reader.accept(":") else constant_dtype(value)
        return make("const", attr=value, dtype=dtype)

    def _number(self, token: _Token) -> int | float:
        try:
            return float(token.text) if re.search(r"[.en]", token.text) else int(token.text)
        except ValueError:
            raise self._reader.error("this number is too long", token) from None

    def _integer(self) -> int:
        token = self._reader.take("number")
        value = self._number(token)
        if not isinstance(value, int) or value < 0:
            raise self._reader.error("expected a count here", token)
        return value

    def _dtype(self) -> torch.dtype:
        token = self._reader.take("name")
        if token.text not in DTYPES:
            raise self._reader.error("expected a dtype here", token)
        return DTYPES[token.text]

    def _buffer_size(self, buffer: str, token: _Token) -> Node:
        self._reader.expect("size")
        self._reader.expect("(")
        dim = self._integer()
        self._reader.expect(")")
        if buffer not in self._buffers:
            raise self._reader.error(f"no buffer {buffer!r} is declared", token)
        return make("scalar", attr=size_name(buffer, dim), dtype=SIZE_DTYPE)

    def _scalar_node(self, name: str, token: _Token) -> Node:
        if name not in self._scalars:
            raise self._reader.error(f"nothing is called {name!r}", token)
        return make("scalar", attr=name, dtype=self._scalars[name].dtype)

    def _call(self, token: _Token, depth: int) -> Node:
        reader = self._reader
        match token.text:
            case "input":
                node = self._inputs.get(name := reader.name())
                if node is None:
                    raise reader.error(f"{name!r} is no parameter", token)
            case "scalar":
                node = self._scalar_node(reader.name(), token)
            case "load":
                return self._load(token, depth)
            case "cast":
                arg = self._expression(depth + 1)
                reader.expect(",")
                node = make("cast", arg, dtype=self._dtype())
            case _:
                return self._operation(token, reader.listed(lambda: self._expression(depth + 1), ")"))
        reader.expect(")")
        return node

    def _load(self, token: _Token, depth: int) -> Node:
        reader = self._reader
        buffer = self._buffers.get(name := reader.name())
        if buffer is None:
            raise reader.error(f"no buffer {name!r} is declared", token)
        indices: list[Node] = []
        while not reader.accept(")"):
            reader.expect(",")
            indices.append(self._expression(depth + 1))
        return make("load", *indices, attr=buffer.name, dtype=buffer.dtype)

    def _operation(self, token: _Token, args: list[Node]) -> Node:
        row = OPS.get(token.text)
        if row is None or row.arity != len(args) or not args:
            raise self._reader.error(f"no operation {token.text!r} takes {len(args)} arguments", token)
        dtype = torch.bool if row.rule is DtypeRule.COMPARE else args[-1].dtype
        return make(row.name, *args, dtype=dtype)

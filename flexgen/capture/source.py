"""Where in the user's source an operation stands: its span, and the variable it is assigned to."""

from __future__ import annotations

import ast
import functools
import linecache
import os
from collections.abc import Iterator
from types import CodeType, FrameType, TracebackType

import torch

from flexgen.errors import SourceSpan
from flexgen.ir.origins import Origin

_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_CAPTURE_DIR = os.path.dirname(__file__) + os.sep
_MAX_PARSED_CHARACTERS = 2_000_000

Region = tuple[int, int, int, int]  # first line, last line, first column, last column; columns count UTF-8 bytes


@functools.lru_cache(maxsize=512)
def is_user_file(filename: str) -> bool:
    """Whether a frame of this file is the user's: not torch's and not capture's own."""
    return not filename.startswith((_TORCH_DIR, _CAPTURE_DIR))


@functools.lru_cache(maxsize=256)
def _regions(code: CodeType) -> tuple[tuple[int | None, int | None, int | None, int | None], ...]:
    return tuple(code.co_positions())


def region_of(code: CodeType, instruction: int) -> Region | None:
    """Return the source region of the instruction at byte offset `instruction`, if the code carries positions."""
    table = _regions(code)
    index = instruction // 2
    if not 0 <= index < len(table):
        return None
    line, end_line, column, end_column = table[index]
    if line is None:
        return None
    return line, end_line or line, column if column is not None else 0, end_column if end_column is not None else -1


def _character(text: str, byte_column: int) -> int:
    """Turn a column in UTF-8 bytes into one in characters; -1 is the end of the line."""
    if byte_column < 0:
        return len(text)
    return len(text.encode()[:byte_column].decode(errors="ignore"))


def span_of(filename: str, region: Region) -> SourceSpan:
    """Return the span; its text is empty where there is no source (a REPL, `exec`)."""
    line, end_line, column, end_column = region
    text = linecache.getline(filename, line).rstrip("\n")
    end_text = linecache.getline(filename, end_line).rstrip("\n")
    return SourceSpan(filename, line, _character(text, column), end_line, _character(end_text, end_column), text)


def _region_of_node(node: ast.expr) -> Region:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[Region, str]]:
    match target, value:
        case ast.Name(id=name), _:
            yield _region_of_node(value), name
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for one_target, one_value in zip(targets, values, strict=True):
                yield from _assigned(one_target, one_value)


def _assignments(tree: ast.AST) -> Iterator[tuple[Region, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    yield from _assigned(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                yield from _assigned(target, value)
            case ast.NamedExpr(target=target, value=value):
                yield from _assigned(target, value)
            case ast.AugAssign(target=ast.Name(id=name)):
                yield (node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0), name


Stamp = tuple[object, ...]


def _stamp(filename: str) -> Stamp:
    """Identify the text that linecache holds for a file now (a notebook's or doctest's has no mtime)."""
    linecache.getlines(filename)
    return (filename, *linecache.cache.get(filename, (0, None))[:2])


@functools.lru_cache(maxsize=64)
def _parse(stamp: Stamp) -> ast.Module | None:
    text = "".join(linecache.getlines(str(stamp[0])))
    if len(text) > _MAX_PARSED_CHARACTERS:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return None  # a notebook's text may not be plain Python: provenance degrades


@functools.lru_cache(maxsize=64)
def _names(stamp: Stamp) -> dict[Region, str]:
    tree = _parse(stamp)
    return {} if tree is None else dict(_assignments(tree))


def variable_at(filename: str, region: Region) -> str | None:
    """Return the variable that the expression at exactly this region is assigned to."""
    return _names(_stamp(filename)).get(region)


def origin_at(code: CodeType, instruction: int) -> Origin | None:
    """Return the origin of an operation of the user's function `code`."""
    region = region_of(code, instruction)
    if region is None:
        return None
    return Origin(variable_at(code.co_filename, region), span_of(code.co_filename, region))


def branch_at(span: SourceSpan) -> str | None:
    """Return the Python construct (`if`, `and`, `or`, `not`, `in`, ...) that asks for the truth of a span's value."""
    tree = _parse(_stamp(span.file))
    if tree is None:
        return None
    found = [node for node in ast.walk(tree) if _covers(node, span.line)]
    return next((name for node in reversed(found) if (name := _construct(node)) is not None), None)


def _covers(node: ast.AST, line: int) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is not None and last is not None and first <= line <= last


def _construct(node: ast.AST) -> str | None:
    match node:
        case ast.BoolOp(op=ast.And()):
            return "and"
        case ast.BoolOp():
            return "or"
        case ast.UnaryOp(op=ast.Not()):
            return "not"
        case ast.Compare(ops=ops) if any(isinstance(op, ast.In | ast.NotIn) for op in ops):
            return "in"
        case ast.Compare(ops=ops) if len(ops) > 1:
            return "a chained comparison"
        case ast.IfExp() | ast.If():
            return "if"
        case ast.While():
            return "while"
        case ast.Assert():
            return "assert"
        case ast.Call(func=ast.Name(id="min" | "max" | "any" | "all" | "int" | "float" | "bool" as name)):
            return f"{name}()"
    return None


def user_frame(frame: FrameType | None, stop: CodeType) -> FrameType | None:
    """Return the innermost frame of the user's code between `frame` and the frame of `stop`."""
    while frame is not None and frame.f_code is not stop:
        if is_user_file(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def user_span_of_traceback(trace: TracebackType | None) -> SourceSpan | None:
    """Return the span of the innermost of the user's frames that an exception passed through."""
    found: SourceSpan | None = None
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_user_file(code.co_filename):
            region = region_of(code, trace.tb_lasti)
            found = span_of(code.co_filename, region) if region is not None else found
        trace = trace.tb_next
    return found


def definition_of(code: CodeType | None) -> SourceSpan | None:
    """Return the span of a function's first line, for errors that belong to the function as a whole."""
    if code is None:
        return None
    line = code.co_firstlineno
    text = linecache.getline(code.co_filename, line).rstrip("\n")
    return SourceSpan(code.co_filename, line, len(text) - len(text.lstrip()), line, len(text), text)

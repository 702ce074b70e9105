"""The text of a kernel's launch in a stand-alone module: its parameters' types, its grid, its arguments in groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flexgen.codegen.export.names import HostNames
from flexgen.codegen.source import Arg, Role

_ANNOTATIONS = {"i32": "int32", "i64": "int64", "u32": "uint32", "fp32": "float32", "fp64": "float64"}
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class LaunchText:
    """One launch.

    Attributes:
        kernel: the kernel's name.
        grid: the expression of how many programs run.
        lines: arguments, some to a line.
        options: the compiler's, as keyword arguments.
    """

    kernel: str
    grid: str
    lines: tuple[str, ...]
    options: str


def launch_text(
    kernel: str, grid: str, args: Sequence[Arg], names: HostNames, options: Mapping[str, int]
) -> LaunchText:
    """Return the launch of a kernel: what belongs to one tensor stands on one line."""
    lines = tuple(", ".join(group) + "," for group in _groups(args, names))
    return LaunchText(kernel, grid, lines, ", ".join(f"{name}={value}" for name, value in options.items()) + ",")


def _groups(args: Sequence[Arg], names: HostNames) -> Iterator[list[str]]:
    line: list[str] = []
    topic: object = None
    for arg in args:
        value, about = names.value(arg), _topic(arg)
        if line and (about != topic or len(", ".join([*line, value])) > _WIDTH):
            yield line
            line = []
        line.append(value)
        topic = about
    yield line


def _topic(arg: Arg) -> object:
    """What an argument is about: a call's pointers stand together, and so does all of one captured tensor."""
    match arg.role:
        case Role.TENSOR | Role.DESCRIPTOR:
            return Role.TENSOR
        case Role.TABLE | Role.CU_SEQLENS | Role.LENGTH | Role.SCALAR | Role.SCALE | Role.DROPOUT | Role.SIDE_NUMBER:
            return arg.role
        case Role.SIDE | Role.SIDE_STRIDE:
            return "side", arg.of
        case Role.SCRATCH:
            return Role.TENSOR
        case Role.BUFFER | Role.BUFFER_STRIDE | Role.BUFFER_SIZE:
            return "buffer", arg.of
        case Role.BUFFER_GRAD | Role.BUFFER_GRAD_STRIDE:
            return "gradient", arg.of
        case Role.TABLE_STRIDE | Role.TABLE_SIZE:
            return "table"
    return arg.role, arg.of


def typed_kernel(text: str, kernel: str, args: Sequence[Arg]) -> str:
    """Return a kernel's text, decorated and annotated so that a plain launch compiles it once.

    Triton would compile again for a length of 1 or a multiple of 16, and take a Python float for float32 where the
    kernel's arithmetic is wider.
    """
    decorator, language = ("@gluon.jit", "gl") if text.startswith("@gluon.jit\n") else ("@triton.jit", "tl")
    plain = [arg.name for arg in args if not arg.specialize and arg.role is not Role.DESCRIPTOR]
    listed = ", ".join(f'"{name}"' for name in plain)
    head = f"{decorator}(do_not_specialize=[{listed}])" if plain else decorator
    if len(head) > _WIDTH:
        head = "\n".join([f"{decorator}(", "    do_not_specialize=[", *_filled(plain), "    ],", ")"])
    text = text.replace(f"{decorator}\n", f"{head}\n", 1)
    for arg in args:
        if arg.role in (Role.SCALAR, Role.SCALE, Role.DROPOUT, Role.SIDE_NUMBER):
            annotated = f"{arg.name}: {language}.{_ANNOTATIONS[arg.type]}"
            text = re.sub(rf"(?<=[\s,(]){re.escape(arg.name)}(?=,)", annotated, text, count=1)
    return text


def _filled(names: Sequence[str]) -> Iterator[str]:
    line = ""
    for name in names:
        piece = f'"{name}",'
        if line and len(line) + len(piece) + 1 > _WIDTH - 8:
            yield f"        {line}"
            line = ""
        line = f"{line} {piece}" if line else piece
    yield f"        {line}"

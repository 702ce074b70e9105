"""The arguments that several commands share, and how their values are read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from flexgen.commands.file_spec import parse_file_spec

SHAPE_NAMES = "B,Hq,Hkv,Lq,Lk,Dqk,Dv"
LARGEST_SIZE = (1 << 31) - 1
MOST_ELEMENTS = 1 << 60  # of a tensor, whose bytes 64 bits count
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
STDOUT = "-"  # as a directory for --dump-code: print instead


class Shape(NamedTuple):
    """The sizes of a call: query [B, Hq, Lq, Dqk], key [B, Hkv, Lk, Dqk], value [B, Hkv, Lk, Dv]."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int
    Dqk: int
    Dv: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @property
    def is_possible(self) -> bool:
        """Whether there can be tensors of these sizes, on the meta device at least."""
        elements = (self.B * self.Hq * self.Lq * max(self.Dqk, self.Dv), self.B * self.Hkv * self.Lk * self.Dqk)
        most = max(*elements, self.B * self.Hkv * self.Lk * self.Dv)
        return min(self) >= 0 and max(self) <= LARGEST_SIZE and most <= MOST_ELEMENTS


DEFAULT_SHAPE = Shape(1, 4, 4, 1024, 1024, 64, 64)


def add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        metavar="FILE[:name[,name]]",
        type=parse_file_spec,
        help="a Python file that defines score_mod and/or mask_mod, or an Attention named attention; or the names of "
        "functions in it, of which one with 5 parameters is a score_mod and one with 4 a mask_mod",
    )


def add_problem(
    parser: argparse.ArgumentParser, *, dtype: str, target: bool = True, dropout: bool = True, packed: bool = True
) -> None:
    """Add what makes a file's mods an attention problem: shape, dtype, options and, mostly, more."""
    if packed:
        _add_packed(parser)
    parser.add_argument(
        "--shape",
        type=parse_shape,
        metavar=SHAPE_NAMES,
        help=f"sizes of query, key and value (default: SHAPE of the file, or {DEFAULT_SHAPE})",
    )
    parser.add_argument(
        "--dtype",
        type=parse_dtype,
        default=dtype,
        metavar="DTYPE",
        help=f"element type: {', '.join(DTYPES)} (default: {dtype})",
    )
    parser.add_argument(
        "--set",
        type=parse_setting,
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="kernel options, as USE_SUBTILING=1 BLOCK_M=64; `flexgen options` lists them",
    )
    if dropout:
        parser.add_argument(
            "--dropout",
            type=parse_probability,
            default=0.0,
            metavar="P",
            help="the probability that a softmax weight is dropped (default: 0)",
        )
    if target:
        add_target(parser, "the chip to compile for, or interpret (default: this machine's GPU; without one, sm_90)")


def _add_packed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--packed",
        type=parse_lengths,
        metavar="LENGTHS",
        help="lengths of sequences packed along the length, such as 100,37,1, as for cu_seqlens; the shape's B, Lq and "
        "Lk are 1 and their sum then",
    )


def add_target(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--target", metavar="TARGET", help=text)


def add_dump_code(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dump-code",
        metavar="DIR",
        nargs="?",
        const=STDOUT,
        help="print the emitted source; with DIR, write a numbered file for each stage there",
    )


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--diff",
        type=parse_setting,
        action="extend",
        nargs="+",
        metavar="NAME=VALUE",
        help="show what options change, beside what --set sets: the decisions, and the emitted text line by line",
    )


def add_backward(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backward", action="store_true", help="lower the backward kernels too: query, key and value require grad"
    )


def add_traceback(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traceback", action="store_true", help="show Python's traceback of an error")


def file_first(argv: Sequence[str]) -> list[str]:
    """Move FILE to the front, so that no option before it can take it for a value of its own.

    `--dump-code FILE` would otherwise write into a directory of that name, and `--set A=1 FILE` set an option.
    """
    places = [place for place, argument in enumerate(argv) if _is_python_file(argument)]
    if len(places) != 1:
        return list(argv)
    place = places[0]
    return [argv[place], *argv[:place], *argv[place + 1 :]]


def _is_python_file(argument: str) -> bool:
    spec = parse_file_spec(argument)
    return not argument.startswith("-") and "=" not in argument and spec.path.suffix == ".py"


def parse_shape(text: str) -> Shape:
    parts = text.replace("x", ",").split(",")
    if len(parts) != len(Shape._fields) or not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape: give {len(Shape._fields)} numbers {SHAPE_NAMES}, such as {DEFAULT_SHAPE}"
        )
    shape = Shape(*map(int, parts))
    if not shape.is_possible:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape: no tensor can be that large")
    return shape


def parse_lengths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} are no lengths: give whole numbers, such as 100,37,1")
    lengths = tuple(map(int, parts))
    if sum(lengths) > LARGEST_SIZE:
        raise argparse.ArgumentTypeError(f"{text!r} are no lengths: their sum is more than {LARGEST_SIZE}")
    return lengths


def parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: give a whole number from 1")
    return int(text)


def parse_dtype(text: str) -> str:
    """Return torch's name of a dtype."""
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not a dtype: choose one of {', '.join(DTYPES)}")
    return name


def parse_probability(text: str) -> float:
    try:
        p = float(text)
    except ValueError:
        p = -1.0
    if not 0.0 <= p <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a probability: give a number from 0 to 1, such as 0.1")
    return p


def parse_setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, _value(value)


def _value(text: str) -> object:
    words: dict[str, object] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text

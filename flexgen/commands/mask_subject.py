"""The mask that `flexgen mask` looks at: one batch and query head of it, with what it captured, on the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.capture.live import LiveMods
from flexgen.commands.arguments import Shape
from flexgen.commands.subject import Subject
from flexgen.errors import OptionError
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Node
from flexgen.runtime.mask_evaluation import Mod


@dataclass(frozen=True, slots=True)
class Place:
    """Which batch and query head is looked at."""

    b: int = 0
    h: int = 0


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add what chooses the place of a picture."""
    parser.add_argument("--batch", type=int, default=0, metavar="B", help="which batch to picture (default: 0)")
    parser.add_argument("--head", type=int, default=0, metavar="H", help="which query head to picture (default: 0)")


def place_of(arguments: argparse.Namespace, subject: Subject) -> Place:
    """Return the place that was asked for; of packed sequences, the batch is the number of one of them.

    Raises:
        OptionError: it is outside of the shape.
    """
    batches = subject.shape.B if subject.packed is None else len(subject.packed)
    for name, value, size in (("batch", arguments.batch, batches), ("head", arguments.head, subject.shape.Hq)):
        if not 0 <= value < size:
            raise OptionError(f"--{name} {value} is outside of the shape", fix=f"choose one from 0 to {size - 1}")
    return Place(arguments.batch, arguments.head)


@dataclass(frozen=True, slots=True)
class MaskSubject:
    """A mask at one place.

    Attributes:
        mod: the user's callable; None for no mask.
        graph: the same, captured.
        shape: the sizes of the call; of packed sequences, the lengths of the one that is looked at.
        buffers, scalars: what the mods captured, by name, on the CPU.
    """

    mod: Mod | None
    graph: Graph | None
    shape: Shape
    place: Place
    buffers: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]

    def value(self, node: Node, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return an expression of the compiler's at the place: b, h (unless given) and the lengths are known."""
        known = {"b": self.place.b, "h": self.place.h, "Q_LEN": self.shape.Lq, "KV_LEN": self.shape.Lk}
        numbers = {name: torch.tensor(value) for name, value in known.items()}
        return evaluate(Graph("mask", "part", node), {**numbers, **inputs}, self.buffers, self.scalars)

    def at(self, place: Place) -> MaskSubject:
        return MaskSubject(self.mod, self.graph, self.shape, place, self.buffers, self.scalars)


def mask_subject(subject: Subject, place: Place) -> MaskSubject:
    """Read what the mask of a command's subject captures."""
    shape = subject.shape
    if subject.packed is not None:
        length = subject.packed[place.b]
        shape = shape._replace(Lq=length, Lk=length)
    attention = subject.attention
    reading = LiveMods(attention.score_mod, attention.mask_mod).current()
    mods = reading.captured.mods
    buffers = dict(zip((buffer.name for buffer in mods.buffers), map(_on_cpu, reading.buffers), strict=True))
    scalars = dict(zip((scalar.name for scalar in mods.scalars), reading.scalars, strict=True))
    return MaskSubject(attention.mask_mod, mods.mask, shape, place, buffers, scalars)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu"))

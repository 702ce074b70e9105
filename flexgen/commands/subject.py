"""What a command works on: the attention of a user's file, and tensors without storage of the wanted shape."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest
from flexgen.commands.arguments import DEFAULT_SHAPE, SHAPE_NAMES, Shape
from flexgen.commands.console import Console
from flexgen.commands.user_file import UserFile, UserFileError, load_user_file
from flexgen.errors import CaptureError
from flexgen.lowered import Lowered
from flexgen.lowering.targets import CONSERVATIVE_TARGET, DEFAULT_TARGET, TARGETS, target_named
from flexgen.options import Options
from flexgen.runtime.device_target import target_of


@dataclass(frozen=True, slots=True)
class Subject:
    """An attention and a problem to compile it for.

    Attributes:
        packed: lengths of sequences that are packed along the shape's; None where each is an entry of the batch.
    """

    name: str
    attention: Attention
    shape: Shape
    dtype: torch.dtype
    dropout_p: float = 0.0
    packed: tuple[int, ...] | None = None

    @property
    def sizes(self) -> str:
        """The shape, and the lengths of packed sequences, for people."""
        return str(self.shape) if self.packed is None else f"{self.shape} packed {','.join(map(str, self.packed))}"

    def offsets(self, device: torch.device | str) -> torch.Tensor | None:
        """Return where packed sequences begin, as `cu_seqlens_q` of a call."""
        if self.packed is None:
            return None
        return torch.tensor([0, *itertools.accumulate(self.packed)], dtype=torch.int32).to(device)

    def tensors(self, device: torch.device | str, seed: int | None = None) -> tuple[torch.Tensor, ...]:
        """Return query, key and value in the attention's layout: normal numbers, or without a seed unspecified ones."""
        s = self.shape
        sizes = ((s.B, s.Hq, s.Lq, s.Dqk), (s.B, s.Hkv, s.Lk, s.Dqk), (s.B, s.Hkv, s.Lk, s.Dv))
        if self.attention.options.layout == "bshd":
            sizes = tuple((b, length, heads, d) for b, heads, length, d in sizes)  # type: ignore[assignment]
        if seed is None:
            return tuple(torch.empty(size, dtype=self.dtype, device=device) for size in sizes)
        random = torch.Generator().manual_seed(seed)
        made = (torch.randn(size, generator=random, dtype=torch.float64) for size in sizes)
        return tuple(tensor.to(device=device, dtype=self.dtype) for tensor in made)

    def having(self, settings: Mapping[str, Any]) -> Subject:
        """Return the same with options set, over those it has."""
        own = self.attention
        attention = Attention(own.score_mod, own.mask_mod, own.options.over(settings))
        return dataclasses.replace(self, attention=attention)

    def lower(self, target: str, aux: AuxRequest | None = None, *, backward: bool = False) -> Lowered:
        """Lower without allocating query, key or value, which require grad for the backward kernels."""
        query, key, value = (tensor.requires_grad_(backward) for tensor in self.tensors("meta"))
        offsets, dropout_p = self.offsets("meta"), self.dropout_p
        return self.attention.lower(
            query, key, value, return_aux=aux, target=target, cu_seqlens_q=offsets, dropout_p=dropout_p
        )


def load_subject(arguments: argparse.Namespace) -> Subject:
    """Load the file of the command line, with its shape, dtype and options.

    Raises:
        UserFileError: the file does not load, defines no mods, or has a malformed SHAPE.
        OptionError: an unknown option, or a value that is not allowed.
    """
    user = load_user_file(arguments.file)
    attention = Attention(user.score_mod, user.mask_mod, _options(user, dict(arguments.set)))
    shape: Shape = arguments.shape or _shape_of(user) or DEFAULT_SHAPE
    dropout_p = getattr(arguments, "dropout", 0.0)  # of the commands that have it
    packed: tuple[int, ...] | None = getattr(arguments, "packed", None)
    if packed is not None:
        shape = shape._replace(B=1, Lq=sum(packed), Lk=sum(packed))
    return Subject(str(arguments.file), attention, shape, getattr(torch, arguments.dtype), dropout_p, packed)


def _options(user: UserFile, settings: Mapping[str, Any]) -> Options:
    """Return the file's options with those of the command line over them."""
    return Options.of(dict(settings)) if user.attention is None else user.attention.options.over(settings)


def _shape_of(user: UserFile) -> Shape | None:
    if user.shape is None:
        return None
    sizes: Any = user.shape
    is_whole = isinstance(sizes, tuple | list) and len(sizes) == 7 and all(type(size) is int for size in sizes)
    if not is_whole or not Shape(*sizes).is_possible:
        raise UserFileError(
            f"SHAPE of {user.spec.path} is {sizes!r}",
            why="a shape is seven whole numbers, of which none is negative, and of which tensors can be made",
            fix=f"SHAPE = ({SHAPE_NAMES.replace(',', ', ')}), or pass --shape",
        )
    return Shape(*sizes)


@contextmanager
def fitting_shape(shape: Shape) -> Iterator[None]:
    """Where a mod reads outside of a tensor it captured, say that the shape may not fit it."""
    try:
        yield
    except CaptureError as error:
        if not isinstance(error.__cause__, IndexError):
            raise
        raise UserFileError(
            f"a mod reads outside of a captured tensor: {error.why}",
            where=error.where,
            why=f"the shape {SHAPE_NAMES} is {shape}",
            fix="give --shape, or the file a SHAPE, that fits what the mods capture",
        ) from error


def choose_target(asked: str | None, console: Console) -> str:
    """Return the target asked for; else this machine's GPU; else sm_90, with a note that says so."""
    if asked is not None:
        return target_named(asked).name
    if not torch.cuda.is_available():
        console.note(f"no GPU here: compiling for {DEFAULT_TARGET}; --target chooses another chip")
        return DEFAULT_TARGET
    name = target_of(torch.device("cuda")).name
    if name in TARGETS:
        return name
    console.note(f"flexgen has no row of facts for {name}: compiling for {CONSERVATIVE_TARGET}")
    return CONSERVATIVE_TARGET

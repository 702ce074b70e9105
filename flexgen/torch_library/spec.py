"""An attention as text, which an operator of a graph carries: what the mods compute, and the whole set of options."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen.capture.live import Captured
from flexgen.capture.tensors import stride_class
from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Buffer, Graph, Mods, StrideClass
from flexgen.ir.origins import Origins
from flexgen.ir.parse import parse_mods
from flexgen.ir.shift import shift_indices
from flexgen.ir.text import print_mods
from flexgen.options import KERNEL_OPTION_NAMES, Options

KEPT = 256  # texts whose meaning is kept

Starts = tuple[int, int, int]  # the mods' b, h and q_idx of a call's first batch, head and row

AT_ZERO: Starts = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class _Form:
    """What decides about the meaning of captured tensors beside the text."""

    dtype: torch.dtype
    strides: tuple[StrideClass, ...]


def spec_of(captured: Captured, starts: Starts = AT_ZERO) -> str:
    """Return the mods as text, in the user's names and with the user's lines; a call's indices begin at `starts`."""
    named = dict(zip(("b", "h", "q_idx"), starts, strict=True))
    return print_mods(*shift_indices(captured.mods, captured.origins, named))


def captured_of(spec: str, score_dtype: torch.dtype, buffers: list[torch.Tensor]) -> Captured:
    """Return the capture that a text describes, for these tensors; the same object each time.

    Raises:
        IRTextError: no text of mods.
        UnsupportedProblemError: the tensors are not those that the text declares.
    """
    forms = tuple([_Form(buffer.dtype, tuple(map(stride_class, buffer.stride()))) for buffer in buffers])
    captured = _captured(spec, score_dtype, forms)
    for declared, buffer in zip(captured.mods.buffers, buffers, strict=True):
        if any(size not in (None, actual) for size, actual in zip(declared.sizes, buffer.shape, strict=True)):
            raise _not_as_declared(declared, f"the shape {tuple(buffer.shape)}")
    return captured


@lru_cache(maxsize=KEPT)
def _captured(spec: str, score_dtype: torch.dtype, forms: tuple[_Form, ...]) -> Captured:
    mods = parse_mods(spec)
    declared = mods.buffers
    if len(declared) != len(forms):
        raise UnsupportedProblemError(
            f"{len(forms)} captured tensors were passed, and the mods declare {len(declared)}",
            fix="pass one tensor for each declared buffer, in the order of the text",
        )
    actual = {b.name: _as_passed(b, form) for b, form in zip(declared, forms, strict=True)}
    return Captured(Mods(_with(mods.score, actual), _with(mods.mask, actual)), Origins(), score_dtype)


def _as_passed(buffer: Buffer, form: _Form) -> Buffer:
    """Return the declaration with the strides that the tensor has: compiled graphs may lay tensors out anew."""
    if form.dtype != buffer.dtype or len(form.strides) != buffer.rank:
        raise _not_as_declared(buffer, f"{form.dtype} of rank {len(form.strides)}")
    return dataclasses.replace(buffer, strides=form.strides)


def _with(graph: Graph | None, buffers: dict[str, Buffer]) -> Graph | None:
    if graph is None:
        return None
    return dataclasses.replace(graph, buffers=tuple(buffers[buffer.name] for buffer in graph.buffers))


def _not_as_declared(buffer: Buffer, found: str) -> UnsupportedProblemError:
    return UnsupportedProblemError(
        f"the captured tensor {buffer.name} has {found}",
        why=f"the mods were captured with {buffer.dtype} of sizes {buffer.sizes} (None: any size)",
        fix="pass a tensor of that kind, or trace the call again",
    )


def print_options(options: Options) -> str:
    """Return every option by name with its value, null where flexgen decides; prefixed ones where they are set."""
    kernel = {name: getattr(options.kernel, name) for name in KERNEL_OPTION_NAMES}
    prefixed = {f"fwd_{name}": value for name, value in options.fwd.given().items()}
    prefixed |= {f"bwd_{name}": value for name, value in options.bwd.given().items()}
    return json.dumps({"layout": options.layout, **kernel, **prefixed})


@lru_cache(maxsize=KEPT)
def parse_options(text: str) -> Options:
    """Return the options whose text this is.

    Raises:
        OptionError: a name or value that is not allowed.
    """
    return Options.of(json.loads(text))

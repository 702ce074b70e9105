"""The command that makes the same thing again, for the headers of what commands write."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

import torch

from flexgen.commands.arguments import DTYPES
from flexgen.commands.subject import Subject


def command_text(
    name: str, arguments: argparse.Namespace, subject: Subject, target: str, extra: Sequence[str] = ()
) -> str:
    """Return a command with everything spelled that decides its result; the file goes by its name alone.

    Args:
        extra: arguments that this command alone has.
    """
    spec = arguments.file
    words = ["flexgen", name, ":".join([spec.path.name, *([",".join(spec.names)] if spec.names else [])])]
    words += ["--backward"] * arguments.backward + [*extra]
    words += ["--shape", str(subject.shape), "--dtype", _short(subject.dtype), "--target", target]
    words += ["--packed", ",".join(map(str, subject.packed))] if subject.packed is not None else []
    words += ["--dropout", f"{subject.dropout_p:g}"] if subject.dropout_p else []
    settings = [f"{option}={value}" for option, value in arguments.set]
    return shlex.join(words + (["--set", *settings] if settings else []))


def _short(dtype: torch.dtype) -> str:
    return next(short for short, name in DTYPES.items() if getattr(torch, name) == dtype)

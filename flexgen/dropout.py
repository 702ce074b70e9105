"""The arguments `dropout_p` and `generator` of a call, read."""

from __future__ import annotations

import numbers
from typing import Any, NoReturn

import torch

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.runtime.dropout import Dropout, draw_seed
from flexgen.torch_library.refuse import refuse


def read_dropout(dropout_p: Any, generator: Any, query: Any) -> Dropout | None:
    """Return the dropout of a call, with a seed drawn for it; None where nothing is dropped, and nothing is drawn.

    Whether query is a tensor is for others to check.

    Raises:
        ProblemTypeError: `dropout_p` is no number, or `generator` is no torch.Generator.
        UnsupportedProblemError: `dropout_p` is outside of [0, 1], or the generator is one of another device.
    """
    p = read_probability(dropout_p)
    if not isinstance(query, torch.Tensor):
        return None
    if generator is not None:
        if p > 0.0 and torch.compiler.is_compiling():
            refuse(
                "generator was passed to a call that is being traced",
                why="torch.compile and torch.export cannot hold a generator in a graph",
                fix="leave generator out, and seed torch's default one with torch.manual_seed",
            )
        _check_generator(generator, query.device)
    return Dropout(p, draw_seed(query.device, generator)) if p > 0.0 else None


def read_probability(dropout_p: Any) -> float:
    """Return `dropout_p` as a float from 0 to 1.

    Raises:
        ProblemTypeError, UnsupportedProblemError: it is none.
    """
    plain = type(dropout_p) is float or type(dropout_p) is int
    if not plain and (isinstance(dropout_p, bool) or not isinstance(dropout_p, numbers.Real)):
        _refuse_type(dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        _refuse_value(dropout_p)
    return float(dropout_p)


def _check_generator(generator: Any, device: torch.device) -> None:
    if not isinstance(generator, torch.Generator):
        raise ProblemTypeError(
            f"generator is {type(generator).__name__}, not a torch.Generator",
            fix=f'pass torch.Generator("{device.type}"), or None for the default one',
        )
    if generator.device.type != device.type:
        raise UnsupportedProblemError(
            f"generator is one of {generator.device}, query is on {device}",
            why="what is dropped is drawn on the query's device",
            fix=f'pass torch.Generator("{device.type}"), or None for the default one',
        )


def _refuse_type(dropout_p: Any) -> NoReturn:
    raise ProblemTypeError(
        f"dropout_p={dropout_p!r} is {type(dropout_p).__name__}, not a number",
        why="it is the probability that a softmax weight is dropped",
        fix="pass a float from 0 to 1, such as 0.1",
    )


def _refuse_value(dropout_p: Any) -> NoReturn:
    raise UnsupportedProblemError(
        f"dropout_p={dropout_p!r} is not a probability",
        why="it is the probability that a softmax weight is dropped, and the kept ones are divided by 1 - dropout_p",
        fix="pass a float from 0 to 1, such as 0.1",
    )


# torch.compile runs these instead of tracing into an exception's construction, which it cannot do.
_refuse_type._dynamo_marked_constant = True  # type: ignore[attr-defined]
_refuse_value._dynamo_marked_constant = True  # type: ignore[attr-defined]

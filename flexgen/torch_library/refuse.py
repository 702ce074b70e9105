"""Errors of calls that are being traced: raised where torch.compile shows them as they are."""

from __future__ import annotations

from typing import NoReturn

from flexgen.errors import UnsupportedProblemError


def refuse(what: str, why: str, fix: str) -> NoReturn:
    """Raise an UnsupportedProblemError."""
    raise UnsupportedProblemError(what, why=why, fix=fix)


# torch.compile runs it instead of tracing into an exception's construction, which it cannot do.
refuse._dynamo_marked_constant = True  # type: ignore[attr-defined]

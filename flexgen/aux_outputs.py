"""Auxiliary outputs: what a call may ask for besides the attention output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flexgen.errors import ProblemTypeError


class AuxRequest(NamedTuple):
    """Auxiliary outputs to return; a tuple as torch's is.

    Attributes:
        lse: natural logarithm of the sum of exponentials of each row's scores, [B, Hq, Lq], float32.
        max_scores: each row's largest score after score_mod, [B, Hq, Lq], float32.
    """

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """Auxiliary outputs; None where not asked for. A row without a live key has -inf in both.

    A tuple as torch's is, so that what walks through tuples (pytrees, hooks of modules) finds the tensors.
    """

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


NO_AUX = AuxRequest()
WITH_LSE = {wanted: AuxRequest(lse=True, max_scores=wanted) for wanted in (False, True)}  # by max_scores


def read_aux_request(return_aux: Any) -> AuxRequest:
    """Return the request; torch's AuxRequest is accepted too.

    Raises:
        ProblemTypeError: not a request.
    """
    if return_aux is None or isinstance(return_aux, AuxRequest):
        return return_aux or NO_AUX
    if not hasattr(return_aux, "lse") or not hasattr(return_aux, "max_scores"):
        raise ProblemTypeError(
            f"return_aux is {type(return_aux).__name__}, not an AuxRequest",
            fix="pass flexgen.AuxRequest(lse=True, max_scores=True)",
        )
    return AuxRequest(bool(return_aux.lse), bool(return_aux.max_scores))


def aux_output(outputs: Mapping[str, torch.Tensor], request: AuxRequest) -> AuxOutput:
    """Return what was asked for of a call's outputs."""
    return AuxOutput(
        outputs["logsumexp"] if request.lse else None, outputs["max_scores"] if request.max_scores else None
    )

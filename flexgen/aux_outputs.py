"""Auxiliary outputs: what a call may ask for besides the attention output.

`AuxRequest` and `AuxOutput` are torch's own classes, which code written for its flex_attention asks for by name. Both
have the fields `lse`, the natural logarithm of the sum of exponentials of each row's scores, and `max_scores`, each
row's largest score after score_mod; both are [B, Hq, Lq] in float32, and -inf for a row without a live key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxOutput as AuxOutput
from torch.nn.attention.flex_attention import AuxRequest as AuxRequest

from flexgen.errors import ProblemTypeError

NO_AUX = AuxRequest()
WITH_LSE = {wanted: AuxRequest(lse=True, max_scores=wanted) for wanted in (False, True)}  # by max_scores


def read_aux_request(return_aux: Any) -> AuxRequest:
    """Return the request; any object with its fields is one.

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

"""Outputs of a forward without a backward: asking for their gradient is an error, never silence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flexgen.errors import UnsupportedProblemError


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedProblemError(
            "flexgen has no backward kernels yet",
            why="this version compiles the forward pass only",
            fix="call under torch.no_grad(), or train with torch's flex_attention",
        )


def mark_no_backward(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output, marked so that a backward pass through it raises where an input requires grad."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        marked: torch.Tensor = _NoBackward.apply(output, *inputs)  # type: ignore[no-untyped-call]
        return marked
    return output

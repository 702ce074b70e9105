"""Attention sinks: one logit per head that takes part in the softmax's denominator and has no value."""

from __future__ import annotations

from typing import Any

import torch

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.torch_library.distributed import is_distributed


def check_sinks(sinks: Any, query: torch.Tensor, heads: int) -> None:
    """Refuse what is no tensor of one logit per query head.

    Raises:
        ProblemTypeError: no floating tensor.
        UnsupportedProblemError: another shape, or another device than the query's.
    """
    if not isinstance(sinks, torch.Tensor) or not sinks.is_floating_point():
        found = sinks.dtype if isinstance(sinks, torch.Tensor) else type(sinks).__name__
        raise ProblemTypeError(f"sinks is {found}, not a floating tensor", fix="pass a tensor of shape [Hq]")
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise UnsupportedProblemError(
            f"sinks has shape {tuple(sinks.shape)}, and the query has {heads} heads",
            why="each query head has one sink, the same for all batches and rows",
            fix=f"pass a tensor of shape ({heads},)",
        )
    if is_distributed(sinks) != is_distributed(query):
        which = "query, key and value are" if is_distributed(query) else "sinks alone is"
        raise UnsupportedProblemError(
            f"{which} made of DTensors, and not all tensors of the call are",
            why="a plain tensor does not say which heads of the whole it has",
            fix="pass sinks as a DTensor of the query's mesh, Replicate() or sharded as the heads; or all plain",
        )
    if sinks.device != query.device:
        raise UnsupportedProblemError(
            f"sinks is on {sinks.device}, query on {query.device}", fix=f"move sinks to {query.device}"
        )


def add_sinks(
    output: torch.Tensor, logsumexp: torch.Tensor, sinks: torch.Tensor, heads_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and logsumexp with exp(sink) added to each row's sum of exponentials.

    The output is scaled by exp(lse - lse'), lse' = log(exp(lse) + exp(sink)). Gradients, also those of the sinks, are
    autograd's. A row without a live key stays 0, and its logsumexp becomes the sink.

    Args:
        output: [B, Hq, Lq, Dv], or [B, Lq, Hq, Dv] with heads_dim 2.
        logsumexp: [B, Hq, Lq], -inf in rows without a live key.
        sinks: [Hq]; -inf is no sink.
    """
    sink = sinks.to(logsumexp.dtype)[None, :, None]
    kept = torch.where(logsumexp.isinf() & sink.isinf(), 0.0, torch.sigmoid(logsumexp - sink))
    kept = (kept if heads_dim == 1 else kept.transpose(1, 2)).unsqueeze(-1)
    return (output * kept).to(output.dtype), torch.logaddexp(logsumexp, sink)

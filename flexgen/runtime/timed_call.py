"""The call of an attention that is timed, forward or backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flexgen.runtime.timing import Contender

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Tensors = tuple[Tensor, Tensor, Tensor]


def timed_call(attend: Attend, tensors: Tensors, *, backward: bool) -> Contender:
    """Return the call that is timed: of the backward, gradients of query, key and value of an output made before."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return attend(*tensors)

        return forward
    query, key, value = (tensor.detach().requires_grad_() for tensor in tensors)
    with torch.enable_grad():
        output = attend(query, key, value)
    grad_output = torch.ones_like(output)
    return lambda: torch.autograd.grad(output, (query, key, value), grad_output, retain_graph=True)

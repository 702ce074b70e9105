"""A call of an Attention as one operator of a graph, for whatever traces it; itself traced by torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from flexgen.capture.live import LiveMods
from flexgen.capture.traceable import Reader, read
from flexgen.errors import UnsupportedProblemError
from flexgen.options import Options
from flexgen.torch_library.block_lists import lists_of
from flexgen.torch_library.spec import print_options, spec_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class OperatorForm:
    """What of a call does not depend on tensors: the operator's texts, and how to read what the mods captured."""

    spec: str
    options: str
    reader: Reader


def operator_form(mods: LiveMods, options: Options, query_dtype: torch.dtype) -> OperatorForm:
    """Return the form of a call by the mods as they are now."""
    captured = mods.current(torch.float64 if query_dtype == torch.float64 else torch.float32).captured
    return OperatorForm(spec_of(captured), print_options(options), mods.reader(captured))


def needs_operator(query: torch.Tensor) -> bool:
    """Whether someone other than autograd must see the call: a compiler, a dispatch mode, a functorch transform."""
    return (
        torch.compiler.is_compiling()
        or type(query) not in _PLAIN
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def call_operator(
    form: OperatorForm,
    score_mod: Any,
    mask_mod: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float | None,
    max_scores: bool,
    block_table: Any,
) -> dict[str, torch.Tensor]:
    """Call `torch.ops.flexgen.attention`.

    Args:
        tensors: query, key and value in the layout of the options.

    Returns:
        "output", "logsumexp", and "max_scores", which is empty unless asked for.
    """
    captured = read(form.reader, score_mod, mask_mod)
    lists, sizes = lists_of(block_table)
    numbers = (captured.integers, captured.floats, scale, max_scores)
    outputs = torch.ops.flexgen.attention(
        *tensors, captured.buffers, lists, sizes, *numbers, form.spec, form.options
    )
    return {"output": outputs[0], "logsumexp": outputs[1], "max_scores": outputs[2]}


def refuse_forward_mode(*tensors: torch.Tensor) -> None:
    """Raise for tensors that carry a tangent.

    Raises:
        UnsupportedProblemError: forward-mode differentiation, which would silently lose the tangents.
    """
    if any([forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors]):
        raise UnsupportedProblemError(
            "the call is inside torch.func.jvp, torch.func.jacfwd or torch.autograd.forward_ad",
            why="flexgen has kernels for reverse-mode gradients alone",
            fix="use torch.func.vjp, torch.func.jacrev or torch.autograd.grad",
        )


def autocast(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the dtype that torch.autocast asks of matrix products; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple([t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors])

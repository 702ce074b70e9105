"""A call of an Attention as one operator of a graph, for whatever traces it; itself traced by torch.compile."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from flexgen.capture.live import LiveMods, Reading
from flexgen.capture.traceable import Reader, read
from flexgen.extras import Extras
from flexgen.options import Options
from flexgen.torch_library.block_lists import lists_of
from flexgen.torch_library.spec import print_options, spec_of
from flexgen.torch_library.transforms import call_transformed

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value

_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class OperatorForm:
    """What of a call does not depend on tensors: the operator's texts, and how to read what the mods captured."""

    spec: str
    options: str
    reader: Reader


def operator_form(mods: LiveMods, options: Options, query_dtype: torch.dtype) -> OperatorForm:
    """Return the form of a call by the mods as they are now."""
    reading, spec = spec_for(mods, query_dtype)
    return OperatorForm(spec, print_options(options), mods.reader(reading.captured))


def spec_for(mods: LiveMods, query_dtype: torch.dtype) -> tuple[Reading, str]:
    """Return the mods as they are now, read and as text, with the operators at hand."""
    import_module("flexgen.torch_library.ops")  # registers the operators, which few programs need
    with temporarily_clear_interpreter_stack():  # captured tensors are looked at, not computed with
        reading = mods.current(score_dtype(query_dtype))
    return reading, spec_of(reading.captured)


def score_dtype(query_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that score_mod computes in."""
    return torch.float64 if query_dtype == torch.float64 else torch.float32


def needs_operator(query: torch.Tensor) -> bool:
    """Whether someone other than autograd must see the call: a compiler, a dispatch mode, a functorch transform."""
    return (
        torch.compiler.is_compiling()
        or (type(query) not in _PLAIN and isinstance(query, torch.Tensor))
        or torch._C._len_torch_dispatch_stack() > 0
        or _is_transformed()
    )


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def call_operator(
    form: OperatorForm,
    score_mod: Any,
    mask_mod: Any,
    tensors: Tensors,
    extras: Extras,
) -> dict[str, torch.Tensor]:
    """Call `torch.ops.flexgen.attention`.

    Args:
        tensors: query, key and value in the layout of the options.
        extras: the call's other arguments.

    Returns:
        "output", "logsumexp", and "max_scores", which is empty unless asked for.
    """
    captured = read(form.reader, score_mod, mask_mod)
    lists, sizes = lists_of(extras.block_table)
    numbers = (captured.integers, captured.floats, extras.scale, extras.aux.max_scores)
    return call_with(*tensors, captured.buffers, lists, sizes, *numbers, form.spec, form.options)


def call_with(*arguments: Any) -> dict[str, torch.Tensor]:
    """Call the operator, in the way that whatever is at work needs; returns what `call_operator` does."""
    if not torch.compiler.is_dynamo_compiling() and _is_transformed():
        outputs = call_transformed(*arguments)
    else:
        outputs = torch.ops.flexgen.attention(*arguments)
    return {"output": outputs[0], "logsumexp": outputs[1], "max_scores": outputs[2]}


def autocast(tensors: Tensors) -> Tensors:
    """Return query, key and value in the dtype that torch.autocast asks of matrix products; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype, (query, key, value) = torch.get_autocast_dtype(device), tensors
    return _cast(query, dtype), _cast(key, dtype), _cast(value, dtype)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    kept = tensor.dtype == torch.float64 or tensor.dtype.itemsize == 1  # keys and values stored in 8 bits stay so
    return tensor.to(dtype) if tensor.is_floating_point() and not kept else tensor

"""A call of an Attention as one operator of a graph, for whatever traces it; itself traced by torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

from flexgen.capture.live import Captured, LiveMods, Reading
from flexgen.capture.traceable import Reader, read
from flexgen.extras import Extras
from flexgen.options import Layout, Options
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.packing import refuse_table
from flexgen.runtime.wrappers import PLAIN, refuse_wrapper
from flexgen.torch_library.block_lists import Lists, lists_of
from flexgen.torch_library.distributed import is_distributed
from flexgen.torch_library.refuse import refuse
from flexgen.torch_library.spec import AT_ZERO, KEPT, Starts, print_options, spec_of
from flexgen.torch_library.transforms import call_transformed

dispatch_modes, interpreter_stack = torch._C._len_torch_dispatch_stack, torch._C._functorch.peek_interpreter_stack
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # query, key, value


@dataclass(frozen=True)
class OperatorForm:
    """What of a call does not depend on tensors: the operator's texts, and how to read what the mods captured."""

    spec: str
    options: str
    reader: Reader


class OperatorForms:
    """The forms of calls by a pair of mods, each made once for what the mods are at a call."""

    def __init__(self, mods: LiveMods, options: Options) -> None:
        self._mods = mods
        self._options = options
        self._forms: dict[tuple[int, Starts], tuple[Captured, OperatorForm]] = {}

    def of(self, query_dtype: torch.dtype, starts: Starts = AT_ZERO) -> OperatorForm:
        """Return the form of a call by the mods as they are now, its first b, h and q_idx at `starts`."""
        captured = read_mods(self._mods, query_dtype).captured
        key = (id(captured), starts)
        kept = self._forms.get(key)
        if kept is None or kept[0] is not captured:
            if len(self._forms) >= KEPT:
                self._forms.clear()
            form = OperatorForm(spec_of(captured, starts), print_options(self._options), self._mods.reader(captured))
            kept = self._forms[key] = (captured, form)
        return kept[1]


def read_mods(mods: LiveMods, query_dtype: torch.dtype) -> Reading:
    """Return the mods as they are now, with the operators at hand."""
    import_module("flexgen.torch_library.ops")  # registers the operators, which few programs need
    with temporarily_clear_interpreter_stack():  # captured tensors are looked at, not computed with
        return mods.current(score_dtype(query_dtype))


def score_dtype(query_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that score_mod computes in."""
    return torch.float64 if query_dtype == torch.float64 else torch.float32


def needs_operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether someone other than autograd must see the call: a compiler, a dispatch mode, a functorch transform."""
    return is_observed() or _is_special(query) or _is_special(key) or _is_special(value)


def is_observed() -> bool:
    """Whether a compiler, a dispatch mode or a functorch transform watches what happens now."""
    return torch.compiler.is_compiling() or dispatch_modes() > 0 or _is_transformed()


def _is_special(tensor: Any) -> bool:
    """Whether a tensor is of a subclass, such as a fake tensor or a DTensor."""
    return type(tensor) not in PLAIN and isinstance(tensor, torch.Tensor)


def share_of(tensors: Tensors, layout: Layout) -> Any:
    """Return this rank's share of a call with DTensors, see `share.py`; None where there are none."""
    if not any([is_distributed(tensor) for tensor in tensors]):  # noqa: C419 (torch.compile traces it)
        return None
    from flexgen.torch_library import share  # loads torch.distributed.tensor

    return share.share_of(*tensors, layout)


def _is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is at work."""
    return interpreter_stack() is not None or forward_ad._current_level >= 0


def call_operator(
    form: OperatorForm,
    score_mod: Any,
    mask_mod: Any,
    tensors: Tensors,
    extras: Extras,
    share: Any = None,
) -> dict[str, torch.Tensor]:
    """Call `torch.ops.flexgen.attention`.

    Args:
        tensors: query, key and value in the layout of the options.
        extras: the call's other arguments.
        share: see `share_of`.

    Returns:
        "output", "logsumexp", and "max_scores", which is empty unless asked for.
    """
    captured = read(form.reader, score_mod, mask_mod)
    lists, sizes = lists_of(extras.block_table)
    offsets, (seed, p) = offsets_of(extras), seed_and_probability(extras.dropout)
    numbers = (captured.integers, captured.floats, extras.scale, extras.aux.max_scores, p)
    return call_with(share, tensors, captured.buffers, lists, offsets, seed, sizes, *numbers, form.spec, form.options)


def seed_and_probability(dropout: Dropout | None) -> tuple[torch.Tensor | None, float]:
    """Return what the operator takes of a call's dropout: the seed is drawn outside of it, where others see it."""
    return (None, 0.0) if dropout is None else (dropout.seed, dropout.p)


def offsets_of(extras: Extras) -> list[torch.Tensor]:
    """Return the operator's argument `cu_seqlens`.

    Raises:
        UnsupportedProblemError: a block mask was given too.
    """
    if extras.packing is None:
        return []
    if extras.block_table is not None:
        raise refuse_table()
    return list(extras.packing.tensors)


def call_with(
    share: Any,
    tensors: Tensors,
    buffers: Sequence[torch.Tensor],
    lists: Lists,
    offsets: Sequence[torch.Tensor],
    seed: torch.Tensor | None,
    *rest: Any,
) -> dict[str, torch.Tensor]:
    """Call the operator with this rank's share of the tensors; returns what `call_operator` does."""
    if share is None:
        refuse_distributed([*buffers, *offsets])
        outputs = _call(*tensors, buffers, lists, offsets, seed, *rest)
    else:
        refuse_shared_packing(offsets)
        refuse_shared_dropout(seed)
        outputs = _call(*share.tensors(*tensors), share.buffers(buffers), share.lists(lists), [], seed, *rest)
        outputs = share.outputs(*outputs)
    return {"output": outputs[0], "logsumexp": outputs[1], "max_scores": outputs[2]}


def refuse_distributed(buffers: Sequence[torch.Tensor]) -> None:
    """Refuse captured DTensors, where query, key and value are plain tensors.

    Raises:
        UnsupportedProblemError: a captured tensor is a DTensor.
    """
    if any([type(buffer) not in PLAIN and is_distributed(buffer) for buffer in buffers]):  # noqa: C419 (faster)
        refuse(
            "a captured tensor is a DTensor, while query, key and value are plain tensors",
            why="a plain tensor does not say which part of the whole it is, and the DTensor may be sharded",
            fix="make query, key and value DTensors of its mesh, or capture its .full_tensor(), called outside. In a "
            "module that fully_shard wraps, parameters are plain tensors: call the module, not a part of it",
        )


def refuse_unreadable(buffers: Sequence[torch.Tensor]) -> None:
    """Refuse captured tensors that have no data at their address, for a call that reads them there.

    Raises:
        UnsupportedProblemError: a captured tensor is a DTensor, or another wrapper.
    """
    special = [buffer for buffer in buffers if type(buffer) not in PLAIN]
    if special:
        refuse_distributed(special)
        for buffer in special:
            refuse_wrapper("a captured tensor", buffer)


def refuse_shared_dropout(seed: torch.Tensor | None) -> None:
    """Refuse dropout of DTensors.

    Raises:
        UnsupportedProblemError: there is a seed.
    """
    if seed is not None:
        refuse(
            "dropout_p was passed with query, key and value that are DTensors",
            why="each rank would draw by its own batches and heads, so that ranks repeat or contradict each other",
            fix="pass dropout_p=0, or drop the outputs instead of the weights",
        )


def refuse_shared_packing(offsets: Sequence[torch.Tensor]) -> None:
    """Refuse packed sequences of DTensors.

    Raises:
        UnsupportedProblemError: there are offsets.
    """
    if offsets:
        refuse(
            "cu_seqlens_q was passed with query, key and value that are DTensors",
            why="offsets count tokens of the whole, and a rank may hold a part of a sequence",
            fix="call it with each rank's own sequences and plain tensors, .to_local()",
        )


def _call(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Call the operator, in the way that whatever is at work needs."""
    if not torch.compiler.is_dynamo_compiling() and _is_transformed():
        return call_transformed(*arguments)
    outputs: tuple[torch.Tensor, ...] = torch.ops.flexgen.attention(*arguments)
    return outputs


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

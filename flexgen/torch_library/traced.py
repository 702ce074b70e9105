"""The drop-in flex_attention inside a region that torch.compile traces, where no Attention is at hand."""

from __future__ import annotations

import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flexgen.aux_outputs import AuxRequest, aux_output, read_aux_request
from flexgen.capture.live import LiveMods, NumberHistory
from flexgen.capture.traceable import read
from flexgen.extras import Extras
from flexgen.jagged import is_nested, read_jagged
from flexgen.options import Options
from flexgen.torch_library.block_lists import lists_of
from flexgen.torch_library.call import (
    OperatorForm,
    OperatorForms,
    Tensors,
    autocast,
    call_operator,
    call_with,
    offsets_of,
    score_dtype,
    seed_and_probability,
    share_of,
)
from flexgen.torch_library.cells import forget_cells, share_cells
from flexgen.torch_library.recorded import Captures, RecordedForm, form_of_records, record, shows_no_values
from flexgen.torch_library.spec import AT_ZERO, KEPT, Starts

Parts = tuple[Any, Any]


def call_traced(
    score_mod: Any,
    mask_mod: Any,
    options: tuple[tuple[str, Any], ...],
    tensors: Tensors,
    scale: float | None,
    return_aux: AuxRequest | None,
    block_mask: Any,
) -> Any:
    """Call the operator with the mods' captured values as its arguments; see `flex_attention`."""
    jagged = read_jagged(*tensors, dict(options).get("layout", "bhsd"), None) if is_nested(*tensors) else None
    if jagged is not None:
        tensors = jagged.tensors
    extras = Extras(scale, read_aux_request(return_aux), block_mask, jagged.packing if jagged is not None else None)
    tensors = autocast(tensors)
    if _are_recorded(score_mod, mask_mod):
        outputs = call_recorded(score_mod, mask_mod, options, tensors, extras)
    else:
        share = share_of(tensors, "bhsd")
        starts = AT_ZERO if share is None else share.starts
        form = _form(*_parts(score_mod), *_parts(mask_mod), options, tensors[0].dtype, starts)
        outputs = call_operator(form, score_mod, mask_mod, tensors, extras, share)
        _forget_cells(*_parts(score_mod), *_parts(mask_mod))
    result = outputs["output"] if return_aux is None else (outputs["output"], aux_output(outputs, extras.aux))
    return result if jagged is None else jagged.nested(result)


def call_recorded(
    score_mod: Any,
    mask_mod: Any,
    options: tuple[tuple[str, Any], ...],
    tensors: Tensors,
    extras: Extras,
) -> dict[str, torch.Tensor]:
    """Make a call by mods that are recorded, see `recorded.py`; returns what `call_operator` does."""
    share = share_of(tensors, dict(options).get("layout", "bhsd"))
    starts = AT_ZERO if share is None else share.starts
    operands = _recorded(score_mod, mask_mod, options, tensors[0].dtype, starts)
    lists, sizes = lists_of(extras.block_table)
    offsets, (seed, p) = offsets_of(extras), seed_and_probability(extras.dropout)
    numbers: tuple[Any, ...] = (operands.integers, operands.floats, extras.scale, extras.aux.max_scores, p)
    texts = (operands.spec, operands.options)
    return call_with(share, tensors, operands.buffers, lists, offsets, seed, sizes, *numbers, *texts)


@dataclass(frozen=True)
class Operands:
    """What an operator takes of mods: their texts, and what they captured."""

    spec: str
    options: str
    buffers: list[torch.Tensor]
    integers: list[int]
    floats: list[float]


def operands_of(score_mod: Any, mask_mod: Any) -> Operands:
    """Return what an operator takes of mods that are computed apart from an attention, with scores in float32."""
    if _are_recorded(score_mod, mask_mod):
        return _recorded(score_mod, mask_mod, (), torch.float32, AT_ZERO)
    form = _form(*_parts(score_mod), *_parts(mask_mod), (), torch.float32, AT_ZERO)
    captured = read(form.reader, score_mod, mask_mod)
    _forget_cells(*_parts(score_mod), *_parts(mask_mod))
    return Operands(form.spec, form.options, captured.buffers, captured.integers, captured.floats)


def _recorded(
    score_mod: Any,
    mask_mod: Any,
    options: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
    starts: Starts,
) -> Operands:
    captures = Captures(keeps_symbols=True)
    form = _form_of(score_mod, mask_mod, options, dtype, starts, captures)
    if form is None:
        captures = Captures(keeps_symbols=False)
        form = _form_of(score_mod, mask_mod, options, dtype, starts, captures)
    assert form is not None
    buffers = [captures.tensors[place] for place in form.buffers]
    integers = [captures.symbols[place] for place in form.integers]
    return Operands(form.spec, form.options, buffers, integers, [])


def _form_of(
    score_mod: Any,
    mask_mod: Any,
    options: tuple[tuple[str, Any], ...],
    dtype: torch.dtype,
    starts: Starts,
    captures: Captures,
) -> RecordedForm | None:
    score = record(score_mod, score_dtype(dtype), captures)
    mask = record(mask_mod, None, captures)
    kinds = tuple([(it.dtype, captures.sizes(it), it.requires_grad) for it in captures.tensors])
    return form_of_records(score, mask, kinds, len(captures.symbols), options, dtype, starts)


def _are_recorded(score_mod: Any, mask_mod: Any) -> bool:
    """Whether torch.compile does not let what the mods captured be looked at."""
    if shows_no_values(score_mod) or shows_no_values(mask_mod):
        return True
    return _share_cells(*_parts(score_mod), *_parts(mask_mod))


def _parts(mod: Any) -> Parts:
    """Return the function and the receiver of a bound method: torch.compile knows the values of both, not of it."""
    return (mod.__func__, mod.__self__) if isinstance(mod, types.MethodType) else (mod, None)


def _form(
    score_function: Any,
    score_receiver: Any,
    mask_function: Any,
    mask_receiver: Any,
    options: tuple[tuple[str, Any], ...],
    query_dtype: torch.dtype,
    starts: Starts,
) -> OperatorForm:
    numbers = _numbers(_code(score_function), _code(mask_function))
    mods = LiveMods(_mod(score_function, score_receiver), _mod(mask_function, mask_receiver), numbers)
    return OperatorForms(mods, _options(options)).of(query_dtype, starts)


# torch.compile runs it while it traces and takes the result for a constant, see `Attention._operator_form`.
_form._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _share_cells(score_function: Any, score_receiver: Any, mask_function: Any, mask_receiver: Any) -> bool:
    return share_cells(_mod(score_function, score_receiver), _mod(mask_function, mask_receiver))


def _forget_cells(score_function: Any, score_receiver: Any, mask_function: Any, mask_receiver: Any) -> None:
    forget_cells(_mod(score_function, score_receiver), _mod(mask_function, mask_receiver))


_share_cells._dynamo_marked_constant = True  # type: ignore[attr-defined]
_forget_cells._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=KEPT)
def _numbers(score_code: Any, mask_code: Any) -> NumberHistory:
    """Return what was seen of numbers in mods of this code, which a fresh closure over another number continues."""
    return NumberHistory()


def _code(function: Any) -> Any:
    return getattr(function, "__code__", type(function))


def _mod(function: Any, receiver: Any) -> Any:
    return function if receiver is None else types.MethodType(function, receiver)


@lru_cache(maxsize=KEPT)
def _options(options: tuple[tuple[str, Any], ...]) -> Options:
    return Options.of(dict(options))

"""What the operators do when they run: an Attention made from the operator's texts, called with its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest
from flexgen.capture.live import Reading
from flexgen.extras import Extras
from flexgen.ir.simplify import simplify
from flexgen.lowering.triton.choose import scores_may_be_extreme
from flexgen.options import Layout
from flexgen.runtime.describe import check_tensors, to_bhsd
from flexgen.runtime.differentiable import Saved, max_scores_gradient
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.outputs import dense_strides, output_order
from flexgen.runtime.packing import Packing, check_packing
from flexgen.torch_library.block_lists import block_mask_of
from flexgen.torch_library.spec import KEPT, captured_of, parse_options


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments that the forward and the backward operator share, in the order of their schemas.

    Attributes:
        query, key, value: in the layout of the options.
        buffers, integers, floats: what the mods captured, in the order that the spec declares.
        block_lists, block_sizes: a block mask, or empty.
        cu_seqlens: where packed sequences begin, as `Packing.tensors`, or empty.
        dropout_seed, dropout_p: see `Dropout`; None and 0 where nothing is dropped.
        scale: the softmax scale; None for the default.
        max_scores: whether the call returns them.
        spec, options: texts, see `spec.py`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    buffers: Sequence[torch.Tensor]
    block_lists: Sequence[torch.Tensor | None]
    cu_seqlens: Sequence[torch.Tensor]
    dropout_seed: torch.Tensor | None
    block_sizes: Sequence[int]
    integers: Sequence[int]
    floats: Sequence[float]
    scale: float | None
    max_scores: bool
    dropout_p: float
    spec: str
    options: str

    @property
    def layout(self) -> Layout:
        return parse_options(self.options).layout

    @property
    def packing(self) -> Packing | None:
        return Packing(*self.cu_seqlens) if self.cu_seqlens else None

    @property
    def dropout(self) -> Dropout | None:
        return None if self.dropout_seed is None else Dropout(self.dropout_p, self.dropout_seed)

    @property
    def aux_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


@lru_cache(maxsize=KEPT)
def _attention(spec: str, options: str) -> Attention:
    """Return the Attention that runs calls of these texts; it keeps their kernels."""
    return Attention(None, None, parse_options(options))


def _reading(call: Arguments) -> Reading:
    captured = captured_of(call.spec, call.aux_dtype, list(call.buffers))
    integers, floats = iter(call.integers), iter(call.floats)
    scalars = tuple([next(floats if s.dtype.is_floating_point else integers) for s in captured.mods.scalars])
    return Reading(captured, tuple(call.buffers), scalars)


def _extras(call: Arguments, *, max_scores: bool = False) -> Extras:
    blocks = block_mask_of(call.block_lists, call.block_sizes)
    return Extras(call.scale, AuxRequest(True, max_scores), blocks, call.packing, dropout=call.dropout)


def run_forward(call: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, logsumexp, max_scores, and the logsumexp's tail; the last two have no elements unless needed."""
    outputs = _attention(call.spec, call.options).run(
        _reading(call),
        (call.query, call.key, call.value),
        _extras(call, max_scores=call.max_scores),
    )
    absent = call.query.new_empty(0, dtype=call.aux_dtype)
    tail = outputs.get("logsumexp_tail", absent.clone())
    return outputs["output"], outputs["logsumexp"], outputs.get("max_scores", absent), tail


def fake_forward(call: Arguments) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `run_forward` would, without data: the same shapes, dtypes and strides."""
    check_tensors(call.query, call.key, call.value, call.layout)
    query, value = to_bhsd(call.query, call.layout), to_bhsd(call.value, call.layout)
    if call.packing is not None:
        check_packing(call.packing, query, to_bhsd(call.key, call.layout))
    b, h, s, _ = query.shape
    d = value.shape[3]
    if call.layout == "bshd":
        output = query.new_empty((b, s, h, d))
    else:
        output = query.new_empty_strided((b, h, s, d), dense_strides((b, h, s, d), (*output_order(query), 3)))
    aux = query.new_empty((b, h, s), dtype=call.aux_dtype)
    tail = aux.new_empty((b, h, s) if _has_tail(call) else (0,))
    return output, aux, aux.new_empty((b, h, s) if call.max_scores else (0,)), tail


def _has_tail(call: Arguments) -> bool:
    captured = captured_of(call.spec, call.aux_dtype, list(call.buffers))
    return scores_may_be_extreme(simplify(captured.mods, captured.origins).mods.score, call.query.dtype) is not None


def run_backward(
    call: Arguments,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    tail: torch.Tensor,
    grad_output: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    grad_max_scores: torch.Tensor | None,
    wanted: Sequence[bool],
) -> list[torch.Tensor]:
    """Return the wanted ones of the gradients of query, key, value and the buffers, each contiguous.

    Args:
        output, logsumexp, tail: what the forward returned.
        grad_output, grad_logsumexp: the gradients in them.
        grad_max_scores: the gradient in max_scores, which must be 0: compiled graphs pass zeros for no gradient.
        wanted: one for each of query, key, value and the buffers.

    Raises:
        UnsupportedProblemError: grad_max_scores is not 0.
    """
    if grad_max_scores is not None and grad_max_scores.numel():
        _unused_max_scores(call.spec, call.options).check(grad_max_scores)
    layout = call.layout
    query, key, value = (to_bhsd(tensor, layout) for tensor in (call.query, call.key, call.value))
    batch = query.shape[0]
    key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    names = ["query", "key", "value", *(f"buffer {index}" for index in range(len(call.buffers)))]
    wanted_names = [name for name, is_wanted in zip(names, wanted, strict=True) if is_wanted]
    found = _attention(call.spec, call.options).gradients(
        _reading(call),
        (call.query, call.key, call.value),
        _extras(call),
        Saved(
            query,
            key,
            value,
            _with_columns_inside(to_bhsd(output, layout)),
            logsumexp,
            tail,
            tuple(call.buffers),
            call.packing,
            call.dropout,
        ),
        to_bhsd(grad_output, layout),
        grad_logsumexp,
        frozenset(wanted_names),
    )
    return [_as_given(call, name, found[name]) for name in wanted_names]


def _with_columns_inside(output: torch.Tensor) -> torch.Tensor:
    """Return the output as a kernel writes it: each row's columns are next to each other."""
    return output if output.stride(3) == 1 else output.contiguous()


class _UnusedMaxScores:
    """Refuses losses that depend on max_scores; on a GPU only the first check waits for the device."""

    def __init__(self) -> None:
        self._checked = False

    def check(self, grad: torch.Tensor) -> None:
        if grad.is_cuda and (self._checked or torch.cuda.is_current_stream_capturing()):
            torch._assert_async(~grad.any(), max_scores_gradient().what)
        elif grad.any():
            raise max_scores_gradient()
        self._checked = True


@lru_cache(maxsize=KEPT)
def _unused_max_scores(spec: str, options: str) -> _UnusedMaxScores:
    return _UnusedMaxScores()


def _as_given(call: Arguments, name: str, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient in its tensor's layout and batch."""
    if name not in ("query", "key", "value"):
        return grad.contiguous()
    given: torch.Tensor = getattr(call, name)
    grad = to_bhsd(grad, call.layout)
    if grad.shape[0] != given.shape[0]:
        grad = grad.sum(0, keepdim=True, dtype=call.aux_dtype).to(given.dtype)
    return grad.contiguous()


def fake_backward(call: Arguments, wanted: Sequence[bool]) -> list[torch.Tensor]:
    """Return what `run_backward` would, without data."""
    inputs = (call.query, call.key, call.value, *call.buffers)
    return [t.new_empty(t.shape) for t, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]

"""The autograd function around a forward launch: it saves what the backward kernels need, and calls them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.packing import Packing

Outputs = dict[str, torch.Tensor]
Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Saved:
    """What the forward leaves for the backward; all in [B, H, L, D] order."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    logsumexp: torch.Tensor
    tail: torch.Tensor | None  # what rounding took from the logsumexp, where scores may be extreme
    buffers: tuple[torch.Tensor, ...]
    packing: Packing | None = None
    dropout: Dropout | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One call to be differentiated.

    Attributes:
        forward: launches the forward kernel for the inputs given to `attend`; the outputs include `logsumexp`.
        backward: (saved, grad of output, grad of logsumexp or None, wanted names) -> gradients by name: "query",
            "key", "value", and "buffer <i>" for a captured tensor.
        packing: where packed sequences begin, which the backward reads again.
        dropout: what the forward drops, and the backward drops again; its seed is saved as the call's tensors are.
    """

    forward: Callable[[Sequence[torch.Tensor]], Outputs]
    backward: Callable[[Saved, torch.Tensor, torch.Tensor | None, frozenset[str]], Gradients]
    packing: Packing | None = None
    dropout: Dropout | None = None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: Step, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = step.forward(inputs)
        ctx.compute = step.backward  # alone: the forward holds the inputs, which saved-tensor hooks may want to free
        seed = None if step.dropout is None else step.dropout.seed
        ctx.dropout_p = 0.0 if step.dropout is None else step.dropout.p
        made = (outputs["output"], outputs["logsumexp"], outputs.get("logsumexp_tail"))
        offsets = step.packing.tensors if step.packing else ()
        ctx.save_for_backward(*inputs, *made, seed, *offsets)
        ctx.input_count = len(inputs)
        ctx.set_materialize_grads(False)
        return tuple(outputs[name] for name in ("output", "logsumexp", "max_scores") if name in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        saved_tensors = ctx.saved_tensors  # once: checkpointing recomputes what it unpacks
        inputs, made = saved_tensors[: ctx.input_count], saved_tensors[ctx.input_count :]
        output, logsumexp, tail, seed, *offsets = made
        if len(grads) > 2 and grads[2] is not None:
            raise max_scores_gradient()
        names, wanted = _wanted(ctx.needs_input_grad)
        grads = tuple(None if grad is None else grad.resolve_neg() for grad in grads)
        grad_output = grads[0] if grads[0] is not None else torch.zeros_like(output)
        query, key, value, *buffers = inputs
        packing = Packing(*offsets) if offsets else None
        dropout = None if seed is None else Dropout(ctx.dropout_p, seed)
        saved = Saved(query, key, value, output, logsumexp, tail, tuple(buffers), packing, dropout)
        found = once(lambda: ctx.compute(saved, grad_output, grads[1], wanted), (*inputs, grad_output, grads[1]))
        return (None, *map(found.get, names))


def once(compute: Callable[[], Gradients], read: Sequence[torch.Tensor | None]) -> Gradients:
    """Return gradients through which nobody can go back: whoever does is refused by name.

    Args:
        compute: launches the kernels.
        read: what the gradients depend on.
    """
    if not torch.is_grad_enabled():
        return compute()
    with torch.no_grad():  # create_graph=True: what the gradients depend on must not be forgotten
        found = compute()
    marked = _Once.apply(len(found), *found.values(), *read)  # type: ignore[no-untyped-call]
    return dict(zip(found, marked, strict=True))


class _Once(torch.autograd.Function):
    """Passes gradients on as depending on what they were computed from, and refuses to go back through them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors[:count] if tensor is not None])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        raise double_backward()


def double_backward() -> UnsupportedProblemError:
    """Return the error for a gradient of gradients."""
    return UnsupportedProblemError(
        "a gradient of flexgen's gradients was asked for",
        why="there are no kernels for second derivatives",
        fix="leave out create_graph=True, or compute this attention with torch operations",
    )


def max_scores_gradient() -> UnsupportedProblemError:
    """Return the error for a loss that depends on max_scores."""
    return UnsupportedProblemError(
        "the loss depends on max_scores, which flexgen does not differentiate",
        why="a maximum over keys passes its gradient to single keys; no kernel computes that",
        fix="use max_scores.detach(), or build the loss on the logsumexp",
    )


@lru_cache(maxsize=256)
def _wanted(needed: tuple[bool, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Return the names of a step's inputs, which stand behind the step itself, and of those that need a gradient."""
    names = ("query", "key", "value", *(f"buffer {index}" for index in range(len(needed) - 4)))
    return names, frozenset(name for name, needs in zip(names, needed[1:], strict=True) if needs)


def grad_is_needed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buffers: Sequence[torch.Tensor]
) -> bool:
    """Whether autograd wants to record a call with these inputs."""
    if not torch.is_grad_enabled():
        return False
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return True
    return bool(buffers) and any([buffer.requires_grad for buffer in buffers])  # noqa: C419 (faster)


def refuse_gradients(sides: Collection[str], key: torch.Tensor) -> None:
    """Refuse to record a call with what no backward kernel takes.

    Args:
        sides: names of what the call brings besides query, key and value.

    Raises:
        UnsupportedProblemError: says what.
    """
    if sides or key.dtype.itemsize == 1:
        what = next(iter(sides)) if sides else f"keys in {str(key.dtype).removeprefix('torch.')}"
        raise UnsupportedProblemError(
            f"gradients are wanted of a call with {what}",
            why="it serves decoding and prefilling; no backward kernel reads it",
            fix="call under torch.no_grad(), or with tensors that do not require grad",
        )


def attend(step: Step, inputs: Sequence[torch.Tensor]) -> Outputs:
    """Run a step under autograd.

    Args:
        inputs: query, key and value in [B, H, L, D] order, then the captured tensors.
    """
    results = _Attend.apply(step, *inputs)  # type: ignore[no-untyped-call]
    return dict(zip(("output", "logsumexp", "max_scores"), results, strict=False))


# torch's `apply` without what it does for functorch first.
_apply: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Attend).apply


def attend_unobserved(step: Step, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output of a step under autograd, where no transform of functorch is at work."""
    return _apply(step, *inputs)[0]

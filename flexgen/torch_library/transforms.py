"""A call under torch.func's transforms: an autograd function that they can see through, around the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.runtime.differentiable import double_backward

_INPUTS = 3  # query, key and value come first
_MADE = 6  # output, logsumexp, its tail, and the gradients in output, logsumexp and max_scores come last
_MAX_SCORES = 4  # where the flag stands among the rest of a Plain


@dataclass(frozen=True, slots=True)
class Plain:
    """The operator's arguments that are no tensors, and how many tensors its lists hold.

    Attributes:
        buffer_count: how many captured tensors follow query, key and value.
        offset_count: how many tensors of `cu_seqlens` follow those.
        has_list: for each of a block mask's lists, whether it is there.
        has_seed: whether dropout's seed is there, the last of the tensors.
        rest: the arguments after it.
    """

    buffer_count: int
    offset_count: int
    has_list: tuple[bool, ...]
    has_seed: bool
    rest: tuple[Any, ...]

    def arguments(self, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
        """Return the operator's arguments."""
        buffers_end = _INPUTS + self.buffer_count
        end = buffers_end + self.offset_count
        buffers, offsets, others = (
            list(tensors[_INPUTS:buffers_end]),
            list(tensors[buffers_end:end]),
            iter(tensors[end:]),
        )
        *block_lists, seed = [next(others) if has else None for has in (*self.has_list, self.has_seed)]
        return (*tensors[:_INPUTS], buffers, block_lists, offsets, seed, *self.rest)


class _Gradients(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(plain: Plain, wanted: list[bool], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs, made = tensors[:-_MADE], tensors[-_MADE:]
        return tuple(torch.ops.flexgen.attention_backward(*plain.arguments(inputs), *made, wanted))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise double_backward()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise _forward_mode()


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(plain: Plain, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.flexgen.attention(*plain.arguments(tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        plain, *tensors = inputs
        ctx.plain = plain
        ctx.save_for_backward(*tensors, output[0], output[1], output[3])
        ctx.mark_non_differentiable(output[3], *([] if plain.rest[_MAX_SCORES] else [output[2]]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *tensors, output, logsumexp, tail = ctx.saved_tensors
        count = _INPUTS + ctx.plain.buffer_count
        wanted = list(ctx.needs_input_grad[1 : count + 1])
        found = iter(_Gradients.apply(ctx.plain, wanted, *tensors, output, logsumexp, tail, *grads[:3]))  # type: ignore[no-untyped-call]
        results = [next(found) if is_wanted else None for is_wanted in wanted]
        return (None, *results, *[None] * (len(tensors) - count))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise _forward_mode()


def _forward_mode() -> UnsupportedProblemError:
    return UnsupportedProblemError(
        "attention was called inside torch.func.jvp, torch.func.jacfwd or torch.autograd.forward_ad",
        why="flexgen has kernels for reverse-mode gradients alone",
        fix="use torch.func.vjp, torch.func.jacrev or torch.autograd.grad",
    )


def call_transformed(*arguments: Any) -> tuple[torch.Tensor, ...]:
    """Call the operator so that torch.func.grad, vjp, jacrev and vmap work; jvp is refused by name."""
    query, key, value, buffers, lists, offsets, seed, *rest = arguments
    has_list = tuple([tensor is not None for tensor in lists])
    plain = Plain(len(buffers), len(offsets), has_list, seed is not None, tuple(rest))
    present = [tensor for tensor in (*lists, seed) if tensor is not None]
    outputs: tuple[torch.Tensor, ...] = _Attention.apply(  # type: ignore[no-untyped-call]
        plain, query, key, value, *buffers, *offsets, *present
    )
    return outputs

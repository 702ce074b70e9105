"""flexgen's operators: schemas, fake kernels, autograd and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.runtime.differentiable import double_backward, refuse_gradients
from flexgen.torch_library.run import Arguments, fake_backward, fake_forward, run_backward, run_forward
from flexgen.torch_library.traced_masks import run_block_states, run_mask

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

_SHARED = (
    "Tensor query, Tensor key, Tensor value, Tensor[] buffers, Tensor?[] block_lists, Tensor[] cu_seqlens, "
    "Tensor? dropout_seed, SymInt[] block_sizes, SymInt[] integers, float[] floats, float? scale, bool max_scores, "
    "float dropout_p, str spec, str options"
)
_COUNT = len(_SHARED.split(", "))
_BUFFERS, _OFFSETS = 3, 5  # where the buffers and the offsets of packed sequences stand among the arguments
_MAX_SCORES = 4  # where the flag stands among the arguments that are no tensors

_operator = torch.library.custom_op


@_operator("flexgen::attention", mutates_args=(), schema=f"({_SHARED}) -> (Tensor, Tensor, Tensor, Tensor)")
def attention(*arguments: Any) -> Outputs:
    """Return output, logsumexp, max_scores, and the logsumexp's tail; see `Arguments`."""
    return run_forward(Arguments(*arguments))


@_operator(
    "flexgen::attention_backward",
    mutates_args=(),
    schema=f"({_SHARED}, Tensor output, Tensor logsumexp, Tensor tail, Tensor grad_output, Tensor? grad_logsumexp, "
    "Tensor? grad_max_scores, bool[] wanted) -> Tensor[]",
)
def attention_backward(*arguments: Any) -> list[torch.Tensor]:
    """Return the wanted ones of the gradients of query, key, value and the buffers; see `run_backward`."""
    return run_backward(Arguments(*arguments[:_COUNT]), *arguments[_COUNT:])


@attention.register_fake
def _(*arguments: Any) -> Outputs:
    return fake_forward(Arguments(*arguments))


@attention_backward.register_fake
def _(*arguments: Any) -> list[torch.Tensor]:
    return fake_backward(Arguments(*arguments[:_COUNT]), arguments[-1])


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: Outputs) -> None:
    query, key, value, buffers, lists, offsets, seed, *plain = inputs
    refuse_gradients((), key)
    present = [tensor for tensor in lists if tensor is not None]
    ctx.save_for_backward(query, key, value, output[0], output[1], output[3], seed, *buffers, *offsets, *present)
    ctx.counts = (len(buffers), len(offsets), [tensor is not None for tensor in lists])
    ctx.plain = plain
    # max_scores has no gradient, which a loss that asks for it is told: it is no constant to autograd.
    ctx.mark_non_differentiable(output[3], *([] if plain[_MAX_SCORES] else [output[2]]))
    ctx.set_materialize_grads(False)


def _saved_arguments(ctx: Any) -> tuple[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    query, key, value, output, logsumexp, tail, seed, *rest = ctx.saved_tensors
    buffer_count, offset_count, has_list = ctx.counts
    end = buffer_count + offset_count
    buffers, offsets, lists = rest[:buffer_count], rest[buffer_count:end], iter(rest[end:])
    block_lists = [next(lists) if has else None for has in has_list]
    return (query, key, value, buffers, block_lists, offsets, seed, *ctx.plain), (output, logsumexp, tail)


def _backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    arguments, made = _saved_arguments(ctx)
    needed = ctx.needs_input_grad
    wanted = [*needed[:_BUFFERS], *_flat(needed[_BUFFERS], len(arguments[_BUFFERS]))]
    grad_output = torch.zeros_like(made[0]) if grads[0] is None else grads[0]
    found = iter(attention_backward(*arguments, *made, grad_output, *grads[1:3], wanted))
    results = [next(found) if is_wanted else None for is_wanted in wanted]
    others = [_no_gradient(argument) for argument in arguments[_BUFFERS + 1 :]]
    return (*results[:_BUFFERS], results[_BUFFERS:], *others)


def _no_gradient(argument: Any) -> Any:
    """Return what torch.library takes for no gradient: a list for a list of tensors or an empty one, else None."""
    if isinstance(argument, list | tuple) and all(isinstance(item, torch.Tensor) for item in argument):
        return [None] * len(argument)
    return None


def _flat(needed: Any, count: int) -> list[bool]:
    return list(needed) if isinstance(needed, Sequence) else [bool(needed)] * count


attention.register_autograd(_backward, setup_context=_set_up)


def _refuse_double_backward(ctx: Any, *grads: Any) -> Any:
    raise double_backward()


attention_backward.register_autograd(_refuse_double_backward)


def _each(operator: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[Any]:
    """Call the operator once for each entry of the dimension that is mapped over.

    Raises:
        UnsupportedProblemError: of packed sequences.
    """
    if arguments[_OFFSETS]:
        raise UnsupportedProblemError(
            "attention over packed sequences (cu_seqlens) was called inside torch.vmap",
            why="packed sequences are a batch of their own, with one set of offsets",
            fix="pack the mapped entries too, as more sequences, or call it outside of vmap",
        )
    return [
        operator(*(_entry(argument, dim, at) for argument, dim in zip(arguments, in_dims, strict=True)))
        for at in range(info.batch_size)
    ]


def _entry(argument: Any, dim: Any, at: int) -> Any:
    if isinstance(argument, list | tuple):
        dims = dim if isinstance(dim, list | tuple) else [dim] * len(argument)
        return [_entry(item, own, at) for item, own in zip(argument, dims, strict=True)]
    return argument if dim is None or not isinstance(argument, torch.Tensor) else argument.select(dim, at)


@attention.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Outputs, tuple[int, int, int, int]]:
    results = _each(attention, info, in_dims, arguments)
    output, logsumexp, max_scores, tail = (torch.stack(parts) for parts in zip(*results, strict=True))
    return (output, logsumexp, max_scores, tail), (0, 0, 0, 0)


@attention_backward.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[list[torch.Tensor], list[int]]:
    results = _each(attention_backward, info, in_dims, arguments)
    grads = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return grads, [0] * len(grads)


_MASK = "Tensor[] buffers, SymInt[] integers, float[] floats, SymInt[] sizes, Device device, str spec"


@_operator("flexgen::block_states", mutates_args=(), schema=f"({_MASK}) -> Tensor")
def block_states(*arguments: Any) -> torch.Tensor:
    """Return which blocks of a mask hold live pairs; see `run_block_states`."""
    return run_block_states(*arguments)


@block_states.register_fake
def _(buffers: Any, integers: Any, floats: Any, sizes: Any, device: torch.device, spec: str) -> torch.Tensor:
    batch, heads, query_length, key_length, q_block_size, kv_block_size = sizes
    blocks = (-(-query_length // q_block_size), -(-key_length // kv_block_size))
    return torch.empty((batch, heads, *blocks), dtype=torch.int8, device=device)


@_operator("flexgen::mask", mutates_args=(), schema=f"({_MASK}) -> Tensor")
def mask(*arguments: Any) -> torch.Tensor:
    """Return the whole mask of a mod; see `run_mask`."""
    return run_mask(*arguments)


@mask.register_fake
def _(buffers: Any, integers: Any, floats: Any, sizes: Any, device: torch.device, spec: str) -> torch.Tensor:
    return torch.empty(tuple(sizes), dtype=torch.bool, device=device)

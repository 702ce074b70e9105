"""Fills a kernel's arguments from a launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexgen.codegen.source import Arg, Role
from flexgen.runtime.describe import Launch
from flexgen.runtime.dropout import SEED
from flexgen.runtime.gluon_descriptor import Descriptor, descriptor_form

Value = torch.Tensor | Descriptor | int | float | None


def bind(args: Sequence[Arg], launch: Launch, outputs: Mapping[str, torch.Tensor]) -> list[Value]:
    """Return the value of each argument, in order."""
    tensors = {**launch.tensors, **outputs}
    if launch.dropout is not None:
        tensors[SEED] = launch.dropout.seed
    return [_value(arg, launch, tensors) for arg in args]


def _value(arg: Arg, launch: Launch, tensors: Mapping[str, torch.Tensor]) -> Value:
    match arg.role:
        case Role.TENSOR:
            return tensors[arg.of]
        case Role.DESCRIPTOR:
            return descriptor_form(tensors[arg.of]).of(tensors[arg.of])
        case Role.TENSOR_STRIDE:
            return _stride(tensors[arg.of], arg.dim)
        case Role.TABLE:
            return launch.table[arg.of]
        case Role.TABLE_STRIDE:
            return _stride(launch.table[arg.of], arg.dim)
        case Role.TABLE_SIZE:
            return launch.table[arg.of].shape[arg.dim or 0]
        case Role.SIDE | Role.SIDE_NUMBER:
            return launch.sides[arg.of]
        case Role.SIDE_STRIDE:
            return _stride(launch.side_tensor(arg.of), arg.dim)
        case Role.SPLITS:
            return launch.splits
        case Role.SCRATCH:
            return tensors.get(arg.of)
        case Role.CU_SEQLENS:
            return launch.cu_seqlens[arg.of]
        case Role.BUFFER:
            return launch.buffers[arg.of]
        case Role.BUFFER_STRIDE:
            return _stride(launch.buffers[arg.of], arg.dim)
        case Role.BUFFER_SIZE:
            return launch.buffers[arg.of].shape[arg.dim or 0]
        case Role.BUFFER_GRAD:
            return tensors[f"grad of {arg.of}"]
        case Role.BUFFER_GRAD_STRIDE:
            return _stride(tensors[f"grad of {arg.of}"], arg.dim)
        case Role.SCALAR:
            return launch.scalars[arg.of]
        case Role.SCALE:
            return launch.scale
        case Role.DROPOUT:
            assert launch.dropout is not None, "a kernel drops weights, and the launch does not"
            return launch.dropout.numbers()[arg.of]
        case Role.LENGTH:
            return _length(arg.of, launch)


def _stride(tensor: torch.Tensor, dim: int | None) -> int:
    """Return a stride; 0 where the dimension has one element, whose stride torch leaves undefined."""
    position = dim or 0
    return tensor.stride(position) if tensor.shape[position] > 1 else 0


def _length(name: str, launch: Launch) -> int:
    lengths = {
        "Q_LEN": launch.q_len,
        "KV_LEN": launch.kv_len,
        "Q_HEADS": launch.q_heads,
        "BATCH": launch.batch,
        "Q_OFFSET": launch.q_offset,
        "KV_OFFSET": launch.kv_offset,
        "Q_TOTAL": launch.q_len,
        "KV_TOTAL": launch.kv_len,
        "SEQUENCES": launch.sequences,
    }
    return lengths[name]

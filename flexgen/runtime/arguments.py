"""The types of a kernel's arguments, as compiling, launching and interpreting need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

_TRITON_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}


class TypedArg(Protocol):
    """Whatever says the type of one kernel parameter: an `Arg` of an emitted kernel, or an `ArgType`."""

    @property
    def type(self) -> str:
        """Triton's signature type, such as `*bf16`, `i32`, `i64`, `fp32` or `fp64`."""

    @property
    def specialize(self) -> bool:
        """Whether a compiled kernel may rely on the address or integer being a multiple of 16 when it is."""


@dataclass(frozen=True, slots=True)
class ArgType:
    """A `TypedArg` by itself."""

    type: str
    specialize: bool = False


def is_pointer(arg: TypedArg) -> bool:
    return arg.type.startswith("*")


def triton_name(dtype: torch.dtype) -> str:
    """Return Triton's name of an element dtype, such as `bf16`."""
    return _TRITON_NAMES[dtype]

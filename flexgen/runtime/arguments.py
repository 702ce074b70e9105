"""The types of a kernel's arguments, as compiling, launching and interpreting need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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

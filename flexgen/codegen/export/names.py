"""What a stand-alone module's host code calls the tensors and numbers that its kernels take."""

from __future__ import annotations

import builtins
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexgen.codegen.source import Arg, Role
from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Mods

_LENGTHS = {"Q_LEN": "q_len", "KV_LEN": "kv_len", "Q_HEADS": "q_heads", "BATCH": "batch"}

# Names of the host code itself, which captured values may not take.
# fmt: off
_RESERVED = frozenset((
    "architecture", "attention", "batch", "capacity", "check", "columns", "compiled_for", "ctx", "delta", "dense",
    "device", "ends", "fix", "forward", "found", "full_counts", "full_kv_num_blocks", "full_q_num_blocks",
    "grad_key", "grad_logsumexp", "grad_output", "grad_query", "grad_scale", "grad_value", "head_dims", "heads",
    "interprets", "key", "kv_batch", "kv_heads", "kv_indices", "kv_len", "kv_num_blocks", "kv_offsets",
    "launch_backward", "launch_forward", "list_blocks", "lists", "logsumexp", "logsumexp_tail", "mask_batch",
    "mask_heads", "max_scores", "name", "one", "output", "partial_counts", "q_heads", "q_indices", "q_len",
    "q_num_blocks", "q_offsets", "query", "refuse_gradient", "row_shift", "rows", "scale", "scratch", "shapes",
    "span", "tensor", "tl", "torch", "triton", "value",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class HostNames:
    """Names of captured values in the host code.

    Attributes:
        buffers, scalars: by the mods' own names.
    """

    buffers: Mapping[str, str]
    scalars: Mapping[str, str]

    @classmethod
    def of(cls, mods: Mods, written: Iterable[str]) -> HostNames:
        """Return names that differ from the module's own.

        Args:
            written: names of the module's functions and template variables.
        """
        taken = {*_RESERVED, *dir(builtins), *keyword.kwlist, *written}
        found: dict[str, str] = {}
        for name in (*(buffer.name for buffer in mods.buffers), *(scalar.name for scalar in mods.scalars)):
            free = name
            while free in taken or f"grad_{free}" in taken:
                free += "_"
            taken |= {free, f"grad_{free}"}
            found[name] = free
        return cls(
            {buffer.name: found[buffer.name] for buffer in mods.buffers},
            {scalar.name: found[scalar.name] for scalar in mods.scalars},
        )

    @property
    def captured(self) -> tuple[str, ...]:
        """Captured tensors, then numbers, in the order of the module's parameters."""
        return (*self.buffers.values(), *self.scalars.values())

    def value(self, arg: Arg) -> str:
        """Return the expression of an argument's value."""
        match arg.role:
            case Role.TENSOR | Role.TABLE:
                return arg.of
            case Role.TENSOR_STRIDE | Role.TABLE_STRIDE:
                return f"{arg.of}.stride({arg.dim})"
            case Role.TABLE_SIZE:
                return f"{arg.of}.shape[{arg.dim}]"
            case Role.BUFFER:
                return self.buffers[arg.of]
            case Role.BUFFER_STRIDE:
                return f"{self.buffers[arg.of]}.stride({arg.dim})"
            case Role.BUFFER_SIZE:
                return f"{self.buffers[arg.of]}.shape[{arg.dim}]"
            case Role.BUFFER_GRAD:
                return f"grad_{self.buffers[arg.of]}"
            case Role.BUFFER_GRAD_STRIDE:
                return f"grad_{self.buffers[arg.of]}.stride({arg.dim})"
            case Role.SCALAR:
                return self.scalars[arg.of]
            case Role.SCALE:
                return "scale"
            case Role.LENGTH if arg.of in _LENGTHS:
                return _LENGTHS[arg.of]
        raise UnsupportedProblemError(
            f"a kernel that takes {arg.name} ({arg.role.value}) cannot be exported",
            why="the host code of a stand-alone module has no value for it",
            fix="run it through flexgen.compile, or choose options that use another kernel",
        )

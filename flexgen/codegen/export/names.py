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
_LENGTHS |= {"Q_TOTAL": "q_len", "KV_TOTAL": "kv_len", "SEQUENCES": "sequences"}

# Names of the host code itself, which captured values may not take.
# fmt: off
_RESERVED = frozenset((
    "architecture", "attention", "balancing_splits", "batch", "block", "capacity", "check", "columns", "combine",
    "compiled_for", "copyable", "ctx", "cu_seqlens_k", "cu_seqlens_q", "delta", "dense", "describe", "device",
    "drop_below", "dropout_p", "dropout_seed", "elements", "ends", "fence_async_shared", "fix", "forward", "found",
    "full_counts", "full_kv_num_blocks", "full_q_num_blocks", "generator", "gl", "gluon", "grad_key",
    "grad_logsumexp", "grad_output", "grad_query", "grad_scale", "grad_value", "head_dims", "heads", "interprets",
    "k_scale", "keep_scale", "key", "keys", "kv_batch", "kv_heads", "kv_indices", "kv_len", "kv_lengths",
    "kv_num_blocks", "kv_offsets", "last", "launch_backward", "launch_forward", "layout", "libdevice",
    "list_blocks", "lists", "logsumexp", "logsumexp_tail", "lost", "mask_batch", "mask_heads", "max_scores",
    "mbarrier", "most", "name", "names", "offsets", "one", "outer", "output", "padded", "page_size", "page_table",
    "partial_counts", "partials", "places", "processors", "programs", "q_heads", "q_indices", "q_len",
    "q_num_blocks", "q_offsets", "query", "refuse_gradient", "row_shift", "row_tail", "rows", "scale", "scratch",
    "sequences", "shape", "shapes", "slots", "span", "split_count", "splits", "strides", "tensor", "tiles", "tl",
    "tma", "torch", "total", "triton", "v_scale", "value", "warpgroup_mma", "warpgroup_mma_wait", "written_for",
))
# fmt: on


@dataclass(frozen=True, slots=True)
class HostNames:
    """Names of captured values in the host code.

    Attributes:
        buffers, scalars: by the mods' own names.
        packed: the kernels are machine code, which holds the tiles that descriptors are of.
    """

    buffers: Mapping[str, str]
    scalars: Mapping[str, str]
    packed: bool = False

    @classmethod
    def of(cls, mods: Mods, written: Iterable[str], *, packed: bool) -> HostNames:
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
            packed,
        )

    @property
    def captured(self) -> tuple[str, ...]:
        """Captured tensors, then numbers, in the order of the module's parameters."""
        return (*self.buffers.values(), *self.scalars.values())

    def value(self, arg: Arg) -> str:
        """Return the expression of an argument's value."""
        match arg.role:
            case (
                Role.TENSOR | Role.TABLE | Role.CU_SEQLENS | Role.DROPOUT | Role.SIDE | Role.SIDE_NUMBER | Role.SCRATCH
            ):
                return arg.of
            case Role.SPLITS:
                return "splits"
            case Role.DESCRIPTOR:
                return f"describe({arg.of})" if self.packed else f"describe({arg.of}, [{_block_of(arg)}])"
            case Role.TENSOR_STRIDE | Role.TABLE_STRIDE | Role.SIDE_STRIDE:
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


def _block_of(arg: Arg) -> str:
    """Return the sizes of a descriptor's tile, which its type names."""
    return arg.type[arg.type.index("[") + 1 : arg.type.index("]")]

"""What emission returns: the text of a module, its entry, and what each kernel argument means."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, replace
from pathlib import PurePath


class Role(enum.Enum):
    """Where the launcher takes an argument's value from."""

    TENSOR = (
        "tensor"  # pointer to (or the copy engine's descriptor of) query, key, value, output, logsumexp, max_scores
    )
    DESCRIPTOR = "descriptor"  # the copy engine's, of such a tensor in [B, H, L, D] order
    TENSOR_STRIDE = "tensor stride"  # stride of such a tensor, in elements
    TABLE = "table"  # pointer to one of the block table's index tensors
    TABLE_STRIDE = "table stride"
    TABLE_SIZE = "table size"
    SIDE = "side"  # pointer to a tensor that a call brings besides query, key and value, such as kv_lengths
    SIDE_STRIDE = "side stride"
    SIDE_NUMBER = "side number"  # a number that a call brings: v_scale
    SPLITS = "splits"  # how many programs share the keys of a row
    SCRATCH = "scratch"  # pointer to memory that one kernel of a call leaves for the next
    CU_SEQLENS = "cu_seqlens"  # pointer to the offsets of packed sequences
    BUFFER = "buffer"  # pointer to a captured tensor
    BUFFER_STRIDE = "buffer stride"
    BUFFER_SIZE = "buffer size"
    BUFFER_GRAD = "buffer gradient"  # pointer to the gradient of a captured tensor
    BUFFER_GRAD_STRIDE = "buffer gradient stride"
    SCALAR = "scalar"  # captured number
    LENGTH = "length"  # Q_LEN, KV_LEN, Q_HEADS, BATCH, Q_OFFSET, KV_OFFSET; Q_TOTAL, KV_TOTAL, SEQUENCES
    SCALE = "scale"
    DROPOUT = "dropout"  # drop_below, keep_scale


@dataclass(frozen=True, slots=True)
class Arg:
    """One kernel argument.

    Attributes:
        name: the parameter's name in the text.
        role, of, dim: where its value comes from: `of` names the tensor, buffer, scalar or length.
        type: Triton's signature type: "*bf16", "i32", "i64", "fp32", "fp64".
        specialize: whether the compiled kernel may rely on divisibility by 16 (pointers and strides);
            lengths and users' numbers never are, so that a new value never compiles again.
    """

    name: str
    role: Role
    of: str
    dim: int | None
    type: str
    specialize: bool


class Written(enum.Enum):
    """Who wrote what an emitted line says."""

    TEMPLATE = "template"  # of flexgen
    USER = "user"  # in a mod


@dataclass(frozen=True, slots=True)
class LineOrigin:
    """What an emitted line comes from.

    Attributes:
        emitted: the line's number; lines count from 1.
        written: by whom.
        file: a template's name in `flexgen/templates`, or the path of the user's file.
        line: the number there; of a statement over several lines, the first.
    """

    emitted: int
    written: Written
    file: str
    line: int

    def __str__(self) -> str:
        place = f"{self.file}, line {self.line}"
        return place if self.written is Written.USER else f"flexgen's template {place}"


@dataclass(frozen=True, slots=True)
class SecondKernel:
    """A kernel of the same module that runs after the entry: its name, and its parameters in order."""

    entry: str
    args: tuple[Arg, ...]


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One emitted module.

    Attributes:
        text: the module's text.
        entry: name of the kernel function in it.
        args: its parameters, in order.
        line_map: where each line of the text comes from, in order.
        key: digest of mods, plan and flexgen's own sources; names the module in caches.
        second: the kernel that finishes what the entry leaves, if it takes two.
    """

    text: str
    entry: str
    args: tuple[Arg, ...]
    line_map: tuple[LineOrigin, ...]
    key: str
    second: SecondKernel | None = None

    def of_second(self) -> KernelSource:
        """Return the same module with the second kernel as its entry."""
        assert self.second is not None, f"{self.entry} has no second kernel"
        return replace(self, entry=self.second.entry, args=self.second.args, second=None)


def line_map_text(source: KernelSource) -> str:
    """Return the origin of each emitted line as JSON: one object a line, the user's file by its name alone."""
    rows = [
        {
            "line": origin.emitted,
            "from": origin.written.value,
            "file": PurePath(origin.file).name if origin.written is Written.USER else origin.file,
            "at": origin.line,
        }
        for origin in source.line_map
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"

"""Block tables that kernels derive from a mask on the device, and what they were derived from."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Axis
from flexgen.problem import TableForm
from flexgen.runtime.current import current_raw_stream
from flexgen.runtime.describe import Launch

MAX_ENTRIES = (1 << 31) - 1  # offsets into a list are int32

Lists = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The extents a table is made for.

    Attributes:
        batch, heads: the mask's own: 1 where it is the same for each.
        q_len, kv_len: queries and keys.
        device: where it lies.
    """

    batch: int
    heads: int
    q_len: int
    kv_len: int
    device: torch.device

    @classmethod
    def of(cls, axes: frozenset[Axis], launch: Launch) -> TableSizes:
        """Return the extents of a launch's table, whose rule depends on some of the axes B and H."""
        batch = launch.batch if Axis.B in axes else min(launch.batch, 1)
        heads = launch.q_heads if Axis.H in axes else min(launch.q_heads, 1)
        return cls(batch, heads, launch.q_len, launch.kv_len, launch.device)

    def blocks(self, form: TableForm, walked: Axis = Axis.KV) -> tuple[int, int]:
        """Return how many rows of blocks a (batch, head) has, and how many blocks a row."""
        q_blocks, kv_blocks = -(-self.q_len // form.q_block_size), -(-self.kv_len // form.kv_block_size)
        return (q_blocks, kv_blocks) if walked is Axis.KV else (kv_blocks, q_blocks)

    def count(self, form: TableForm) -> int:
        """Return how many blocks there are."""
        rows, columns = self.blocks(form)
        return self.batch * self.heads * rows * columns


def new_lists(
    form: TableForm, sizes: TableSizes, walked: Axis, capacity: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return lists to be filled; the indices begin with room for every block, for rows whose own list does not fit.

    Raises:
        UnsupportedProblemError: 2**31 entries or more.
    """
    rows, columns = sizes.blocks(form, walked)
    if columns + capacity > MAX_ENTRIES:
        raise UnsupportedProblemError(
            f"the block table needs {capacity} entries",
            why="a row's list is found by a 32-bit offset",
            fix="use larger blocks (BLOCK_M, BLOCK_N), or a mask that does not depend on batch and head",
        )
    axis, shape = walked.value, (sizes.batch, sizes.heads, rows)
    names = (f"{axis}_num_blocks", f"full_{axis}_num_blocks", f"{axis}_offsets")
    lists = {name: torch.empty(shape, dtype=torch.int32, device=device) for name in names}
    indices = torch.empty(columns + capacity, dtype=torch.int32, device=device)
    return lists | {f"{axis}_indices": indices}


def expanded(lists: Lists, batch: int, heads: int) -> Lists:
    """Return the lists by row expanded to a call's batch and query heads."""
    return {name: t if t.dim() == 1 else t.expand(batch, heads, -1) for name, t in lists.items()}


class MaskValues:
    """The captured tensors and numbers that a mask reads, as they were; knows whether they still are.

    A tensor counts as unchanged while it is the same object with the same memory and version, and on the CPU, while it
    holds the same. On a GPU, what writes to its memory without raising its version (its `.data`, a kernel of the
    caller's own) is not seen.
    """

    def __init__(self, buffers: Sequence[torch.Tensor], scalars: Sequence[int | float]) -> None:
        self._tensors = tuple((weakref.ref(tensor), tensor.data_ptr(), _version(tensor)) for tensor in buffers)
        self._copies = tuple(_copy_of(tensor) for tensor in buffers)
        self._scalars = tuple(scalars)
        self.can_tell = None not in [version for _, _, version in self._tensors]

    def still_hold(self, buffers: Sequence[torch.Tensor], scalars: Sequence[int | float]) -> bool:
        """Whether nothing has changed; a tensor without a version (of inference mode) is taken not to have."""
        if scalars and tuple(scalars) != self._scalars:
            return False
        for (kept, pointer, version), tensor in zip(self._tensors, buffers, strict=True):
            if kept() is not tensor or tensor.data_ptr() != pointer or _version(tensor) != version:
                return False
        for copy, tensor in zip(self._copies, buffers, strict=True):
            if copy is not None and not torch.equal(copy, tensor):
                return False
        return True


def _copy_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy where comparing with it costs little beside what is computed: on the CPU."""
    return tensor.detach().clone() if tensor.device.type == "cpu" else None


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


@dataclass(frozen=True, slots=True)
class Ready:
    """When and where a table was queued for computation: an event on a stream, by its raw handle."""

    event: torch.cuda.Event
    device: int
    stream: int

    def is_on_current_stream(self) -> bool:
        return current_raw_stream(self.device) == self.stream


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DerivedTable:
    """Which blocks each block of queries visits, as one compact list; pass it as `block_table=`.

    It holds for the Attention that made it, for calls of its extents, and while what the mask captured is unchanged.
    Of the same form is a table for the backward that lists, as `q_...`, blocks of queries for each block of keys.

    Attributes:
        form, sizes: the sides of a block, and the extents.
        lists: kv_num_blocks and full_kv_num_blocks, how many blocks of a row need the mask and how many do not;
            kv_offsets, where a row's list starts in kv_indices: first the former, then the latter, each ascending.
            int32; all but kv_indices are [B, Hq, rows].
        needed: how many blocks all rows list, int64 on the device.
        capacity: how many fit; where more are needed, the rows that do not fit visit every block with the mask.
        values: what it was derived from.
        owner: the captured mods whose mask it is.
        ready: None on the CPU.
    """

    form: TableForm
    sizes: TableSizes
    lists: Lists
    needed: torch.Tensor
    capacity: int
    values: MaskValues
    owner: object
    ready: Ready | None

    @property
    def nbytes(self) -> int:
        """Bytes of device memory that it keeps."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.lists.values()) + self.needed.element_size()

    def check(self) -> None:
        """Check that every list fits; waits for the device.

        Raises:
            UnsupportedProblemError: `max_blocks` was too small; says how many are needed.
        """
        needed = int(self.needed)
        if needed > self.capacity:
            raise UnsupportedProblemError(
                f"the block table lists {needed} blocks and was made with max_blocks={self.capacity}",
                why="rows of blocks whose list does not fit visit every block: right, but slow",
                fix=f"make it with max_blocks={needed} or more, or without max_blocks, which waits once for the size",
            )

    def current_lists(self) -> Lists:
        """Return the lists, for use on the current stream."""
        if self.ready is None:
            return self.lists
        if self.ready.is_on_current_stream():
            return self.lists
        # A capture cannot wait for what was queued outside of it; torch.cuda.graph waits for the device before it.
        if not torch.cuda.is_current_stream_capturing():
            stream = torch.cuda.current_stream(self.sizes.device)
            stream.wait_event(self.ready.event)
            for tensor in self.lists.values():
                tensor.record_stream(stream)
        return self.lists


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream records a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Raise while a CUDA graph is being captured.

    Raises:
        UnsupportedProblemError: a graph would replay the lists of today's mask, or make them again at each replay.
    """
    if is_capturing(device):
        raise UnsupportedProblemError(
            "a block table would have to be made while a CUDA graph is captured",
            why="the mask is no interval, and no table of its present values has been made yet",
            fix="before the capture, call attention.block_table(query, key) and pass the result as block_table=, "
            "or run the call once",
        )

"""Calls with DTensors: a rank computes its own batches, heads or rows, and the mods see the indices of the whole.

Sharded batches and heads need no communication; sharded rows gather key and value. Gradients of what ranks hold in
common are summed over them by DTensor itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flexgen.options import Layout
from flexgen.runtime.describe import check_tensors
from flexgen.runtime.outputs import dense_strides, memory_order
from flexgen.torch_library.distributed import is_distributed
from flexgen.torch_library.refuse import refuse

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Placements = tuple[Any, ...]  # one placement for each dimension of a mesh

_DIMS = {"bhsd": {"b": 0, "h": 1, "q_idx": 2}, "bshd": {"b": 0, "q_idx": 1, "h": 2}}
_ROWS = _DIMS["bhsd"]  # the order of logsumexp and max_scores


@dataclass(frozen=True)
class Span:
    """A rank's part of an axis."""

    start: int
    size: int


@dataclass(frozen=True)
class Share:
    """The part of a call that this rank computes.

    Attributes:
        mesh: of query, key and value.
        axes: for each dimension of the mesh, the axis that is sharded over it: "b", "h", "q_idx", or None.
        dims: where each axis is in query and output.
        batch, heads, rows: this rank's; heads are query heads.
        shape: the query's, of all ranks together.
        group: query heads of one key head.
        key_placements: of key and value, as this rank's part needs them.
    """

    mesh: Any
    axes: tuple[str | None, ...]
    dims: dict[str, int]
    batch: Span
    heads: Span
    rows: Span
    shape: tuple[int, ...]
    group: int
    key_placements: Placements

    @property
    def starts(self) -> tuple[int, int, int]:
        """The mods' b, h and q_idx of this rank's first batch, head and row."""
        return self.batch.start, self.heads.start, self.rows.start

    def tensors(self, query: Any, key: Any, value: Any) -> Tensors:
        """Return this rank's parts; what others hold of key and value is gathered where rows are sharded."""
        return _local(query, self._query_placements(), self._query_placements()), self._own(key), self._own(value)

    def buffers(self, buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return captured tensors whole; the gradient of a DTensor is summed over the ranks, each of which has a part.

        Raises:
            UnsupportedProblemError: a plain tensor requires grad, or a DTensor is on another mesh.
        """
        return [self._whole(buffer) for buffer in buffers]

    def lists(self, lists: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return a block mask's lists for this rank's batches and heads.

        Raises:
            UnsupportedProblemError: rows are sharded.
        """
        if lists and "q_idx" in self.axes:
            refuse(
                "a block mask was passed, and the query's rows are sharded",
                why="the lists are for blocks of all rows",
                fix="pass the mask_mod to flexgen.compile, without a block mask",
            )
        return [_part(_part(one, 0, self.batch), 1, self.heads) for one in lists]

    def outputs(self, output: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return output and per-row outputs ([B, Hq, Lq], or empty) as parts of what all ranks have together."""
        placements = self._query_placements()
        whole = (*self.shape[:3], output.shape[3])
        of_rows = tuple([Replicate() if axis is None else Shard(_ROWS[axis]) for axis in self.axes])
        shape = tuple([self.shape[self.dims[axis]] for axis in _ROWS])
        joined = [self._joined(one, of_rows, shape) if one.dim() == 3 else one for one in rows]
        return (self._joined(output, placements, whole), *joined)

    def _query_placements(self) -> Placements:
        return tuple([Replicate() if axis is None else Shard(self.dims[axis]) for axis in self.axes])

    def _own(self, tensor: Any) -> torch.Tensor:
        """Return this rank's part of key or value."""
        placements = self.key_placements
        if tensor.shape[0] != self.shape[0]:  # one batch for all
            placements = tuple(
                [Replicate() if axis == "b" else p for p, axis in zip(placements, self.axes, strict=True)]
            )
        pairs = zip(placements, self.axes, strict=True)
        grads = tuple([Partial() if axis is not None and p.is_replicate() else p for p, axis in pairs])
        local = _local(tensor, placements, grads)
        dim = self.dims["h"]
        if self.heads.size == self.shape[dim] or Shard(dim) in placements:
            return local
        first = self.heads.start // self.group
        last = (self.heads.start + self.heads.size - 1) // self.group
        return local.narrow(dim, first, last - first + 1)

    def _whole(self, buffer: Any) -> torch.Tensor:
        if not is_distributed(buffer):
            if buffer.requires_grad and torch.is_grad_enabled():
                refuse(
                    "a captured tensor requires grad and is no DTensor, while query, key and value are DTensors",
                    why="each rank would have only its own part of the gradient",
                    fix="make it one: torch.distributed.tensor.distribute_tensor(tensor, mesh, [Replicate()])",
                )
            return buffer  # type: ignore[no-any-return]
        if buffer.device_mesh != self.mesh:
            refuse(
                "a captured DTensor is on another mesh than the query",
                why="a gradient is summed over one mesh",
                fix="distribute both over the same mesh",
            )
        whole = tuple([Replicate() for _ in self.axes])
        return _local(buffer, whole, tuple([Replicate() if axis is None else Partial() for axis in self.axes]))

    def _joined(self, local: torch.Tensor, placements: Placements, shape: tuple[int, ...]) -> torch.Tensor:
        stride = _stride_of_whole(local, shape)
        return DTensor.from_local(local, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def share_of(query: Any, key: Any, value: Any, layout: Layout) -> Share | None:
    """Return which part of a call this rank computes; None where query, key and value are plain tensors.

    Raises:
        UnsupportedProblemError: some are DTensors and some not, they are placed in a way that is not computed, or they
            form no attention problem.
    """
    distributed = [is_distributed(tensor) for tensor in (query, key, value)]
    if not any(distributed):
        return None
    if not all(distributed):
        refuse(
            "some of query, key and value are DTensors and some are plain tensors",
            why="a plain tensor does not say which part of the whole it is",
            fix="make all of them DTensors of one mesh, or pass each rank's own parts with .to_local()",
        )
    check_tensors(query, key, value, layout)
    mesh, dims = query.device_mesh, _DIMS[layout]
    if key.device_mesh != mesh or value.device_mesh != mesh:
        refuse("query, key and value are on different meshes", why="ranks work together on one", fix="use one mesh")
    axes = _sharded_axes(query, dims)
    spans = {axis: _own_span(query.shape[dim], mesh, axes, axis) for axis, dim in dims.items()}
    q_heads, kv_heads = query.shape[dims["h"]], key.shape[dims["h"]]
    group = q_heads // kv_heads if kv_heads else 1
    _check_groups(mesh, axes, q_heads, group)
    return Share(
        mesh=mesh,
        axes=axes,
        dims=dims,
        batch=spans["b"],
        heads=spans["h"],
        rows=spans["q_idx"],
        shape=tuple(query.shape),
        group=group,
        key_placements=_key_placements(axes, dims, mesh, q_heads, kv_heads),
    )


def _sharded_axes(query: Any, dims: dict[str, int]) -> tuple[str | None, ...]:
    names = {dim: axis for axis, dim in dims.items()}
    axes: list[str | None] = []
    for placement in query.placements:
        if placement.is_replicate():
            axes.append(None)
        elif type(placement) is Shard and placement.dim in names:  # and no strided one
            axes.append(names[placement.dim])
        else:
            refuse(
                f"the query is placed as {placement} on a mesh",
                why="ranks can share out batches, heads and rows, and nothing else",
                fix="redistribute it to Shard(dim of the batch, heads or rows) or Replicate() first",
            )
    return tuple(axes)


def _own_span(size: int, mesh: Any, axes: tuple[str | None, ...], axis: str) -> Span:
    """Return this rank's part of an axis, cut in the order of the mesh's dimensions."""
    coordinate, span = mesh.get_coordinate(), Span(0, size)
    for number, sharded in enumerate(axes):
        if sharded == axis:
            span = _cut(span, mesh.size(number), coordinate[number])
    return span


def _cut(span: Span, parts: int, at: int) -> Span:
    """Return one of the parts into which torch.chunk cuts a span; the last ones may be short or empty."""
    chunk = -(-span.size // parts)
    first = min(chunk * at, span.size)
    return Span(span.start + first, min(chunk, span.size - first))


def _key_placements(
    axes: tuple[str | None, ...], dims: dict[str, int], mesh: Any, q_heads: int, kv_heads: int
) -> Placements:
    """Return how key and value must be placed: sharded as the query where that keeps a key head with its group."""
    parts = 1
    for number, axis in enumerate(axes):
        parts *= mesh.size(number) if axis == "h" else 1
    follows = {"b": True, "h": q_heads == kv_heads or kv_heads % parts == 0, "q_idx": False}
    return tuple([Shard(dims[axis]) if axis is not None and follows[axis] else Replicate() for axis in axes])


def _check_groups(mesh: Any, axes: tuple[str | None, ...], q_heads: int, group: int) -> None:
    """Refuse, on all ranks alike, a rank's heads that are neither whole groups nor inside of one."""
    spans = [Span(0, q_heads)]
    for number, axis in enumerate(axes):
        if axis == "h":
            parts = mesh.size(number)
            spans = [_cut(span, parts, at) for span in spans for at in range(parts)]
    for span in spans:
        last = span.start + span.size - 1
        whole = span.start % group == 0 and span.size % group == 0
        if not whole and span.size and span.start // group != last // group:
            refuse(
                f"a rank has query heads {span.start} to {last}, and {group} query heads share a key head",
                why="the heads of a rank must be whole groups, or lie inside of one",
                fix="shard the heads over a number of ranks that divides the key heads, or is a multiple of them",
            )


def _local(tensor: Any, placements: Placements, grad_placements: Placements) -> torch.Tensor:
    """Return this rank's part under placements; a gradient comes back under the tensor's own."""
    placed = tensor.redistribute(tensor.device_mesh, placements)
    return placed.to_local(grad_placements=grad_placements)  # type: ignore[no-any-return]


def _part(tensor: torch.Tensor | None, dim: int, span: Span) -> torch.Tensor | None:
    if tensor is None or tensor.shape[dim] == 1:
        return tensor
    return tensor.narrow(dim, span.start, span.size)


def _stride_of_whole(local: torch.Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a dense tensor of another shape whose dimensions lie in the same order in memory."""
    order = memory_order(local) if len(shape) == 4 else range(len(shape))
    return dense_strides(shape, order)

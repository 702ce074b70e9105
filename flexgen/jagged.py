"""Nested tensors of the jagged layout, which are packed sequences with their offsets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from flexgen.aux_outputs import AuxOutput
from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.options import Layout
from flexgen.runtime.packing import Packing

RAGGED_DIM: dict[Layout, Literal[1, 2]] = {"bhsd": 2, "bshd": 1}
_LSE_RAGGED_DIM = 2  # of [B, Hq, Lq]


@dataclass(frozen=True, slots=True)
class Jagged:
    """A call's nested tensors, taken apart.

    Attributes:
        tensors: query, key and value, packed along the length in a batch of 1, in the call's layout; gradients flow
            from them to the nested ones.
        packing: where their sequences begin.
        layout: the call's.
    """

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    packing: Packing
    layout: Layout

    def nested(self, result: Any) -> Any:
        """Return a call's result with nested tensors, of the query's ragged structure, in place of packed ones."""
        if not isinstance(result, tuple):
            return self._nest(result, RAGGED_DIM[self.layout])
        output, aux = result
        lse, max_scores = (
            None if rows is None else self._nest(rows, _LSE_RAGGED_DIM) for rows in (aux.lse, aux.max_scores)
        )
        return self._nest(output, RAGGED_DIM[self.layout]), AuxOutput(lse, max_scores)

    def _nest(self, packed: torch.Tensor, ragged_dim: int) -> torch.Tensor:
        offsets = self.packing.cu_seqlens_q
        return torch.nested.nested_tensor_from_jagged(packed.squeeze(0), offsets, jagged_dim=ragged_dim)


def is_nested(*tensors: Any) -> bool:
    """Whether one of them is a nested tensor."""
    return any([getattr(tensor, "is_nested", False) for tensor in tensors])  # noqa: C419 (faster)


def read_jagged(query: Any, key: Any, value: Any, layout: Layout, packing: Packing | None) -> Jagged:
    """Take a call's nested tensors apart.

    Args:
        packing: what the call says of packed sequences beside them; must be None.

    Raises:
        ProblemTypeError: some are not nested, or of another kind.
        UnsupportedProblemError: their ragged structures do not go together.
    """
    named = {"query": query, "key": key, "value": value}
    if packing is not None:
        raise UnsupportedProblemError(
            "nested tensors and cu_seqlens were both given",
            why="nested tensors bring the offsets of their sequences along",
            fix="leave cu_seqlens out, or pass the packed tensors themselves",
        )
    for name, tensor in named.items():
        _check_kind(name, tensor)
    for name, tensor in named.items():
        _check_form(name, tensor, layout)
    if value.offsets() is not key.offsets():
        raise UnsupportedProblemError(
            f"key and value have different ragged structures: key {_shape(key)}, value {_shape(value)}",
            why="they describe the same keys, and whether separate offsets agree shows on the device alone",
            fix="make value with key's offsets: torch.nested.nested_tensor_from_jagged(values, key.offsets())",
        )
    if query.shape[0] != key.shape[0]:
        raise UnsupportedProblemError(
            f"query holds {query.shape[0]} sequences and key {key.shape[0]}",
            fix="give both the same number of sequences; empty ones are fine",
        )
    same = key.offsets() is query.offsets()
    tensors = (query.values().unsqueeze(0), key.values().unsqueeze(0), value.values().unsqueeze(0))
    return Jagged(tensors, Packing(query.offsets(), None if same else key.offsets()), layout)


def _check_kind(name: str, tensor: Any) -> None:
    if not is_nested(tensor):
        raise ProblemTypeError(
            f"{name} is not a nested tensor, and others of query, key and value are",
            why="each sequence of the one needs its own of the other",
            fix="pass all three as nested tensors with layout=torch.jagged, or none",
        )
    if tensor.layout is not torch.jagged:
        raise ProblemTypeError(
            f"{name} is a nested tensor of the layout {str(tensor.layout).removeprefix('torch.')}",
            why="only jagged ones say where their sequences begin on the device",
            fix="make it with layout=torch.jagged, or torch.nested.as_nested_tensor(tensors, layout=torch.jagged)",
        )


def _check_form(name: str, tensor: Any, layout: Layout) -> None:
    order = "[B, H, j, D]" if layout == "bhsd" else "[B, j, H, D]"
    if tensor.dim() != 4 or tensor._ragged_idx != RAGGED_DIM[layout]:
        raise UnsupportedProblemError(
            f"{name} has shape {_shape(tensor)}",
            why=f"layout {layout!r} takes nested tensors of shape {order}, ragged along the length",
            fix="move the dimensions with transpose(1, 2), or compile with the other options={'layout': ...}",
        )
    if tensor.lengths() is not None:
        raise UnsupportedProblemError(
            f"{name} is a nested tensor with holes: it has lengths beside its offsets",
            why="packed sequences follow one another without a gap",
            fix=f"close the gaps with {name}.contiguous()",
        )


def _shape(tensor: Any) -> str:
    return f"[{', '.join(map(str, tensor.shape))}]"

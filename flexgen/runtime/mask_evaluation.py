"""Evaluate a mask_mod or score_mod on ranges of indices with torch's own operations."""

from __future__ import annotations

import linecache
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from flexgen.errors import CaptureError, FlexgenError, SourceSpan, first_line

Mod: TypeAlias = Callable[..., torch.Tensor]

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_INDEX_AXES = (3, 2, 1, 0)  # innermost first: kv_idx, q_idx, h, b


@dataclass(frozen=True, slots=True)
class IndexBox:
    """The index ranges of one tile of a mask, each a range over b, h, q_idx or kv_idx."""

    b: range
    h: range
    q_idx: range
    kv_idx: range

    def tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Return the four index vectors, int64."""
        axes = (self.b, self.h, self.q_idx, self.kv_idx)
        return [torch.arange(axis.start, axis.stop, device=device) for axis in axes]


class BoxMask(Protocol):
    """A mask that can be evaluated on a box of indices."""

    def on(self, box: IndexBox, device: torch.device) -> torch.Tensor:
        """Return what the mask allows in the box: bool [len(b), len(h), len(q_idx), len(kv_idx)]."""

    def batch_and_head_matter(self, device: torch.device) -> tuple[bool, bool]:
        """Return whether the mask's value depends on b, and on h."""


@dataclass(frozen=True, slots=True)
class CalledMask:
    """A BoxMask that calls a mask_mod."""

    mask_mod: Mod

    def on(self, box: IndexBox, device: torch.device) -> torch.Tensor:
        return evaluate_mask(self.mask_mod, box, device)

    def batch_and_head_matter(self, device: torch.device) -> tuple[bool, bool]:
        return batch_and_head_matter(self.mask_mod, device)


def evaluate_mask(mask_mod: Mod, box: IndexBox, device: torch.device) -> torch.Tensor:
    """Return what mask_mod allows in the box: bool [len(b), len(h), len(q_idx), len(kv_idx)].

    An axis the mask does not depend on is an expanded view, so it costs no memory.

    Raises:
        CaptureError: mask_mod raised, branched on an index, or did not return one bool.
    """
    return _map_over_indices(_returning_one_bool(mask_mod), box.tensors(device))


def evaluate_score(score_mod: Mod, box: IndexBox, device: torch.device) -> torch.Tensor:
    """Return score_mod of score 0 in the box: [len(b), len(h), len(q_idx), len(kv_idx)].

    Raises:
        CaptureError: score_mod raised or branched on a value.
    """
    zero = torch.zeros((), device=device)
    modified = _returning_a_tensor(score_mod)
    return _map_over_indices(lambda *indices: modified(zero, *indices), box.tensors(device))


def modify_scores(score_mod: Mod, scores: torch.Tensor, box: IndexBox) -> torch.Tensor:
    """Return score_mod of `scores` [len(b), len(h), len(q_idx), len(kv_idx)], in whatever dtype it returns.

    Raises:
        CaptureError: score_mod raised or branched on a value.
    """
    return _map_over_indices(_returning_a_tensor(score_mod), box.tensors(scores.device), scores)


def batch_and_head_matter(mask_mod: Mod, device: torch.device) -> tuple[bool, bool]:
    """Return whether the mask's value depends on b, and on h.

    torch.vmap follows the flow of data: it returns an expanded view along an axis that never reached the result.
    """
    twice = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(4)]
    allowed = _map_over_indices(_returning_one_bool(mask_mod), twice)
    return allowed.stride(0) != 0, allowed.stride(1) != 0


class _GatherOnTensorIndex(TorchFunctionMode):
    """Reads `table[q_idx]` as a gather: a 0-d index would otherwise be turned into a Python number."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            gather = _gather_indices(table, index if isinstance(index, tuple) else (index,))
            if gather is not None:
                return torch.ops.aten.index.Tensor(table, gather)
        return func(*args, **(kwargs or {}))


def _gather_indices(table: torch.Tensor, index: tuple[Any, ...]) -> list[torch.Tensor | None] | None:
    """Return the operands of aten.index for this subscript, or None where plain indexing means the same."""
    if not any(isinstance(item, torch.Tensor) for item in index):
        return None
    if any(item is Ellipsis for item in index):
        at = next(place for place, item in enumerate(index) if item is Ellipsis)
        missing = table.dim() - (len(index) - 1)
        index = index[:at] + (slice(None),) * missing + index[at + 1 :]
    operands: list[torch.Tensor | None] = []
    for item in index:
        match item:
            case torch.Tensor():
                operands.append(item)
            case int():
                operands.append(torch.full((), item, device=table.device))  # no copy from the host: see CUDA graphs
            case slice(start=None, stop=None, step=None):
                operands.append(None)
            case _:
                return None
    return operands


def _map_over_indices(mod: Mod, indices: list[torch.Tensor], *scores: torch.Tensor) -> torch.Tensor:
    """Call `mod` on 0-d indices, and on the score there if `scores` holds one for each, mapped over every axis."""
    mapped: Callable[..., Any] = mod
    for axis in _INDEX_AXES:
        places = (*(0 for _ in scores), *(0 if axis == other else None for other in range(4)))
        mapped = torch.vmap(mapped, in_dims=places)
    try:
        with torch.no_grad(), _GatherOnTensorIndex():
            result: torch.Tensor = mapped(*scores, *indices)
    except (FlexgenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise _located(error) from error
    return result


def _returning_a_tensor(score_mod: Mod) -> Mod:
    """Let a score_mod return a number, which torch.vmap does not take."""

    def modified(score: torch.Tensor, *indices: torch.Tensor) -> Any:
        returned: Any = score_mod(score, *indices)
        if isinstance(returned, bool | int | float | np.generic):
            return torch.full((), float(returned), dtype=score.dtype, device=score.device)
        return returned

    return modified


def _returning_one_bool(mask_mod: Mod) -> Mod:
    def checked(*indices: torch.Tensor) -> torch.Tensor:
        allowed: Any = mask_mod(*indices)
        if isinstance(allowed, bool | np.bool_):
            return torch.full((), bool(allowed), device=indices[0].device)
        if isinstance(allowed, torch.Tensor) and allowed.dtype == torch.bool and allowed.dim() == 0:
            return allowed
        raise CaptureError(
            f"mask_mod returned {_describe(allowed)}, not one bool",
            why="a mask_mod says of one query and one key whether they may attend",
            fix="return a comparison of the indices, such as `q_idx >= kv_idx`",
        )

    return checked


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {value.dtype} tensor of {value.dim()} dimensions"


def _located(error: Exception) -> CaptureError:
    """Return the error a mod raised, at the user's innermost line."""
    summary = first_line(error)
    branched = "data-dependent control flow" in summary
    return CaptureError(
        "the mod branches on a traced value" if branched else f"the mod raised {type(error).__name__}",
        where=_users_place(error),
        why="an index stands for many at once, so Python cannot take one branch" if branched else summary,
        fix="use torch.where for `if`, and `&`, `|`, `~` for `and`, `or`, `not`" if branched else None,
    )


def _users_place(error: Exception) -> SourceSpan | None:
    """Return the innermost line of the traceback that belongs neither to torch nor to flexgen."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_LIBRARIES) and frame.lineno is not None:
            text = linecache.getline(frame.filename, frame.lineno).rstrip()
            end_line, end_column = frame.end_lineno or frame.lineno, frame.end_colno or len(text)
            return SourceSpan(frame.filename, frame.lineno, frame.colno or 0, end_line, end_column, text)
    return None

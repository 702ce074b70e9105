"""Masks and block masks made inside a region that torch.compile traces: one operator each, which evaluates the mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.block_states import BlockStates
from flexgen.capture.live import Reading
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Axis, Mods, Scalar
from flexgen.runtime.mask_counts import MaskGrid
from flexgen.runtime.mask_evaluation import IndexBox
from flexgen.torch_library.spec import captured_of
from flexgen.torch_library.traced import operands_of

_INDICES = ("b", "h", "q_idx", "kv_idx")

_states = BlockStates()


def traced_states(mask_mod: Any, grid: MaskGrid, device: torch.device) -> torch.Tensor:
    """Return the state of each block, int8 [B, H, q blocks, kv blocks]: 0 no pair is live, 2 all are, 1 some are."""
    operands = operands_of(None, mask_mod)
    sizes = [grid.batch, grid.heads, grid.query_length, grid.key_length, grid.q_block_size, grid.kv_block_size]
    captured = (operands.buffers, operands.integers, operands.floats)
    return torch.ops.flexgen.block_states(*captured, sizes, device, operands.spec)  # type: ignore[no-any-return]


def traced_mask(mod: Any, shape: Sequence[int], device: torch.device, *, scores: bool) -> torch.Tensor:
    """Return the whole mask of a mask_mod, or of a score_mod where `scores`, bool of the shape [B, H, Q, KV]."""
    operands = operands_of(mod, None) if scores else operands_of(None, mod)
    captured = (operands.buffers, operands.integers, operands.floats)
    return torch.ops.flexgen.mask(*captured, list(shape), device, operands.spec)  # type: ignore[no-any-return]


def run_block_states(
    buffers: list[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    sizes: Sequence[int],
    device: torch.device,
    spec: str,
) -> torch.Tensor:
    """Evaluate the mask of a text block by block; see `traced_states`."""
    captured = captured_of(spec, torch.float32, buffers)
    scalars = _in_order(captured.mods.scalars, integers, floats)
    evaluated = _Mask(captured.mods, tuple(buffers), scalars)
    reading = Reading(captured, tuple(buffers), scalars)
    return _states.exact(reading, evaluated, MaskGrid(*sizes), device).contiguous()


def run_mask(
    buffers: list[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    shape: Sequence[int],
    device: torch.device,
    spec: str,
) -> torch.Tensor:
    """Evaluate the mask of a text everywhere; see `traced_mask`."""
    if 0 in shape:
        return torch.zeros(list(shape), dtype=torch.bool, device=device)
    mods = captured_of(spec, torch.float32, buffers).mods
    mask = _Mask(mods, tuple(buffers), _in_order(mods.scalars, integers, floats))
    return mask.on(IndexBox(*map(range, shape)), device).contiguous()


def _in_order(declared: Sequence[Scalar], integers: Sequence[int], floats: Sequence[float]) -> tuple[int | float, ...]:
    whole, broken = iter(integers), iter(floats)
    return tuple(next(broken if scalar.dtype.is_floating_point else whole) for scalar in declared)


@dataclass(frozen=True, slots=True)
class _Mask:
    """A BoxMask computed from the one graph of `mods`: inside of an operator, torch.vmap over a mod does not work.

    Of a score_mod, the mask is where a score of 0 does not become -inf.
    """

    mods: Mods
    buffers: tuple[torch.Tensor, ...]
    scalars: tuple[int | float, ...]

    def on(self, box: IndexBox, device: torch.device) -> torch.Tensor:
        """Return what the mask allows in the box; see `BoxMask`."""
        (graph,) = self.mods.graphs()
        indices = [
            index.view([-1 if axis == at else 1 for axis in range(4)]) for at, index in enumerate(box.tensors(device))
        ]
        inputs = {"score": torch.zeros((), device=device), **dict(zip(_INDICES, indices, strict=True))}
        named = dict(zip((buffer.name for buffer in self.mods.buffers), self.buffers, strict=True))
        numbers = dict(zip((scalar.name for scalar in self.mods.scalars), self.scalars, strict=True))
        found = evaluate(graph, inputs, named, numbers)
        allowed = found if graph.kind == "mask" else ~torch.isneginf(found)
        return allowed.to(device).expand([index.numel() for index in indices])

    def batch_and_head_matter(self, device: torch.device) -> tuple[bool, bool]:
        """Return whether the mask's value depends on b, and on h."""
        (graph,) = self.mods.graphs()
        return Axis.B in graph.root.axes, Axis.H in graph.root.axes

"""Evaluates a block rule on torch tensors, beside the mask itself on a whole small grid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Axis, Graph, Node
from flexgen.lowering.blocks import BlockRule
from tests.analysis.brute_force import Grid


@dataclass(frozen=True)
class Blocks:
    """Which blocks, [B, H, rows, columns], are listed, and which as full; and what an oracle would list.

    Attributes:
        live, whole: blocks that hold a live pair, and those of which all pairs are live.
    """

    listed: Tensor
    full: Tensor
    live: Tensor
    whole: Tensor

    def check(self) -> None:
        """Fail where a live block is not listed, or one with a masked pair is listed as full."""
        assert not (self.live & ~self.listed).any(), "a block with a live pair is not listed"
        assert not (self.full & ~self.whole).any(), "a block with a masked pair is listed as full"

    @property
    def ratio(self) -> float:
        """Blocks visited for each block that has to be."""
        return int(self.listed.sum()) / max(int(self.live.sum()), 1)


def blocks_of(rule: BlockRule, mask: Node, grid: Grid, q_size: int, kv_size: int) -> Blocks:
    """Classify every block of a grid by the rule, and by the mask itself."""
    inputs = _corners(grid, q_size, kv_size)
    for leaf in rule.leaves:
        size, dim = (q_size, 2) if leaf.axis is Axis.Q else (kv_size, 3)
        values = grid.value(leaf.node)
        values = values.reshape((1,) * (4 - values.dim()) + values.shape)
        chunks = values.split(size, dim)
        if leaf.node.dtype == torch.bool:
            ends = [chunk.all(dim, True) for chunk in chunks], [chunk.any(dim, True) for chunk in chunks]
        else:
            ends = [chunk.amin(dim, True) for chunk in chunks], [chunk.amax(dim, True) for chunk in chunks]
        inputs |= {
            str(node.attr): torch.cat(end, dim) for node, end in zip((leaf.least, leaf.greatest), ends, strict=True)
        }
    rows, columns = -(-grid.q_len // q_size), -(-grid.kv_len // kv_size)
    shape = (grid.batches, grid.heads, rows, columns)

    def value(node: Node) -> Tensor:
        return evaluate(Graph("mask", "rule", node), inputs, grid.buffers, grid.scalars).expand(shape)

    live, whole = by_brute_force(grid.mask(mask), q_size, kv_size)
    listed = value(rule.may_live)
    return Blocks(listed, listed & value(rule.all_live), live, whole)


def by_brute_force(mask: Tensor, q_size: int, kv_size: int) -> tuple[Tensor, Tensor]:
    """Return which blocks of bool [B, H, Q, KV] hold a live pair, and which nothing else."""
    live, whole = mask, mask
    for dim, size in ((2, q_size), (3, kv_size)):
        live = torch.cat([chunk.any(dim, True) for chunk in live.split(size, dim)], dim)
        whole = torch.cat([chunk.all(dim, True) for chunk in whole.split(size, dim)], dim)
    return live, whole


def _corners(grid: Grid, q_size: int, kv_size: int) -> dict[str, Tensor]:
    inputs = grid.inputs()
    for name, length, size, dim in (("q", grid.q_len, q_size, 2), ("kv", grid.kv_len, kv_size, 3)):
        shape = [-1 if place == dim else 1 for place in range(4)]
        lo = torch.arange(0, length, size)
        inputs[f"{name}_lo"] = lo.reshape(shape)
        inputs[f"{name}_hi"] = (lo + size - 1).clamp(max=length - 1).reshape(shape)
    return inputs

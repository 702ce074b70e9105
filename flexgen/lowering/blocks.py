"""The rule by which blocks of a mask are classified: when one may hold a live pair, and when all its pairs are live."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.ir.graph import Axis, Graph, Node, topological
from flexgen.ir.origins import Origins
from flexgen.lowering.block_evaluator import BlockEvaluator, Leaf
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.intervals import Unsolved
from flexgen.lowering.ranges import Range, RangeAnalysis
from flexgen.lowering.symbols import FALSE, TRUE, Algebra, is_small

# Run-time integers for which the rule is derived; a launch with greater ones takes no table.
SCALAR_RANGE = Range(-(2**48), 2**48)
_MAX_RULE_SIZE = 800


@dataclass(frozen=True, slots=True)
class BlockRule:
    """When a block of a mask may hold a live pair, and when it is live as a whole.

    Both are bool expressions over the block's corners (`q_lo`, `q_hi`, `kv_lo`, `kv_hi`, all included), the leaves'
    extremes, `b`, `h` and captured values. Both are sound: a block is empty where `may_live` is false, full where
    `all_live` is true, and may be anything otherwise.

    Attributes:
        leaves: the one-axis expressions whose extremes per block the rule reads.
        axes: which of B and H the rule depends on.
        mask_axes: which of B and H the mask depends on, perhaps in a part that the rule leaves out.
        unsolved: parts of the mask whose blocks were not classified, and why.
    """

    may_live: Node
    all_live: Node
    leaves: tuple[Leaf, ...]
    axes: frozenset[Axis]
    mask_axes: frozenset[Axis]
    unsolved: tuple[Unsolved, ...]

    @property
    def tells_nothing(self) -> bool:
        """Whether every block would be listed as partial."""
        return self.may_live is TRUE and self.all_live is FALSE

    def describe(self) -> list[tuple[str, str]]:
        """Return the rule for people, as labelled lines."""
        lines = [
            ("listed", f"where {expression_text(self.may_live)}"),
            ("full", f"where also {expression_text(self.all_live)}"),
        ]
        lines += [("leaf", f"{leaf.name} = {expression_text(leaf.node)}") for leaf in self.leaves]
        return lines + [("unsolved", f"{expression_text(part.node)}: {part.why}") for part in self.unsolved]

    def leaves_of(self, axis: Axis) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.axis is axis)


def block_rule(mask: Graph, origins: Origins | None = None) -> BlockRule:
    """Derive the rule of a mask from its structure."""
    integers = (str(n.attr) for n in mask.nodes() if n.op == "scalar" and n.dtype == torch.int64)
    ranges = RangeAnalysis({name: SCALAR_RANGE for name in integers if ".size(" not in name})
    algebra = Algebra(ranges)
    taken = {*(buffer.name for buffer in mask.buffers), *(scalar.name for scalar in mask.scalars)}
    evaluator = BlockEvaluator(algebra, taken, origins)
    found = evaluator.condition(algebra.rebuild(mask.root))
    may_live = found.hi if is_small(found.hi, _MAX_RULE_SIZE) else TRUE
    all_live = found.lo if is_small(found.lo, _MAX_RULE_SIZE) else FALSE
    used = set(topological(may_live, all_live))
    leaves = tuple(leaf for leaf in evaluator.leaves if leaf.least in used or leaf.greatest in used)
    depends = may_live.axes.union(all_live.axes, *(leaf.node.axes for leaf in leaves))
    heads = frozenset({Axis.B, Axis.H})
    unsolved = tuple(evaluator.unsolved)
    return BlockRule(may_live, all_live, leaves, depends & heads, mask.root.axes & heads, unsolved)

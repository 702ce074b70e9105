"""The backward stage's value: the gradients of a score mod, as expressions over what the mod reads and `grad`."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexgen.ir.graph import ALL_AXES, Axis, Node, topological
from flexgen.ir.origins import Origins

# What the expressions read: the inputs of a score mod, and the gradient of the loss in what the mod returned.
GRAD_INPUTS = ("score", "grad", "b", "h", "q_idx", "kv_idx")


@dataclass(frozen=True, slots=True)
class Scatter:
    """The gradient that one place of the mod adds to one element of a captured buffer.

    Attributes:
        buffer: the buffer's name.
        indices: one integer a dimension, as those of a `load`: a place outside of the buffer adds nothing. Different
            (b, h, q, kv) may meet in one element.
        value: float32, or float64 for a float64 buffer; `grad` is included.
    """

    buffer: str
    indices: tuple[Node, ...]
    value: Node

    @property
    def axes(self) -> frozenset[Axis]:
        """The axes that the element depends on."""
        return frozenset[Axis]().union(*(index.axes for index in self.indices))

    @property
    def reduced(self) -> frozenset[Axis]:
        """The axes over which values are summed into one element whatever the indices are."""
        return ALL_AXES - self.axes


@dataclass(frozen=True, slots=True)
class ScoreGrad:
    """The gradients of a score mod.

    Attributes:
        dscore: gradient of the loss in the raw score; `grad` is included. float32, or float64 for a float64 score.
        scatters: gradients in captured buffers, in the order in which the graph declares them; a buffer has one for
            each place it is read at, and none where no gradient reaches it.
        origins: the user's lines that the expressions are derivatives of.
    """

    dscore: Node
    scatters: tuple[Scatter, ...] = ()
    origins: Origins = field(default_factory=Origins, compare=False, repr=False)

    @property
    def roots(self) -> tuple[Node, ...]:
        """All expressions: dscore, then indices and value of each scatter."""
        return (self.dscore, *(node for scatter in self.scatters for node in (*scatter.indices, scatter.value)))

    @property
    def is_identity(self) -> bool:
        """Whether the gradient in the raw score is `grad` itself."""
        return self.dscore.op == "input" and self.dscore.attr == "grad"

    @property
    def is_zero(self) -> bool:
        """Whether no gradient reaches the score: the mod returns a table's entry, a position, a rounded score."""
        return self.dscore.op == "const" and self.dscore.attr == 0.0

    @property
    def is_linear(self) -> bool:
        """Whether dscore is `grad` times something that does not depend on the score."""
        return not _reads_score(self.dscore)

    @property
    def needs_score(self) -> bool:
        """Whether any gradient depends on the score itself."""
        return _reads_score(*self.roots)


def _reads_score(*roots: Node) -> bool:
    return any(node.op == "input" and node.attr == "score" for node in topological(*roots))

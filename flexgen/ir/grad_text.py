"""The readable text of a score mod's gradients, in the user's names.

grad softcap_bias(score, grad, b, h, q_idx, kv_idx)   buffers: bias float32[*](1) grad
  # capped = 20 * torch.tanh(score / 20)
  v1 = tanh(div(score, 20.0))   float32  {b, h, q, kv}
  dscore = mul(grad, sub(1.0, mul(v1, v1)))   float32  {b, h, q, kv}
  scatter bias[kv_idx] += grad   reduced over {b, h, q}
"""

from __future__ import annotations

from flexgen.ir.graph import Graph, Node
from flexgen.ir.origins import Origins
from flexgen.ir.score_grad import GRAD_INPUTS, Scatter, ScoreGrad
from flexgen.ir.text import LONGEST_NESTED, GraphPrinter, print_axes, print_name


def print_score_grad(grad: ScoreGrad, graph: Graph, origins: Origins | None = None) -> str:
    """Return the text of the gradients of a graph's mod, ending in a newline.

    Args:
        grad: the gradients.
        graph: the graph they are gradients of: its name and declarations.
        origins: the user's names and lines, if others than those that the gradients carry.
    """
    return _GradPrinter(grad, graph, origins or grad.origins).text()


class _GradPrinter(GraphPrinter):
    """Prints the gradients as a graph with several results."""

    def __init__(self, grad: ScoreGrad, graph: Graph, origins: Origins) -> None:
        super().__init__(graph, origins, grad.roots)
        self._grad = grad
        self._names.unique("dscore")

    def text(self) -> str:
        self._print_header("grad", GRAD_INPUTS)
        self._print_inner_values()
        self._print_root("dscore = ", self._grad.dscore)
        for scatter in self._grad.scatters:
            self._print_scatter(scatter)
        return "\n".join(self._lines) + "\n"

    def _print_scatter(self, scatter: Scatter) -> None:
        indices = ", ".join(map(self._inline, scatter.indices))
        note = f"   reduced over {print_axes(scatter.reduced)}" if scatter.reduced else ""
        self._print_root(f"scatter {print_name(scatter.buffer)}[{indices}] += ", scatter.value, note)

    def _inline(self, index: Node) -> str:
        if index not in self._texts:
            self._texts[index] = self._call(index, LONGEST_NESTED)
        return self._texts[index]

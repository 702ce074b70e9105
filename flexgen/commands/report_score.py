"""What a score_mod does, as plots: its curve over the score, and what it adds over distances or positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.commands.arguments import Shape as Sizes
from flexgen.commands.report_plot import (
    Plot,
    Shape,
    Tick,
    line_path,
    linear_ticks,
    number_text,
    padded,
    x_scale,
    y_scale,
)
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Axis, Graph, topological

_SCORES = 30.0  # scores of a curve lie between this and its negative
_POINTS = 241
_CELLS = 64  # a side of a heat map
_MAP_HEIGHT = 480
_LEVELS = 8  # of its colour, for each sign
_MOST_CURVES = 4  # heads, in one plot
_ROUNDING = 8 * torch.finfo(torch.float32).eps  # of a few operations of a mod, over their largest value


@dataclass(frozen=True, slots=True)
class ScoreSubject:
    """A captured score_mod and what it needs to be evaluated."""

    graph: Graph
    sizes: Sizes
    head: int
    batch: int
    buffers: Mapping[str, Tensor]
    scalars: Mapping[str, int | float]

    def values(self, score: Tensor, q_idx: Tensor, kv_idx: Tensor, head: int | None = None) -> Tensor:
        """Return the modified score, float64, of the broadcast shape of score, q_idx and kv_idx."""
        shape = (score + q_idx + kv_idx).shape
        score, q_idx, kv_idx = (tensor.expand(shape) for tensor in (score, q_idx, kv_idx))
        place = {"b": self.batch, "h": self.head if head is None else head}
        inputs = {name: torch.tensor(value) for name, value in place.items()}
        inputs |= {"score": score.double(), "q_idx": q_idx, "kv_idx": kv_idx}
        return evaluate(self.graph, inputs, self.buffers, self.scalars).double().expand(shape)


def score_plots(subject: ScoreSubject) -> tuple[Plot, ...]:
    """Return the plots that tell a score_mod: at least one."""
    plots = []
    if _changes_with_score(subject):
        plots.append(_curve(subject))
    if _axes_beside_score(subject.graph) & {Axis.Q, Axis.KV}:
        plots.append(_over_distance(subject) if _is_of_distance(subject) else _over_positions(subject))
    return tuple(plots) or (_curve(subject),)


def _axes_beside_score(graph: Graph) -> frozenset[Axis]:
    inputs = [node for node in topological(graph.root) if node.op == "input" and node.attr != "score"]
    return frozenset[Axis]().union(*(node.axes for node in inputs))


def _middle(subject: ScoreSubject) -> tuple[Tensor, Tensor]:
    """A pair in the middle of the last query's keys, which most masks let through."""
    return torch.tensor(subject.sizes.Lq - 1), torch.tensor(max(subject.sizes.Lk - 1, 0) // 2)


def _changes_with_score(subject: ScoreSubject) -> bool:
    """Whether more is done to a score than to add to it."""
    scores = torch.linspace(-_SCORES, _SCORES, _POINTS, dtype=torch.float64)
    added = subject.values(scores, *_middle(subject)) - scores
    return not bool(torch.allclose(added, added[:1].expand_as(added), atol=_ROUNDING * _SCORES, equal_nan=True))


def _curve(subject: ScoreSubject) -> Plot:
    scores = torch.linspace(-_SCORES, _SCORES, _POINTS, dtype=torch.float64)
    q_idx, kv_idx = _middle(subject)
    values = subject.values(scores, q_idx, kv_idx).tolist()
    x, y = x_scale(-_SCORES, _SCORES), y_scale(*padded([*values, -_SCORES / 3, _SCORES / 3]))
    points = list(zip(scores.tolist(), values, strict=True))
    same = [(at, at) for at in scores.tolist() if y.low <= at <= y.high]
    where = f"q_idx = {int(q_idx)}, kv_idx = {int(kv_idx)}, head {subject.head}"
    return Plot(
        title="What becomes of a score",
        caption=f"At {where}." if _axes_beside_score(subject.graph) else "The same at every position.",
        summary=f"Curve of the modified score for raw scores from {-_SCORES:g} to {_SCORES:g}: "
        f"from {number_text(values[0])} to {number_text(values[-1])}.",
        x_label="score",
        y_label="modified score",
        x_ticks=linear_ticks(x),
        y_ticks=linear_ticks(y),
        shapes=(Shape(line_path(same, x, y), "guide", "unchanged"), Shape(line_path(points, x, y), "curve a")),
        legend=(("curve a", "score_mod"), ("guide", "unchanged")),
    )


def _samples(length: int, count: int) -> Tensor:
    """Positions from 0 on, evenly spaced, at most `count`."""
    step = max(1, -(-length // count))
    return torch.arange(0, length, step)


def _is_of_distance(subject: ScoreSubject) -> bool:
    """Whether what is added depends on kv_idx - q_idx alone, at positions spread over the whole."""
    sizes = subject.sizes
    length = min(sizes.Lq, sizes.Lk)
    positions = _samples(length, 48)
    added = subject.values(torch.zeros(()), positions[:, None], positions[None, :])
    finite = added[added.isfinite()]
    rounding = _ROUNDING * float(finite.abs().max()) if finite.numel() else 0.0
    for offset in range(1 - len(positions), len(positions)):
        along = added.diagonal(offset)
        if not torch.allclose(along, along[:1].expand_as(along), atol=rounding, equal_nan=True):
            return False
    return length > 1


def _over_distance(subject: ScoreSubject) -> Plot:
    sizes = subject.sizes
    heads = [subject.head]
    if Axis.H in _axes_beside_score(subject.graph):
        heads = list(dict.fromkeys(round(n * (sizes.Hq - 1) / max(_MOST_CURVES - 1, 1)) for n in range(_MOST_CURVES)))
    reach = min(sizes.Lq, sizes.Lk) - 1
    step = max(1, -(-2 * reach // 400))
    distances = torch.arange(-(reach // step) * step, reach + 1, step)
    q_idx, kv_idx = (-distances).clamp(min=0), distances.clamp(min=0)
    curves = {head: subject.values(torch.zeros(()), q_idx, kv_idx, head).tolist() for head in heads}
    x = x_scale(-reach, reach)
    y = y_scale(*padded(value for curve in curves.values() for value in curve))
    styles = dict(zip(heads, ("curve a", "curve b", "curve c", "curve d"), strict=False))
    at = distances.tolist()
    ends = "; ".join(f"head {head} from {number_text(c[0])} to {number_text(c[-1])}" for head, c in curves.items())
    return Plot(
        title="What is added to a score, by distance",
        caption="At a raw score of 0; negative distances are keys before the query.",
        summary=f"Curves over distances from {-reach} to {reach}: {ends}.",
        x_label="distance kv_idx \N{MINUS SIGN} q_idx",
        y_label="added",
        x_ticks=linear_ticks(x),
        y_ticks=linear_ticks(y),
        shapes=tuple(
            Shape(line_path(list(zip(at, curve, strict=True)), x, y), styles[head], f"head {head}")
            for head, curve in curves.items()
        ),
        legend=tuple((styles[head], f"head {head}") for head in heads) if len(heads) > 1 else (),
    )


def _over_positions(subject: ScoreSubject) -> Plot:
    sizes = subject.sizes
    queries, keys = _samples(sizes.Lq, _CELLS), _samples(sizes.Lk, _CELLS)
    added = subject.values(torch.zeros(()), queries[:, None], keys[None, :])
    finite = added[added.isfinite()]
    most = float(finite.abs().max()) if finite.numel() else 0.0
    x, y = x_scale(0, len(keys)), y_scale(len(queries), 0, height=_MAP_HEIGHT)
    shapes = [Shape(_cells(added == -math.inf, x.at, y.at), "minus-infinity", "\N{MINUS SIGN}\N{INFINITY}")]
    for sign, style in ((1, "positive"), (-1, "negative")):
        levels = (added * sign / (most or 1.0) * _LEVELS).ceil().nan_to_num(0, 0, 0)
        for level in range(1, _LEVELS + 1):
            title = f"about {number_text(sign * most * level / _LEVELS)}"
            shapes.append(Shape(_cells(levels == level, x.at, y.at), f"{style} level{level}", title))
    low, high = (number_text(float(end)) for end in (finite.min(), finite.max())) if finite.numel() else ("-", "-")
    key_step, query_step = int(keys[1] if len(keys) > 1 else 1), int(queries[1] if len(queries) > 1 else 1)
    return Plot(
        title="What is added to a score, by position",
        caption=f"Head {subject.head}, at a raw score of 0: from {low} to {high}. "
        f"One cell samples {query_step} x {key_step} positions.",
        summary=f"Heat map over queries (down) and keys (right), from {low} to {high}.",
        x_label="kv_idx",
        y_label="q_idx",
        x_ticks=tuple(Tick(x.at(n), str(int(keys[n]))) for n in range(0, len(keys), max(1, len(keys) // 6))),
        y_ticks=tuple(Tick(y.at(n), str(int(queries[n]))) for n in range(0, len(queries), max(1, len(queries) // 6))),
        shapes=tuple(shape for shape in shapes if shape.path),
        legend=(("positive level8", "raises"), ("negative level8", "lowers")),
        has_grid=False,
        height=_MAP_HEIGHT,
    )


def _cells(chosen: Tensor, x: object, y: object) -> str:
    assert callable(x) and callable(y)
    parts = []
    for row, cells in enumerate(chosen.tolist()):
        start = None
        for column, cell in enumerate([*cells, False]):
            if cell and start is None:
                start = column
            elif not cell and start is not None:
                parts.append(f"M{x(start):g} {y(row):g}H{x(column):g}V{y(row + 1):g}H{x(start):g}z")
                start = None
    return "".join(parts)

"""Dense attention evaluated from the user's own callables, in pieces of bounded memory: what `check` judges by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flexgen.commands.dropout_pattern import kept_pairs
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.mask_evaluation import IndexBox, Mod, evaluate_mask, modify_scores

Precision = Literal["exact", "eager"]
PIECE_ENTRIES = 1 << 21  # scores at once; in float64, with score_mod's intermediates, some hundred megabytes
MINUS_INFINITY = -float("inf")


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs of attention: output [B, Hq, Lq, Dv], logsumexp and max_scores [B, Hq, Lq]."""

    output: Tensor
    logsumexp: Tensor
    max_scores: Tensor


@dataclass(frozen=True, slots=True)
class DenseProblem:
    """Attention to evaluate: tensors [B, Hq, Lq, Dqk], [B, Hkv, Lk, Dqk], [B, Hkv, Lk, Dv], the mods and dropout.

    Attributes:
        packed: lengths of sequences that are packed along the length in a batch of 1; None where none are.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Mod | None
    mask_mod: Mod | None
    scale: float
    dropout: Dropout | None = None
    packed: tuple[int, ...] | None = None

    @property
    def sequences(self) -> int:
        return self.query.shape[0] if self.packed is None else len(self.packed)

    def sequence(self, tensor: Tensor, number: int) -> Tensor:
        """Return the part [H, L, ...] of a tensor [B, H, L, ...] that is one sequence."""
        if self.packed is None:
            return tensor[number]
        begin = sum(self.packed[:number])
        return tensor[0, :, begin : begin + self.packed[number]]

    @property
    def group(self) -> int:
        return self.query.shape[1] // max(self.key.shape[1], 1)


def evaluate_dense(
    problem: DenseProblem, precision: Precision, track: Callable[[Sequence[Any]], Iterable[Any]] = iter
) -> Outputs:
    """Evaluate attention by its definition.

    Args:
        precision: "exact" computes in float64; "eager" as torch's eager mode in the query's dtype: float32 scores and
            weights rounded to that dtype.
        track: wraps the sequence of pieces, to show progress.

    Raises:
        CaptureError: a mod raised, branched on a value, or returned the wrong thing.
    """
    batch, heads, q_len, _ = problem.query.shape
    working = torch.float64 if precision == "exact" or problem.query.dtype == torch.float64 else torch.float32
    new = problem.query.new_empty
    dtype = problem.query.dtype if precision == "eager" else working
    outputs = Outputs(
        new((batch, heads, q_len, problem.value.shape[3]), dtype=dtype),
        new((batch, heads, q_len), dtype=working),
        new((batch, heads, q_len), dtype=working),
    )
    for box in track(list(_pieces(problem))):
        _evaluate_piece(problem, box, working, outputs)
    return outputs


def _pieces(problem: DenseProblem) -> Iterator[IndexBox]:
    """Cover the scores with boxes of one head and as many rows as bounded memory allows."""
    for b in range(problem.sequences):
        heads, q_len, _ = problem.sequence(problem.query, b).shape
        kv_len = problem.sequence(problem.key, b).shape[1]
        rows = max(1, PIECE_ENTRIES // max(kv_len, 1))
        for h in range(heads):
            for start in range(0, q_len, rows):
                yield IndexBox(range(b, b + 1), range(h, h + 1), range(start, min(start + rows, q_len)), range(kv_len))


def _evaluate_piece(problem: DenseProblem, box: IndexBox, working: torch.dtype, outputs: Outputs) -> None:
    b, h, rows = box.b.start, box.h.start, slice(box.q_idx.start, box.q_idx.stop)
    kv_head = h // problem.group
    query, key, value = (problem.sequence(tensor, b) for tensor in (problem.query, problem.key, problem.value))
    scores = query[h, rows].to(working) @ key[kv_head].to(working).T * problem.scale
    scores = _modified(problem, scores[None, None], box)[0, 0]
    weights, logsumexp, row_max = _softmax(scores)
    if problem.dropout is not None:
        weights = torch.where(kept_pairs(problem.dropout, box), weights, 0.0) * problem.dropout.numbers()["keep_scale"]
    held = outputs.output.dtype
    problem.sequence(outputs.output, b)[h, rows] = weights.to(held) @ value[kv_head].to(held)
    problem.sequence(outputs.logsumexp, b)[h, rows] = logsumexp
    problem.sequence(outputs.max_scores, b)[h, rows] = row_max


def _modified(problem: DenseProblem, scores: Tensor, box: IndexBox) -> Tensor:
    if not scores.numel():
        return scores
    if problem.score_mod is not None:
        modified = modify_scores(problem.score_mod, scores, box)
        scores = modified.to(scores.dtype).expand(scores.shape)
    if problem.mask_mod is None:
        return scores
    return torch.where(evaluate_mask(problem.mask_mod, box, scores.device), scores, MINUS_INFINITY)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, logsumexp and maximum of each row [rows, keys]; a row without a live key has weights of 0."""
    if not scores.numel():
        nothing = scores.new_full(scores.shape[:1], MINUS_INFINITY)
        return scores, nothing, nothing
    row_max = scores.amax(-1)
    empty = row_max == MINUS_INFINITY
    logsumexp = torch.where(empty[:, None], 0.0, scores).logsumexp(-1)
    weights = torch.where(empty[:, None], 0.0, torch.exp(scores - logsumexp[:, None]))
    return weights, torch.where(empty, MINUS_INFINITY, logsumexp), row_max

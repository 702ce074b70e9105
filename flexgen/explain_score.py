"""What is known about a score_mod: how it changes a score, what it reads, and how large or infinite it may get."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flexgen.ir.grad import score_grad
from flexgen.ir.graph import Graph
from flexgen.lowering.triton.choose import may_drop_rows, scores_may_be_extreme

_INPUTS = ("score", "b", "h", "q_idx", "kv_idx")


def score_facts(score: Graph | None, query_dtype: torch.dtype) -> Iterator[tuple[str, str]]:
    """Yield label and text of each fact; of no score_mod, that there is none."""
    if score is None:
        yield "score", "no score_mod: the scaled product of query and key"
        return
    yield "score", f"{score.name} {_change(score)}"
    yield "score depends on", ", ".join(_inputs(score)) or "nothing: every score is the same"
    read = [f"{one.name} ({str(one.dtype).removeprefix('torch.')}, {one.rank}-dimensional)" for one in score.buffers]
    read += [f"{scalar.name} (a number)" for scalar in score.scalars]
    if read:
        yield "score reads", ", ".join(read)
    extreme = scores_may_be_extreme(score, query_dtype)
    yield "score size", f"may be extreme: {extreme}" if extreme else "moderate: the scale and log2(e) are multiplied in"
    infinite = "a whole row may be -inf: the check after the loop stays"
    yield "score -inf", infinite if may_drop_rows(score) else "never of a finite score: rows stay as safe as the mask"


def _change(score: Graph) -> str:
    """Say how the result depends on the score, which its derivative tells."""
    grad = score_grad(score)
    if grad.is_zero:
        return "replaces the score: no gradient reaches query and key through it"
    if grad.is_identity:
        return "adds to the score: its gradient passes through unchanged"
    if grad.is_linear:
        return "is affine in the score: its slope does not depend on it"
    return "is no affine function of the score: the backward computes its slope at each pair"


def _inputs(score: Graph) -> Iterator[str]:
    used = {str(node.attr) for node in score.nodes() if node.op == "input"}
    yield from (name for name in _INPUTS if name in used)

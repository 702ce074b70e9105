"""What to tell a user about an operation that mods cannot hold: why, and what to write instead."""

from __future__ import annotations

from flexgen.errors import CaptureError, FlexgenError, SourceSpan

Reason = tuple[str, str]  # why, fix

_RANDOM: Reason = (
    "a mod must give the same value in the forward and in both backward kernels.",
    "draw the numbers outside, capture the tensor and index it.",
)
_DROPOUT: Reason = (_RANDOM[0], f"drop softmax weights with dropout_p= of the call; for anything else, {_RANDOM[1]}")
_WHOLE_ROW: Reason = (
    "a mod computes one element of the score at a time; this needs a whole row at once.",
    "compute it outside the mod, capture the resulting tensor and index it.",
)
_DATA_DEPENDENT: Reason = (
    "the shape of its result depends on data.",
    "use torch.where with both alternatives.",
)
_NO_SPELLING: Reason = (
    "flexgen has no kernel spelling for this function.",
    "tabulate it outside, capture the table and index it; or write it with exp, log, sin, cos.",
)
_ROWS: tuple[tuple[Reason, tuple[str, ...]], ...] = (
    (_RANDOM, ("rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "normal")),
    (_RANDOM, ("uniform", "randperm", "multinomial", "exponential", "uniform_", "normal_")),
    (_DROPOUT, ("dropout", "native_dropout", "bernoulli_")),  # the last is what torch.dropout draws with
    (_WHOLE_ROW, ("sort", "topk", "cumsum", "cumprod", "argsort", "median", "kthvalue", "cummax", "cummin")),
    (_WHOLE_ROW, ("argmax", "argmin", "histc", "bincount")),
    (_DATA_DEPENDENT, ("nonzero", "masked_select", "unique2", "_unique2", "repeat_interleave")),
    (_NO_SPELLING, ("atan", "atan2", "asin", "acos", "lgamma", "digamma", "erfinv", "i0", "special_i0", "special_i1")),
)
REASONS: dict[str, Reason] = {name: reason for reason, names in _ROWS for name in names}
_DEFAULT = (
    "flexgen compiles pointwise arithmetic, comparisons, indexing of captured tensors and small reductions.",
    "compute it outside the mod, capture the resulting tensor and index it.",
)


def unsupported(op: str, where: SourceSpan | None, why: str | None = None, fix: str | None = None) -> FlexgenError:
    """Return the error for one operation; the default reason comes from the table."""
    table_why, table_fix = REASONS.get(op, _DEFAULT)
    shown = op if " " in op else f"`{op}`"
    return CaptureError(f"{shown} is not supported in a mod", where=where, why=why or table_why, fix=fix or table_fix)

"""What to tell a user about an operation that mods cannot hold: why, and what to write instead."""

from __future__ import annotations

from flexgen.errors import CaptureError, FlexgenError, SourceSpan

_POINTWISE_WHY = "flexgen has no kernel spelling for this function."
_ORDER_WHY = "a mod computes one element of the score at a time; this needs a whole row at once."

# aten name -> (why, fix).
REASONS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("rand", "randn", "randint", "rand_like", "randn_like", "bernoulli", "dropout", "native_dropout") + ("normal", "uniform", "randperm", "multinomial", "exponential", "bernoulli_", "uniform_", "normal_"), ("a mod must give the same value in the forward and in both backward kernels.", "draw the random numbers outside, capture the tensor and index it; for dropout, pass dropout_p to the call.")),
    **dict.fromkeys(("sort", "topk", "cumsum", "cumprod", "argsort", "median", "kthvalue", "unique", "cummax", "cummin"), (_ORDER_WHY, "compute it outside the mod, capture the resulting tensor and index it.")),
    **dict.fromkeys(("nonzero", "masked_select", "unique2", "_unique2", "repeat_interleave"), ("the shape of its result depends on data.", "use torch.where with both alternatives.")),
    **dict.fromkeys(("atan", "atan2", "asin", "acos", "lgamma", "digamma", "erfinv", "i0", "special_i0", "special_i1"), (_POINTWISE_WHY, "tabulate it outside, capture the table and index it; or write it with exp, log, sin, cos.")),
    **dict.fromkeys(("copy_", "index_put_", "index_put", "scatter_", "scatter_add_", "fill_", "index_add_", "setitem"), ("kernels read captured tensors while every program runs; writing to them has no defined order.", "compute the updated tensor outside the mod, or use a new value: `x = x + y`.")),
}
_DEFAULT = (
    "flexgen compiles pointwise arithmetic, comparisons, indexing of captured tensors and small reductions.",
    "compute it outside the mod, capture the resulting tensor and index it.",
)


def unsupported(op: str, where: SourceSpan | None, why: str | None = None, fix: str | None = None) -> FlexgenError:
    """Return the error for one operation; the default reason comes from the table."""
    table_why, table_fix = REASONS.get(op, _DEFAULT)
    shown = op if " " in op else f"`{op}`"
    return CaptureError(f"{shown} is not supported in a mod", where=where, why=why or table_why, fix=fix or table_fix)

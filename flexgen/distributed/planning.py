"""`plan_context_parallel`: what a sharded attention would compute and send, without any process."""

from __future__ import annotations

from torch import Tensor

from flexgen.attention import Attention
from flexgen.distributed.assignment import NAMES, assignment_named
from flexgen.distributed.plan import ContextPlan, choose_plan, make_plan
from flexgen.distributed.whole_mask import Extent, WholeMask
from flexgen.errors import OptionError, ProblemTypeError
from flexgen.runtime.describe import check_tensors, to_bhsd


def plan_context_parallel(
    attn: Attention, query: Tensor, key: Tensor, value: Tensor, *, ranks: int, assignment: str | None = None
) -> ContextPlan:
    """Return who would compute and send what, for any number of ranks, without any process.

    Args:
        attn: what `flexgen.compile` returned.
        query, key, value: of the whole sequence, as for `attn`; only shapes and dtypes matter: meta tensors will do.
        ranks: how many there would be.
        assignment: as for `flexgen.context_parallel`. None for that which gives the rank with the most work less of it;
            where both give about the same, for that which sends less.

    Raises:
        UnsupportedProblemError: the sequence cannot be cut in equal chunks.
        OptionError: there is no such assignment, or number of ranks.
    """
    check_attention("plan_context_parallel", attn)
    if type(ranks) is not int or ranks < 1:
        raise OptionError(f"ranks={ranks!r} is no number of ranks", fix="pass a positive int")
    names = NAMES if assignment is None else (assignment,)
    return choose_plan([_planned(attn, (query, key, value), ranks, name) for name in names])


def check_attention(function: str, attention: object) -> None:
    """Refuse what is no Attention."""
    if not isinstance(attention, Attention):
        raise ProblemTypeError(
            f"{function} got {type(attention).__name__}, not an Attention", fix="pass what flexgen.compile returns"
        )


def _planned(attn: Attention, tensors: tuple[Tensor, Tensor, Tensor], ranks: int, name: str) -> ContextPlan:
    assignment, layout = assignment_named(name, ranks), attn.options.layout
    check_tensors(*tensors, layout)
    reading = attn.read(*tensors)
    query, key, value = (to_bhsd(tensor, layout) for tensor in tensors)
    extent = Extent.of(query, key, value)
    return make_plan(WholeMask.of(attn.understand(reading), reading, extent), extent, assignment)

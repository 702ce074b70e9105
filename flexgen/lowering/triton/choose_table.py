"""Decides whether a call gets a block table derived from its mask, and the sides of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.facts import MaskFacts, Tier
from flexgen.lowering.index_map import PACKED_QUERIES
from flexgen.lowering.rounding import round_up_to_power_of_two
from flexgen.lowering.symbols import Algebra
from flexgen.lowering.table_plan import drops_empty
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.tiles import preferred
from flexgen.options import KernelOptions
from flexgen.problem import GRID_LIMIT, Guard, Problem, TableForm

TABLE_TIERS = (Tier.BLOCK_TABLE, Tier.DENSE)
NARROW_HULL = 512  # keys; a hull this wide is a handful of tiles: guess, listing them costs as much as visiting them


@dataclass(frozen=True, slots=True)
class TableChoice:
    """The table to derive, or None; and why."""

    form: TableForm | None
    because: str


def choose_table(
    facts: MaskFacts,
    rule: BlockRule | None,
    problem: Problem,
    guard: Guard,
    target: Target,
    options: KernelOptions,
    *,
    trusted: bool,
) -> TableChoice:
    """Decide about an implicit table: one that a call makes for itself.

    Args:
        rule: how blocks are classified; None where the mask's tier needs no table.
        trusted: the launch's scalars lie in the ranges that the rule was derived for.
    """
    form = table_form(problem, target, options)
    refusal = _refusal(facts, rule, problem, guard, form, trusted)
    return TableChoice(None, refusal) if refusal is not None else TableChoice(form, facts.kv.because)


def table_form(problem: Problem, target: Target, options: KernelOptions) -> TableForm:
    """Return the form of a derived table: a block is as the preferred tile, so that no finer list would help."""
    head_dim = round_up_to_power_of_two(max(problem.qk_head_dim, problem.v_head_dim))
    tile, _ = preferred(problem.query_dtype, head_dim, target, masked=True)
    return TableForm(options.BLOCK_M or tile.BLOCK_M, options.BLOCK_N or tile.BLOCK_N, True, derived=True)


def _refusal(
    facts: MaskFacts, rule: BlockRule | None, problem: Problem, guard: Guard, form: TableForm, trusted: bool
) -> str | None:
    if facts.kv.tier not in TABLE_TIERS or rule is None:
        return f"the mask's tier is {facts.kv.tier.value}"
    if problem.cu_seqlens is not None:
        return "packed sequences have lengths of their own, and a table has one for all"
    if guard.crowded:
        return f"there are more than {GRID_LIMIT} heads or batch entries, which its kernels' grid does not hold"
    if not trusted:
        return "a captured number is too large for the rule of its blocks"
    if rule.tells_nothing:
        why = rule.unsolved[0].why if rule.unsolved else "no block is known to be empty or full"
        lists = "; attention.block_table evaluates it and lists the live blocks" if drops_empty(rule, form) else ""
        return f"every block would be listed: {why}{lists}"
    if 0 < guard.q_bucket <= PACKED_QUERIES:
        return f"at most {PACKED_QUERIES} queries are one row of blocks, for which a table costs more than it saves"
    if 0 < guard.kv_bucket <= form.kv_block_size:
        return "all keys lie in one block"
    width = hull_width(facts)
    if width is not None and width <= NARROW_HULL:
        return f"live keys lie within {width} keys, which are visited directly"
    return None


def hull_width(facts: MaskFacts) -> int | None:
    """Return a number of keys that the live keys of one query never span more than; None where there is none."""
    algebra, total = Algebra(), 0
    for segment in facts.kv.rows.segments:
        lo, hi = segment.outer.lo, segment.outer.hi
        if lo is None or hi is None:
            return None
        least = algebra.lower_bound(algebra.linear(lo) - algebra.linear(hi))
        if least is None:
            return None
        total -= min(least, 0)
    return total

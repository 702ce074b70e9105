"""Emits the kernels that derive a block table: a pure function from (mask, plan) to one module with several entries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexgen.codegen.block_table_text import BlockTableText
from flexgen.codegen.dialects.triton import Dialect
from flexgen.codegen.emit import mod_context
from flexgen.codegen.header import row
from flexgen.codegen.key import kernel_key
from flexgen.codegen.mod_printer import print_mod
from flexgen.codegen.module_text import render_module
from flexgen.codegen.render import render_part
from flexgen.codegen.source import Arg, KernelSource
from flexgen.ir.graph import Graph, Mods
from flexgen.ir.origins import Origins
from flexgen.lowering.table_plan import TablePlan


@dataclass(frozen=True, slots=True)
class TableSource:
    """The kernels of one table, all in one module.

    Attributes:
        summaries: kernels that reduce the leaves of one axis, by the axis ("q", "kv"); absent where it has none.
        count: how many blocks each row lists.
        fill: lists them.
        decide: tells their states, evaluating the mask where the rule does not decide; None unless the plan is exact.
        drop: leaves out those in which the mask, evaluated, has no live pair; None where the rule decides all.
    """

    summaries: dict[str, KernelSource]
    count: KernelSource
    fill: KernelSource
    decide: KernelSource | None
    drop: KernelSource | None

    @property
    def text(self) -> str:
        return self.fill.text


def emit_block_table(mask: Graph, origins: Origins, plan: TablePlan) -> TableSource:
    """Return the kernels of a plan."""
    mods = Mods(None, mask)
    context = mod_context(mods, Dialect(hardware=plan.target.backend == "cuda"), plan.wide, plan.wide_index)
    printed = print_mod(mask, origins, context, torch.float32) if plan.exact or plan.drops_empty else None
    holes = BlockTableText(plan, origins, context, printed).holes()
    functions = [render_part(f"triton/prelude/{name}.py.jinja") for name in holes.prelude]
    functions += ["\n".join(line.text for line in printed.lines)] if printed else []
    module = render_module(
        "triton/block_table.py.jinja",
        printed=[printed] if printed else [],
        header=_header(mask, plan),
        plan=plan,
        holes=holes,
        functions=functions,
    )
    key = kernel_key(mods, origins, plan)

    def entry(name: str, args: tuple[Arg, ...]) -> KernelSource:
        return KernelSource(module.text, name, args, module.line_map, key)

    sides = [side for side in (holes.q, holes.kv) if side.lines]
    return TableSource(
        {side.axis: entry(f"summarise_{side.noun}", side.args) for side in sides},
        entry("count_blocks", holes.count_args),
        entry("fill_blocks", holes.fill_args),
        entry("decide_blocks", holes.evaluate_args) if plan.exact else None,
        entry("drop_empty_blocks", holes.evaluate_args) if plan.drops_empty else None,
    )


def _header(mask: Graph, plan: TablePlan) -> str:
    rows = [("mask_mod", mask.name), ("blocks", f"{plan.q_block_size} queries x {plan.kv_block_size} keys")]
    body = "\n".join(row(label, text) for label, text in (*rows, *plan.rule.describe()))
    return f'"""Block table of a mask, for {plan.target.name}. Written by flexgen.\n\n{body}\n"""'

"""The holes of the block table's template: the leaves of each axis, the rule, and the parameters of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.mod_printer import PrintedMod, comment_text
from flexgen.codegen.node_printer import NodePrinter, PrintContext
from flexgen.codegen.source import Arg, Role
from flexgen.ir.graph import Axis, Node, topological
from flexgen.ir.origins import Origins
from flexgen.lowering.block_evaluator import Leaf
from flexgen.lowering.ranges import Range
from flexgen.lowering.table_plan import TablePlan
from flexgen.problem import INDEX_LIMIT

_NARROW = Range(-INDEX_LIMIT, INDEX_LIMIT)  # sums and differences of two such numbers fit 32 bits
_NAMES = frozenset(
    {"block", "exists", "slot", "q_block", "kv_block", "q_slot", "kv_slot", "live", "full", "tl", "triton"}
)


@dataclass(frozen=True, slots=True)
class SideText:
    """One axis of the mask: how its blocks are named, and what is reduced over each of them.

    Attributes:
        axis: "q" or "kv".
        noun: "queries" or "keys".
        lines: statements that compute the leaves and store their extremes; empty where there is no leaf.
        slot: where a block's extremes lie.
        loads: (name, load) of each extreme that the rule reads.
        reads_first, reads_last: whether the rule reads the block's first index, and its last.
        args: parameters of the kernel that reduces the leaves.
    """

    axis: str
    noun: str
    lines: tuple[str, ...]
    slot: str
    loads: tuple[tuple[str, str], ...]
    reads_first: bool
    reads_last: bool
    uses_batch: bool
    uses_heads: bool
    args: tuple[Arg, ...]

    @property
    def index(self) -> str:
        return f"{self.axis}_idx"

    @property
    def block_size(self) -> str:
        return f"SPARSE_{self.axis.upper()}_BLOCK_SIZE"

    @property
    def length(self) -> str:
        return f"{self.axis.upper()}_LEN"

    @property
    def blocks(self) -> str:
        return f"num_{self.axis}_blocks"

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(arg.name for arg in self.args)


@dataclass(frozen=True, slots=True)
class BlockTableHoles:
    """Everything the template prints besides the plan.

    Attributes:
        own, walked: the side whose blocks have a list each, and the side whose blocks are listed.
        rule_lines, may_live, all_live: statements and results of the rule.
        classify_args: what `classify` takes after the blocks.
        count_args, fill_args: parameters of the two kernels.
        evaluate_args: of the kernel that evaluates the mask, and `live` its call of it; none where there is none.
        prelude, libdevice: what the text needs besides.
    """

    q: SideText
    kv: SideText
    own: SideText
    walked: SideText
    rule_lines: tuple[str, ...]
    may_live: str
    all_live: str
    uses_batch: bool
    uses_heads: bool
    classify_args: tuple[str, ...]
    count_args: tuple[Arg, ...]
    fill_args: tuple[Arg, ...]
    evaluate_args: tuple[Arg, ...]
    live: str
    prelude: tuple[str, ...]
    libdevice: bool


class BlockTableText:
    """Computes the holes for one plan."""

    def __init__(
        self, plan: TablePlan, origins: Origins, context: PrintContext, mask: PrintedMod | None = None
    ) -> None:
        self._plan, self._origins, self._mask = plan, origins, mask
        self._rule = plan.rule
        self._read = set(topological(plan.rule.may_live, plan.rule.all_live))
        known: dict[str | Node, Range] = {
            str(end.attr): _stored_range(leaf) for leaf in plan.rule.leaves for end in (leaf.least, leaf.greatest)
        }
        self._context = replace(context, analysis=context.analysis.assuming(known))
        self._prelude: dict[str, None] = {}
        self._libdevice = False

    def holes(self) -> BlockTableHoles:
        q, kv = self._side(Axis.Q), self._side(Axis.KV)
        own, walked = (q, kv) if self._plan.walked is Axis.KV else (kv, q)
        printer = self._printer(self._rule_inputs())
        results = [printer.print(root) for root in (self._rule.may_live, self._rule.all_live)]
        shared = tuple(dict.fromkeys((*self._summaries(Axis.Q), *self._summaries(Axis.KV), *printer.args.values())))
        lines = tuple(self._statements(printer, 0))
        self._keep(printer)
        lengths = [_length("Q_LEN"), _length("KV_LEN")]
        counts = [_table(name, torch.int32) for name in ("partial_counts", "full_counts")]
        text = " ".join((*lines, *(result.text for result in results)))
        return BlockTableHoles(
            q=q,
            kv=kv,
            own=own,
            walked=walked,
            rule_lines=lines,
            may_live=results[0].text,
            all_live=results[1].text,
            uses_batch=q.uses_batch or kv.uses_batch or self._reads("b"),
            uses_heads=q.uses_heads or kv.uses_heads or self._reads("h"),
            classify_args=(*(arg.name for arg in shared), *_lengths_read(text, q, kv)),
            count_args=(*counts, *shared, *lengths),
            fill_args=(*counts, *self._fill_args(walked.axis), *shared, *lengths),
            evaluate_args=(*self._evaluate_args(walked.axis), *lengths) if self._mask else (),
            live=self._mask.call(b="b", h="h", q_idx="q_idx[:, None]", kv_idx="kv_idx[None, :]") if self._mask else "",
            prelude=tuple(self._prelude | dict.fromkeys(self._mask.prelude if self._mask else ())),
            libdevice=self._libdevice or (self._mask is not None and self._mask.libdevice),
        )

    def _evaluate_args(self, axis: str) -> Iterator[Arg]:
        for name in (f"{axis}_num_blocks", f"full_{axis}_num_blocks", f"{axis}_offsets", f"{axis}_indices"):
            yield _table(name, torch.int32)
        if self._plan.exact:
            yield _table("states", torch.int8)
        yield from self._mask.args if self._mask else ()

    @staticmethod
    def _fill_args(axis: str) -> Iterator[Arg]:
        yield _table("ends", torch.int64)
        for name in (f"{axis}_num_blocks", f"full_{axis}_num_blocks", f"{axis}_offsets", f"{axis}_indices"):
            yield _table(name, torch.int32)
        yield Arg("capacity", Role.TABLE_SIZE, f"{axis}_indices", 0, "i32", False)

    # Leaves.

    def _side(self, axis: Axis) -> SideText:
        leaves = self._rule.leaves_of(axis)
        name = axis.value
        axes = frozenset[Axis]().union(*(leaf.node.axes for leaf in leaves))
        printer = self._printer({"b": "b", "h": "h", f"{name}_idx": f"{name}_idx"})
        lines: list[str] = []
        for leaf in leaves:
            before = len(printer.assignments)
            value = printer.print(leaf.node)
            lines += self._statements(printer, before)
            lines += self._stores(leaf, value.text, printer.computed_dtype(leaf.node))
        self._keep(printer)
        summaries = self._summaries(axis)
        return SideText(
            axis=name,
            noun="queries" if axis is Axis.Q else "keys",
            lines=tuple(lines),
            slot=_slot(name, axes),
            loads=tuple(self._loads(leaves)),
            reads_first=self._reads(f"{name}_lo"),
            reads_last=self._reads(f"{name}_hi"),
            uses_batch=Axis.B in axes,
            uses_heads=Axis.H in axes,
            args=(*summaries, *printer.args.values(), _length(f"{name.upper()}_LEN")),
        )

    def _summaries(self, axis: Axis) -> tuple[Arg, ...]:
        return tuple(
            _table(str(end.attr), stored_dtype(leaf)) for leaf in self._rule.leaves_of(axis) for end in self._ends(leaf)
        )

    def _ends(self, leaf: Leaf) -> Iterator[Node]:
        """The extremes of a leaf that the rule reads."""
        yield from (end for end in (leaf.least, leaf.greatest) if end in self._read)

    def _stores(self, leaf: Leaf, value: str, computed: torch.dtype) -> Iterator[str]:
        stored = stored_dtype(leaf)
        name = leaf.name
        cast = "" if computed == stored else f".to({type_name(stored)})"
        if cast and not value.isidentifier():
            value = f"({value})"
        yield f"{name} = {value}{cast}"
        nan = stored.is_floating_point
        for end in self._ends(leaf):
            smallest = end is leaf.least
            least, greatest = _limits(leaf, stored)
            chosen = f"tl.where(exists, {name}, {greatest if smallest else least})"
            reduced = f"tl.{'min' if smallest else 'max'}({chosen}, 0)"
            if nan:
                reduced = f'tl.where(tl.max(({name} != {name}).to(tl.int32), 0) > 0, float("nan"), {reduced})'
            yield f"tl.store({end.attr}_ptr + slot, {reduced})"

    def _loads(self, leaves: Iterable[Leaf]) -> Iterator[tuple[str, str]]:
        for leaf in leaves:
            for end in self._ends(leaf):
                yield str(end.attr), _widened(leaf)

    # The rule.

    def _rule_inputs(self) -> dict[str, str]:
        names = ["b", "h", "q_lo", "q_hi", "kv_lo", "kv_hi", "Q_LEN", "KV_LEN"]
        names += [str(end.attr) for leaf in self._rule.leaves for end in self._ends(leaf)]
        return {name: name for name in names}

    def _reads(self, name: str) -> bool:
        return any(node.op == "input" and node.attr == name for node in self._read)

    def _printer(self, inputs: dict[str, str]) -> NodePrinter:
        captured = {*self._context.buffers, *self._context.scalars}
        leaves = {leaf.name for leaf in self._rule.leaves}
        taken = {*inputs, *captured, *leaves, *_NAMES, "floor_div", "floor_mod"}
        return NodePrinter(self._context, inputs, _unnamed, taken)

    def _statements(self, printer: NodePrinter, start: int) -> Iterator[str]:
        shown: str | None = None
        for assignment in printer.assignments[start:]:
            span = self._origins.span(assignment.node)
            comment = comment_text(span) if span else None
            if comment and comment != shown:
                yield f"# {comment}"
                shown = comment
            yield f"{assignment.name} = {assignment.text}"

    def _keep(self, printer: NodePrinter) -> None:
        self._prelude |= dict.fromkeys(printer.prelude)
        self._libdevice |= printer.libdevice


_unnamed: Callable[[Node], str | None] = lambda _node: None  # noqa: E731  the user's names belong to other expressions


def stored_dtype(leaf: Leaf) -> torch.dtype:
    """Return the dtype in which a leaf's extremes are kept; bools are 0 and 1."""
    dtype = leaf.node.dtype
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    fits = dtype != torch.int64 or Range(-(2**31), 2**31 - 1).contains(_finite(leaf.range))
    return torch.int32 if fits else torch.int64


def _finite(known: Range) -> Range:
    return Range(-(2**63) if known.lo is None else known.lo, 2**63 if known.hi is None else known.hi)


def _stored_range(leaf: Leaf) -> Range:
    """The range the printer may rely on: unknown, and so 64 bits, where sums of the extremes could wrap."""
    if leaf.node.dtype == torch.bool or _NARROW.contains(_finite(leaf.range)):
        return leaf.range
    return Range()


def _widened(leaf: Leaf) -> str:
    """What follows the load of an extreme, so that its dtype is the one the printer takes it to have."""
    if leaf.node.dtype == torch.bool:
        return " != 0"
    narrow = _NARROW.contains(_finite(leaf.range))
    return "" if leaf.node.dtype.is_floating_point or narrow or stored_dtype(leaf) == torch.int64 else ".to(tl.int64)"


def _limits(leaf: Leaf, stored: torch.dtype) -> tuple[str, str]:
    """What absent positions count as: the greatest value for a minimum, the least for a maximum."""
    if stored.is_floating_point:
        return 'float("-inf")', 'float("inf")'
    if leaf.node.dtype == torch.bool:
        return "0", "1"
    held = torch.iinfo(stored)
    return str(held.min), str(held.max)


def _slot(axis: str, axes: frozenset[Axis]) -> str:
    """Where the extremes of a block lie: one row of blocks for each batch and head that the leaves depend on."""
    row = {
        (False, False): "",
        (True, False): "b",
        (False, True): "h",
        (True, True): "(b * tl.num_programs(1) + h)",
    }[Axis.B in axes, Axis.H in axes]
    return f"{row} * num_{axis}_blocks + {axis}_block" if row else f"{axis}_block"


def _lengths_read(text: str, q: SideText, kv: SideText) -> Iterator[str]:
    for side in (q, kv):
        if side.reads_last or side.length in text or side.uses_batch or side.uses_heads:
            yield side.length


def _table(name: str, dtype: torch.dtype) -> Arg:
    return Arg(f"{name}_ptr", Role.TABLE, name, None, pointer_type(dtype), True)


def _length(name: str) -> Arg:
    return Arg(name, Role.LENGTH, name, None, "i32", False)

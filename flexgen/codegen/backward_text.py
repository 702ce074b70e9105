"""The holes of the backward templates: parameters, addresses, masks and calls, computed from a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from flexgen.codegen.bounds_printer import PrintedRanges, RangesPrinter, WalkedAxis
from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.dropout_text import dropout_args, kept_call
from flexgen.codegen.mod_printer import PrintedMod
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.scatter_printer import PrintedScatter, ScatterCalls, calls
from flexgen.codegen.sides import Side, dim_mask
from flexgen.codegen.source import Arg, Role
from flexgen.codegen.tile_args import length_args, stride_args
from flexgen.codegen.walk_text import Checked, gap_count, grouped, span, walks_of
from flexgen.lowering.dropout import Draws
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan

TENSORS = ("query", "key", "value", "grad_output")
FULL = "full_"


@dataclass(frozen=True, slots=True)
class ListVisit:
    """One block list: the names of its counts and indices, and the lines of the call that walks it."""

    counts: str
    indices: str
    visit: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BackwardHoles:
    """Everything a backward template prints besides the plan; a tile of scores has an own and a walked side."""

    walk: str
    table: bool
    block_is_tile: bool
    two_kinds: bool
    gaps: tuple[int, ...]
    loop_params: tuple[str, ...]
    params: tuple[str, ...]
    own_exists: str
    own_start: str
    own_sparse: str
    walked_exists: str
    tiles_divide_blocks: bool
    walked_limit: str
    walked_start: str
    walked_block: str
    walked_length: str
    walked_sparse: str
    query_address: str
    key_address: str
    value_address: str
    grad_output_address: str
    grad_query_address: str
    grad_key_address: str
    grad_value_address: str
    query_mask: str
    key_mask: str
    value_mask: str
    grad_output_mask: str
    query_masks: Checked
    key_masks: Checked
    value_masks: Checked
    grad_output_masks: Checked
    dot_options: str
    scale: str
    scale_score: bool
    exponent_scale: str
    shift_scale: str
    row_broadcast: str
    accumulator: str
    score_call: str
    grad_call: str
    live: Checked
    kept_call: str
    counts: Checked
    counts_pairs: bool
    shares: Checked
    scatters: tuple[ScatterCalls, ...]
    sums: str
    results: str
    bounds: tuple[str, ...]
    visits: tuple[tuple[str, ...], ...]
    lists: tuple[ListVisit, ...]
    offsets: str
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


class BackwardText:
    """Computes the holes of one backward kernel.

    Args:
        plan: the kernel's plan.
        score, mask: printed mods.
        grad: the printed gradient of score_mod, or None for the identity.
        scatters: printed gradients of captured buffers that this kernel accumulates.
        context: as for mods.
    """

    def __init__(
        self,
        plan: BackwardPlan,
        score: PrintedMod | None,
        mask: PrintedMod | None,
        grad: PrintedMod | None,
        scatters: tuple[PrintedScatter, ...],
        context: PrintContext,
    ) -> None:
        self.plan, self.score, self.mask, self.grad, self.scatters = plan, score, mask, grad, scatters
        self.is_dq = plan.kernel is BackwardKernel.DQ
        self.derived = plan.schedule.walk is Walk.DERIVED
        self.table = self.derived or plan.schedule.walk is Walk.TABLE
        exists = "" if plan.IS_DIVISIBLE else "{}_exists"
        self.rows = Side("q_idx", exists.format("row"), "q", plan.wide, {*plan.unit_stride, "grad_query"})
        self.keys = Side(
            "kv_idx", exists.format("column"), "kv", plan.wide, {*plan.unit_stride, "grad_key", "grad_value"}
        )
        self.own, self.walked = (self.rows, self.keys) if self.is_dq else (self.keys, self.rows)
        self.ranges = None if self.table else self._print_ranges(context)
        self.divides = not self.table or self._own_sizes()[0] % self._own_sizes()[1] == 0
        self.block_is_tile = self.table and self._walked_sizes()[0] == self._walked_sizes()[1]
        self.two_kinds = self._needs_two_kinds()
        segments = self.ranges.names if self.ranges else ()
        self.walks = walks_of(segments, masked=mask is not None or not plan.IS_DIVISIBLE)
        self.gaps = gap_count(self.walks)

    def holes(self) -> BackwardHoles:
        plan = self.plan
        qk = dim_mask("qk_dim", plan.QK_HEAD_DIM, plan.QK_HEAD_DIM_ROUNDED)
        v = dim_mask("v_dim", plan.V_HEAD_DIM, plan.V_HEAD_DIM_ROUNDED)
        args = tuple(self._args())
        prefix = "" if self.is_dq else "head_"
        return BackwardHoles(
            walk="derived_table" if self.derived else "table" if self.table else "ranges",
            table=self.table,
            block_is_tile=self.block_is_tile,
            two_kinds=self.two_kinds,
            gaps=tuple(range(self.gaps)),
            loop_params=tuple(self._loop_params()),
            params=tuple(arg.name for arg in args),
            own_exists=self.own.exists,
            own_start="q_start" if self.is_dq else "kv_start",
            own_sparse="SPARSE_Q_BLOCK_SIZE" if self.is_dq else "SPARSE_KV_BLOCK_SIZE",
            walked_exists=self.walked.exists,
            tiles_divide_blocks=self.divides,
            walked_limit=self._walked_limit(),
            walked_start="kv_start" if self.is_dq else "q_start",
            walked_block="BLOCK_N" if self.is_dq else "BLOCK_M",
            walked_length="KV_LEN" if self.is_dq else "Q_LEN",
            walked_sparse="SPARSE_KV_BLOCK_SIZE" if self.is_dq else "SPARSE_Q_BLOCK_SIZE",
            query_address=self.rows.address("query", "qk_dim"),
            key_address=self.keys.address("key", "qk_dim"),
            value_address=self.keys.address("value", "v_dim"),
            grad_output_address=self.rows.address("grad_output", "v_dim"),
            grad_query_address=self.rows.address("grad_query", "qk_dim"),
            grad_key_address=self.keys.address("grad_key", "qk_dim"),
            grad_value_address=self.keys.address("grad_value", "v_dim"),
            query_mask=self.rows.mask(qk),
            key_mask=self.keys.mask(qk),
            value_mask=self.keys.mask(v),
            grad_output_mask=self.rows.mask(v),
            query_masks=self._masks(self.rows, qk),
            key_masks=self._masks(self.keys, qk),
            value_masks=self._masks(self.keys, v),
            grad_output_masks=self._masks(self.rows, v),
            dot_options=self._dot_options(),
            scale="sm_scale" if plan.SM_SCALE is None else "SM_SCALE",
            scale_score=not plan.FOLD_SCALE and plan.SM_SCALE != 1.0,
            exponent_scale="SCALE_LOG2_E" if plan.FOLD_SCALE else "LOG2_E",
            shift_scale="" if plan.SUBTRACT_FIRST else " * LOG2_E",
            row_broadcast="[:, None]" if self.is_dq else "[None, :]",
            accumulator=type_name(plan.accumulator_dtype),
            score_call=self.score.call(score="score", **self._indices()) if self.score else "",
            grad_call=self.grad.call(score="score", grad="grad_score", **self._indices()) if self.grad else "",
            live=self._live(),
            kept_call=kept_call(plan.DROPOUT, self._indices()["q_idx"], self._indices()["kv_idx"]),
            counts=Checked(*map(_of_pairs, self._counted())),
            counts_pairs=any(not scatter.carried and scatter.places for scatter in self.scatters),
            shares=Checked(*self._counted()),
            scatters=tuple(self._scatter_calls()),
            sums=self._sums(),
            results=", ".join(self._carried_names()),
            bounds=self.ranges.lines if self.ranges else (),
            visits=tuple(self._visit(span(walk, self.gaps), walk.checked, "", prefix) for walk in self.walks),
            lists=tuple(self._lists(prefix)),
            offsets="kv_offsets" if self.is_dq else "q_offsets",
            args=args,
            prelude=self.ranges.prelude if self.ranges else (),
        )

    # Facts about the text.

    @property
    def _tiles_per_block(self) -> str:
        return "" if self.block_is_tile else ", tiles_per_block"

    @property
    def _blocks_overhang(self) -> bool:
        """Whether a block of the table is not whole tiles along the walked side."""
        sparse, block = self._walked_sizes()
        return self.table and sparse % block != 0

    def _walked_sizes(self) -> tuple[int, int]:
        return self._sizes_of_keys() if self.is_dq else self._sizes_of_queries()

    def _own_sizes(self) -> tuple[int, int]:
        return self._sizes_of_queries() if self.is_dq else self._sizes_of_keys()

    def _sizes_of_keys(self) -> tuple[int, int]:
        return self.plan.SPARSE_KV_BLOCK_SIZE, self.plan.BLOCK_N

    def _sizes_of_queries(self) -> tuple[int, int]:
        return self.plan.SPARSE_Q_BLOCK_SIZE, self.plan.BLOCK_M

    def _walked_limit(self) -> str:
        length = "KV_LEN" if self.is_dq else "Q_LEN"
        sparse = "SPARSE_KV_BLOCK_SIZE" if self.is_dq else "SPARSE_Q_BLOCK_SIZE"
        return f"tl.minimum((block + 1) * {sparse}, {length})" if self._blocks_overhang else length

    def _needs_two_kinds(self) -> bool:
        if self.table:
            return self.mask is not None and self.plan.HAS_FULL_BLOCKS
        has_full = any(name.full_hi for name in (self.ranges.names if self.ranges else ()))
        return has_full and (self.mask is not None or not self.plan.IS_DIVISIBLE)

    def _print_ranges(self, context: PrintContext) -> PrintedRanges:
        own, block, length = ("q", "BLOCK_M", "Q_LEN") if self.is_dq else ("kv", "BLOCK_N", "KV_LEN")
        last = f"tl.minimum({own}_start + {block}, {length}) - 1"
        corners = {f"{own}_lo": f"{own}_start", f"{own}_hi": last if self.own.exists else f"{own}_start + {block} - 1"}
        names = ("b", "h", "q_idx", "kv_idx", "Q_LEN", "KV_LEN", *corners)
        inputs = {**{name: name for name in names}, "h_lo": "h", "h_hi": "h"}
        axis = WalkedAxis(*(("KV_LEN", "BLOCK_N") if self.is_dq else ("Q_LEN", "BLOCK_M")), "", self.own.exists)
        masked = self.mask is not None or not self.plan.IS_DIVISIBLE
        printed = RangesPrinter(context, inputs, axis).print(self.plan.schedule, full=masked)
        used = set(re.findall(r"\w+", " ".join(line for line in printed.lines if line[0] != "#")))
        lines = tuple(f"{name} = {text}" for name, text in corners.items() if name in used)
        return PrintedRanges(lines + printed.lines, printed.names, printed.args, printed.prelude)

    def _indices(self) -> dict[str, str]:
        q, kv = ("q_idx[:, None]", "kv_idx[None, :]") if self.is_dq else ("q_idx[None, :]", "kv_idx[:, None]")
        return {"b": "b", "h": "h", "q_idx": q, "kv_idx": kv}

    def _live(self) -> Checked:
        mask = self.mask.call(**self._indices()) if self.mask else ""
        walked = self._exists(self.walked)
        checked = " & ".join(term for term in (walked, mask) if term)
        return Checked(checked, walked if self.table and self.two_kinds else "")

    def _counted(self) -> tuple[str, str]:
        """Return which pairs of a tile count in the gradients of captured buffers, "" for all: checked, and not."""
        own = f"{self.own.exists}[:, None]" if self.own.exists else ""
        checked = " & ".join(term for term in (own, "live" if self._live().checked else "") if term)
        return checked, " & ".join(term for term in (own, self._live().unchecked) if term)

    def _scatter_calls(self) -> Iterable[ScatterCalls]:
        dtype = self.plan.accumulator_dtype
        for scatter in self.scatters:
            yield calls(scatter, self._indices(), is_dq=self.is_dq, exists=self.own.exists, dtype=dtype)

    def _exists(self, side: Side) -> str:
        """Return the condition that a position exists, broadcast to the tile.

        Only the walked side needs it: what positions of the own side past the end compute is never stored.
        """
        if not side.exists:
            return ""
        return f"{side.exists}{'[None, :]' if side is self.walked else '[:, None]'}"

    def _masks(self, side: Side, head_dim: str) -> Checked:
        everywhere = self.table or not self.two_kinds
        return Checked(side.mask(head_dim), side.mask(head_dim, check=everywhere))

    def _dot_options(self) -> str:
        if self.plan.query_dtype not in (torch.float32, torch.float64):
            return ""
        out = ", out_dtype=tl.float64" if self.plan.accumulator_dtype == torch.float64 else ""
        return f', input_precision="{self.plan.FLOAT32_PRECISION}"' + out

    # Parameters and calls.

    def _written(self) -> list[str]:
        """Return the gradients that the kernel stores."""
        plan = self.plan
        written = {"query": plan.WRITE_GRAD_QUERY, "key": plan.WRITE_GRAD_KEY, "value": plan.WRITE_GRAD_VALUE}
        return [f"grad_{name}" for name, is_written in written.items() if is_written]

    def _carried_names(self) -> list[str]:
        """Return what the loop adds up in registers."""
        return [*self._written(), *(scatter.carried for scatter in self.scatters if scatter.carried)]

    def _sums(self) -> str:
        return " and ".join(self._written()) or "the gradients of captured tensors"

    def _tensors(self) -> list[str]:
        """Return the tensors that the kernel reads; weights alone need no values."""
        return [name for name in TENSORS if name != "value" or self.plan.differentiates_scores]

    def _captured_args(self) -> tuple[Arg, ...]:
        printed = [mod for mod in (self.score, self.mask, self.grad) if mod is not None]
        args = [arg for mod in printed for arg in mod.args]
        return tuple(dict.fromkeys([*args, *(arg for scatter in self.scatters for arg in scatter.args)]))

    def _own_names(self) -> list[str]:
        own = ["query", "grad_output", *self._row_names()] if self.is_dq else ["key", "value"]
        return [*self._carried_names(), *(name for name in own if name != "value" or name in self._tensors())]

    def _walked_names(self) -> list[str]:
        tensors = ("key", "value") if self.is_dq else ("query", "grad_output")
        suffix = "kv" if self.is_dq else "q"
        names = [name for t in tensors for name in (f"{t}_ptr", f"{t}_stride_{suffix}")]
        names += [f"{t}_stride_d" for t in tensors if t not in self.plan.unit_stride]
        names += [] if self.is_dq else [f"{name}_ptr" for name in self._statistics()]
        names += ["sm_scale"] if self.plan.SM_SCALE is None else []
        names += ["KV_LEN" if self.is_dq else "Q_LEN"] if self.walked.exists else []
        uses_indices = self.score or self.mask or self.grad or self.scatters
        names += ["b", "h"] if uses_indices else []
        names += ["q_idx" if self.is_dq else "kv_idx"] if uses_indices or self.plan.DROPOUT is Draws.SINGLE else []
        names += self._dropout_names()
        names += [self.own.exists] if self.scatters and self.own.exists else []
        return names

    def _dropout_names(self) -> Iterable[str]:
        """What the loop needs to draw which weights it drops."""
        if self.plan.DROPOUT is Draws.NONE:
            return
        yield from ("stream", "drop_below")
        if self.plan.DROPOUT is Draws.GROUPED:
            yield "q_start" if self.is_dq else "kv_start"
        if self.plan.differentiates_scores:
            yield "keep_scale"

    def _statistics(self) -> tuple[str, ...]:
        """The tensors that hold one value a row."""
        tail = ["logsumexp_tail"] * self.plan.SUBTRACT_FIRST
        return ("row_shift", *tail, *["delta"] * self.plan.differentiates_scores)

    def _row_names(self) -> list[str]:
        """The values of the own rows that the loop of dQ takes."""
        return ["row_shift", *["row_tail"] * self.plan.SUBTRACT_FIRST, "delta"]

    def _captured_names(self) -> list[str]:
        return [arg.name for arg in self._captured_args()]

    def _loop_params(self) -> Iterable[str]:
        yield ", ".join(self._own_names())
        yield from grouped(self._walked_names(), 8)
        yield from grouped(self._captured_names(), 5)
        yield from ["indices_ptr" + self._tiles_per_block] if self.table else []
        gaps = "".join(f", gap_{n}, width_{n}" for n in range(self.gaps))
        yield f"first, last{gaps}" + (", CHECKED: tl.constexpr" if self.two_kinds else "")

    def _visit(self, ends: str, checked: bool, table: str, prefix: str) -> tuple[str, ...]:
        shifted = {f"{name}_ptr": f"{name}_ptr + aux_offset" for name in self._statistics()}
        moved = {f"{name}_ptr": f"{prefix}{name}_ptr" for name in ("query", "grad_output")}
        names = [{**shifted, **moved}.get(name, name) for name in self._walked_names()]
        lines = [", ".join(self._own_names()), *grouped(names, 6), *grouped(self._captured_names(), 5)]
        return (*lines, *([table] if table else []), ends + (f", {checked}" if self.two_kinds else ""))

    def _lists(self, prefix: str) -> Iterable[ListVisit]:
        if not self.table:
            return
        axis = "kv" if self.is_dq else "q"
        for full in ("", FULL) if self.plan.HAS_FULL_BLOCKS else ("",):
            indices = f"{axis}_indices" if self.derived else f"{full}{axis}_indices"
            table = f"{indices}_ptr + listed{self._tiles_per_block}"
            yield ListVisit(f"{full}{axis}_num_blocks", indices, self._visit("0, last", full == "", table, prefix))

    def _args(self) -> Iterable[Arg]:
        plan, grads = self.plan, self._written()
        dtypes = dict.fromkeys((*self._tensors(), *grads), plan.query_dtype)
        dtypes |= {"key": plan.key_dtype} | ({"value": plan.value_dtype} if "value" in dtypes else {})
        dtypes |= dict.fromkeys(self._statistics(), plan.accumulator_dtype)
        args = [
            Arg(f"{name}_ptr", Role.TENSOR, name, None, pointer_type(dtype), True) for name, dtype in dtypes.items()
        ]
        args += list(self._table_args()) if self.table else []
        for tensor in (*self._tensors(), *grads):
            args += self._stride_args(tensor)
        totals = ["Q_TOTAL", *["KV_TOTAL"] * (not self.is_dq), "SEQUENCES", "Q_HEADS"]
        args += length_args(plan, totals if plan.index_map.packs_sequences else ["Q_LEN", "KV_LEN", "Q_HEADS"])
        args += [Arg("sm_scale", Role.SCALE, "scale", None, "fp32", False)] * (plan.SM_SCALE is None)
        args += dropout_args(plan.DROPOUT, plan.accumulator_dtype)
        bounds = self.ranges.args if self.ranges else ()
        return dict.fromkeys([*args, *self._captured_args(), *bounds])

    def _stride_args(self, tensor: str) -> list[Arg]:
        row = "kv" if tensor in ("key", "value", "grad_key", "grad_value") else "q"
        gradients = {f"grad_{name}" for name in ("query", "key", "value")}
        return stride_args(tensor, row, self.plan, {*self.plan.unit_stride, *gradients})

    def _table_args(self) -> Iterable[Arg]:
        axis = "kv" if self.is_dq else "q"
        if self.derived:
            names = (f"{axis}_num_blocks", f"{FULL}{axis}_num_blocks", f"{axis}_offsets", f"{axis}_indices")
            yield from (Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in names)
            for dim, letter in enumerate("bh"):
                yield Arg(f"{names[0]}_stride_{letter}", Role.TABLE_STRIDE, names[0], dim, "i32", False)
            return
        prefixes = ("", FULL) if self.plan.HAS_FULL_BLOCKS else ("",)
        lists = [f"{full}{axis}_{name}" for full in prefixes for name in ("num_blocks", "indices")]
        yield from (Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in lists)
        for name in lists:
            for dim, letter in enumerate("bhr"):
                yield Arg(f"{name}_stride_{letter}", Role.TABLE_STRIDE, name, dim, "i32", False)


def _of_pairs(condition: str) -> str:
    """Return a condition for each pair of a tile; without one, true."""
    # Compiled, tl.broadcast_to takes no Python bool; the interpreter would.
    return f"tl.broadcast_to({condition}, score.shape)" if condition else "tl.full(score.shape, True, tl.int1)"

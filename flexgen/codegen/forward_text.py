"""The holes of the forward template: parameters, addresses, masks and calls, computed from a plan."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from flexgen.codegen.bounds_printer import PrintedRanges, RangesPrinter, SegmentNames, WalkedAxis
from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.dropout_text import dropout_args, kept_call
from flexgen.codegen.mod_printer import PrintedMod
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.sides import Pages, Side, dim_mask
from flexgen.codegen.source import Arg, Role
from flexgen.codegen.tile_args import dot_options, length_args, stride_args
from flexgen.codegen.walk_text import Checked, gap_count, grouped, span, walks_of
from flexgen.lowering.dropout import Draws
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton.plan import ForwardPlan

LISTS = ("kv_num_blocks", "kv_indices")
DERIVED_LISTS = ("kv_num_blocks", "full_kv_num_blocks", "kv_offsets", "kv_indices")


@dataclass(frozen=True, slots=True)
class ForwardHoles:
    """Everything the forward template prints besides the plan."""

    table: bool
    derived: bool
    tiles_divide_blocks: bool
    block_is_tile: bool
    two_kinds: bool
    attend_params: tuple[str, ...]
    forward_params: tuple[str, ...]
    column: str
    row: str
    uses_columns: bool
    gaps: tuple[int, ...]
    column_limit: str
    key_address: str
    value_address: str
    query_address: str
    output_address: str
    key_masks: Checked
    value_masks: Checked
    query_mask: str
    output_mask: str
    row_mask: str
    dot_options: str
    scale: str
    scale_score: bool
    softmax_scale: str
    pages: str
    kv_len: str
    key_conversion: str
    value_conversion: str
    exponent_scale: str
    natural_max: str
    accumulator: str
    score_call: str
    live: Checked
    kept_call: str
    stream_head: str
    bounds: tuple[str, ...]
    visits: tuple[tuple[str, ...], ...]
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


class ForwardText:
    """Computes the holes for one plan and its printed mods."""

    def __init__(
        self,
        plan: ForwardPlan,
        score: PrintedMod | None,
        mask: PrintedMod | None,
        context: PrintContext,
    ) -> None:
        self.plan, self.score, self.mask = plan, score, mask
        self.derived = plan.schedule.walk is Walk.DERIVED
        self.table = self.derived or plan.schedule.walk is Walk.TABLE
        self.packs = plan.index_map.packs
        self.kv_len = "KV_LEN" if plan.lengths_dtype is None else "kv_len"
        self.block_is_tile = plan.SPARSE_KV_BLOCK_SIZE == plan.BLOCK_N
        self.divides = not self.table or plan.SPARSE_Q_BLOCK_SIZE % plan.BLOCK_M == 0
        self.rows_masked = self.packs or not self.divides or not plan.IS_DIVISIBLE
        self.ranges = None if self.table else self._print_ranges(context)
        self.column = "column" if plan.index_map.has_offsets and self._uses_kv_idx else "kv_idx"
        self.row = "row" if plan.index_map.has_offsets else "q_idx"
        self.column_limit = self._column_limit()
        self.two_kinds = self._needs_two_kinds()
        self.walks = walks_of(self._segments, masked=mask is not None or not plan.IS_DIVISIBLE)
        self.gaps = gap_count(self.walks)
        unit = {*plan.unit_stride, "output"}
        self.rows = Side(self.row, "row_exists" if self.rows_masked else "", "q", plan.wide, unit)
        exists = "column_exists" if self.column_limit else ""
        self.keys = Side(self.column, exists, "kv", plan.wide, unit, self._pages())

    def holes(self) -> ForwardHoles:
        plan = self.plan
        args = self._forward_args()
        qk = dim_mask("qk_dim", plan.QK_HEAD_DIM, plan.QK_HEAD_DIM_ROUNDED)
        v = dim_mask("v_dim", plan.V_HEAD_DIM, plan.V_HEAD_DIM_ROUNDED)
        return ForwardHoles(
            table=self.table,
            derived=self.derived,
            tiles_divide_blocks=self.divides,
            block_is_tile=self.block_is_tile,
            two_kinds=self.two_kinds,
            attend_params=tuple(self._attend_params()),
            forward_params=tuple(arg.name for arg in args),
            column=self.column,
            row=self.row,
            uses_columns=not plan.USE_TMA or bool(self.column_limit) or self._uses_kv_idx,
            gaps=tuple(range(self.gaps)),
            column_limit=self.column_limit,
            key_address=self.keys.address("key", "qk_dim"),
            value_address=self.keys.address("value", "v_dim"),
            query_address=self.rows.address("query", "qk_dim", self._head_offset("query")),
            output_address=self.rows.address("output", "v_dim", self._head_offset("output")),
            key_masks=self._key_masks(qk),
            value_masks=self._key_masks(v),
            query_mask=self.rows.mask(qk),
            output_mask=self.rows.mask(v),
            row_mask="row_exists" if self.rows_masked else "",
            dot_options=dot_options(plan),
            scale=self._scale,
            scale_score=not plan.PRESCALE_QK and not plan.FOLD_SCALE and (plan.SM_SCALE != 1.0 or plan.K_SCALE),
            softmax_scale=self._softmax_scale,
            pages=self.keys.pages.name,
            kv_len=self.kv_len,
            key_conversion=self._conversion("key", plan.key_dtype),
            value_conversion=self._conversion("value", plan.value_dtype),
            exponent_scale="SCALE_LOG2_E" if plan.FOLD_SCALE else "LOG2_E",
            natural_max=f"row_max * {self._scale}" if plan.FOLD_SCALE else "row_max",
            accumulator=type_name(plan.accumulator_dtype),
            score_call=self._score_call(),
            live=self._live(),
            kept_call=kept_call(plan.DROPOUT, "q_idx[:, None]", "kv_idx[None, :]"),
            stream_head=self._indices()["h"],
            bounds=self.ranges.lines if self.ranges else (),
            visits=tuple(self._visits()),
            args=args,
            prelude=self.ranges.prelude if self.ranges else (),
        )

    # Facts about the text.

    @property
    def _tiles_per_block(self) -> str:
        return "" if self.block_is_tile else ", tiles_per_block"

    @property
    def _scale(self) -> str:
        return "score_scale" if self.plan.K_SCALE else self._softmax_scale

    @property
    def _softmax_scale(self) -> str:
        return "sm_scale" if self.plan.SM_SCALE is None else "SM_SCALE"

    @property
    def _has_mods(self) -> bool:
        return self.score is not None or self.mask is not None

    @property
    def _uses_kv_idx(self) -> bool:
        return self._has_mods or self.plan.DROPOUT is Draws.SINGLE

    def _pages(self) -> Pages:
        """How keys lie in pages."""
        page_size, block_n = self.plan.index_map.page_size, self.plan.BLOCK_N
        if not page_size:
            return Pages.NONE
        tiles_are_aligned = not self.table or self.plan.SPARSE_KV_BLOCK_SIZE % block_n == 0
        return Pages.OF_TILES if page_size % block_n == 0 and tiles_are_aligned else Pages.OF_KEYS

    def _conversion(self, tensor: str, dtype: torch.dtype) -> str:
        """The expression of a tile in the query's dtype, where it is stored in another."""
        if dtype == self.plan.query_dtype:
            return ""
        return f"{f'from_e4m3({tensor})' if tensor in self.plan.decoded else tensor}.to(query.dtype)"

    def _print_ranges(self, context: PrintContext) -> PrintedRanges:
        offset = "Q_OFFSET + " if self.plan.index_map.has_offsets else ""
        last = "Q_LEN - 1" if not self.plan.IS_DIVISIBLE else ""
        if self.packs:
            lo = f"{offset}row_tile * BLOCK_M // GQA_SHARED_HEADS"
            hi = f"{offset}tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // GQA_SHARED_HEADS, Q_LEN - 1)"
            heads = {"h_lo": "h_lo", "h_hi": "h_hi"}
        else:
            lo = f"{offset}q_start"
            hi = f"{offset}tl.minimum(q_start + BLOCK_M, Q_LEN) - 1" if last else f"{offset}q_start + BLOCK_M - 1"
            heads = {"h_lo": "h", "h_hi": "h"}
        inputs = {
            "b": "b",
            "h": "h",
            "q_idx": "q_idx",
            "q_lo": "q_lo",
            "q_hi": "q_hi",
            "Q_LEN": "(Q_OFFSET + Q_LEN)" if offset else "Q_LEN",
            "KV_LEN": f"(KV_OFFSET + {self.kv_len})" if offset else self.kv_len,
            **heads,
        }
        exists = "row_exists" if self.rows_masked else ""
        axis = WalkedAxis(self.kv_len, "BLOCK_N", "KV_OFFSET" if offset else "", exists)
        masked = self.mask is not None or not self.plan.IS_DIVISIBLE
        printed = RangesPrinter(context, inputs, axis).print(self.plan.schedule, full=masked)
        used = " ".join(line for line in printed.lines if not line.startswith("#"))
        corners = {"q_lo": lo, "q_hi": hi, "h_lo": "kv_head * GQA_SHARED_HEADS", "h_hi": "h_lo + GQA_SHARED_HEADS - 1"}
        needed = [name for name in corners if _mentions(used, name)]
        if "h_hi" in needed and "h_lo" not in needed:
            needed.insert(needed.index("h_hi"), "h_lo")
        lines = tuple(f"{name} = {corners[name]}" for name in needed)
        return PrintedRanges(lines + printed.lines, printed.names, printed.args, printed.prelude)

    def _column_limit(self) -> str:
        """The end of the columns a tile may use, where a tile can reach past it."""
        plan = self.plan
        if self.table and plan.SPARSE_KV_BLOCK_SIZE % plan.BLOCK_N:
            return f"tl.minimum((block + 1) * SPARSE_KV_BLOCK_SIZE, {self.kv_len})"
        return "" if plan.IS_DIVISIBLE else self.kv_len

    def _needs_two_kinds(self) -> bool:
        if self.table:
            return self.mask is not None and self.plan.HAS_FULL_BLOCKS
        has_full = any(name.full_hi for name in self._segments)
        return has_full and (self.mask is not None or not self.plan.IS_DIVISIBLE)

    @property
    def _segments(self) -> tuple[SegmentNames, ...]:
        return self.ranges.names if self.ranges else ()

    # Calls of the mods.

    def _indices(self) -> dict[str, str]:
        head = "h[:, None]" if self.packs else "h"
        return {"b": "b", "h": head, "q_idx": "q_idx[:, None]", "kv_idx": "kv_idx[None, :]"}

    def _score_call(self) -> str:
        return self.score.call(score="score", **self._indices()) if self.score else ""

    def _live(self) -> Checked:
        mask = self.mask.call(**self._indices()) if self.mask else ""
        exists = "column_exists[None, :]" if self.column_limit else ""
        checked = " & ".join(term for term in (exists, mask) if term)
        everywhere = self.table and self.two_kinds
        return Checked(checked, exists if everywhere else "")

    # Loads and stores.

    def _head_offset(self, tensor: str) -> str:
        """The offset of each row's own head, where a tile holds rows of several."""
        return f"head * {tensor}_stride_h + " if self.packs else ""

    def _key_masks(self, head_dim: str) -> Checked:
        everywhere = self.table or not self.two_kinds
        return Checked(self.keys.mask(head_dim), self.keys.mask(head_dim, check=everywhere))

    # Parameters and calls.

    def _captured_args(self) -> tuple[Arg, ...]:
        """Arguments the mods take, each once."""
        mods = [mod for mod in (self.score, self.mask) if mod is not None]
        return tuple(dict.fromkeys(arg for mod in mods for arg in mod.args))

    def _shared(self) -> list[str]:
        """Names that attend takes and forward has under the same name, in order."""
        plan = self.plan
        names = ["acc", "row_max", "row_sum", "query"]
        for tensor in ("key", "value"):
            names += [f"{tensor}_desc"] if plan.USE_TMA else [f"{tensor}_ptr", f"{tensor}_stride_kv"]
            names += [f"{tensor}_stride_page"] if plan.index_map.page_size else []
            names += [] if plan.USE_TMA or tensor in plan.unit_stride else [f"{tensor}_stride_d"]
        names += [self._scale] if (plan.SM_SCALE is None or plan.K_SCALE) and not plan.PRESCALE_QK else []
        names += [self.kv_len] if self.kv_len in self.column_limit else []
        names += ["page_table_ptr"] if plan.index_map.page_size else []
        names += ["KV_OFFSET"] if plan.index_map.has_offsets and self._uses_kv_idx else []
        names += ["b", "h"] if self._has_mods else []
        names += ["q_idx"] if self._uses_kv_idx else []
        names += ["stream", "drop_below"] if plan.DROPOUT is not Draws.NONE else []
        names += ["q_start"] if plan.DROPOUT is Draws.GROUPED else []
        return names + [arg.name for arg in self._captured_args()]

    def _lines_of_names(self) -> list[str]:
        """The names that attend takes, in the lines that its definition and its calls share."""
        shared = self._shared()
        captured = {arg.name for arg in self._captured_args()}
        own = [name for name in shared[4:] if name not in captured]
        mods = [name for name in shared[4:] if name in captured]
        return [", ".join(shared[:4]), *grouped(own, 8), *grouped(mods, 5)]

    def _attend_params(self) -> Iterable[str]:
        yield from self._lines_of_names()
        if self.table:
            yield "kv_indices_ptr" + self._tiles_per_block
        yield ", ".join(["first", "last", *(f"gap_{n}, width_{n}" for n in range(self.gaps))]) + (
            ", CHECKED: tl.constexpr" if self.two_kinds else ""
        )

    def _visits(self) -> Iterable[tuple[str, ...]]:
        """The lines of each call of attend."""
        if self.table:
            yield self._visit(f"kv_indices_ptr + listed{self._tiles_per_block}", "0, last", True)
            if self.plan.HAS_FULL_BLOCKS:
                indices = "kv_indices_ptr" if self.derived else "full_kv_indices_ptr"
                yield self._visit(f"{indices} + listed{self._tiles_per_block}", "0, last", False)
            return
        for walk in self.walks:
            yield self._visit("", span(walk, self.gaps), walk.checked)

    def _visit(self, table: str, span: str, checked: bool) -> tuple[str, ...]:
        return (*self._lines_of_names(), *([table] if table else []), span + (f", {checked}" if self.two_kinds else ""))

    def _forward_args(self) -> tuple[Arg, ...]:
        plan = self.plan
        outputs = ["output", *["logsumexp"] * plan.OUTPUT_LOGSUMEXP, *["max_scores"] * plan.OUTPUT_MAX]
        outputs += ["logsumexp_tail"] * plan.OUTPUT_TAIL
        args = [
            _pointer(name, torch.uint8 if name in plan.decoded else self._dtype(name))
            for name in ("query", "key", "value", *outputs)
        ]
        args += list(self._table_args()) if self.table else []
        args += self._side_args()
        args += self._own_args()
        for tensor, row in (("query", "q"), ("key", "kv"), ("value", "kv"), ("output", "q")):
            paged = plan.index_map.page_size > 0 and row == "kv"
            args += stride_args(tensor, row, plan, {*plan.unit_stride, "output"}, outer="page" if paged else "b")
        lengths = ["Q_LEN", "KV_LEN", "Q_HEADS", *["Q_OFFSET", "KV_OFFSET"] * plan.index_map.has_offsets]
        args += length_args(plan, ["Q_TOTAL", "SEQUENCES", "Q_HEADS"] if plan.index_map.packs_sequences else lengths)
        args += [Arg("v_scale", Role.SIDE_NUMBER, "v_scale", None, "fp32", False)] * (plan.V_SCALE == "number")
        args += [Arg("sm_scale", Role.SCALE, "scale", None, "fp32", False)] * (plan.SM_SCALE is None)
        args += dropout_args(plan.DROPOUT, plan.accumulator_dtype)
        bounds = self.ranges.args if self.ranges else ()
        return tuple(dict.fromkeys([*args, *self._captured_args(), *bounds]))

    def _side_args(self) -> list[Arg]:
        """What the call brings besides query, key and value, other than numbers."""
        plan = self.plan
        args = _side_args("kv_lengths", "b", plan.lengths_dtype) if plan.lengths_dtype is not None else []
        args += _side_args("page_table", "b", torch.int32) if plan.index_map.page_size else []
        args += _side_args("k_scale", "h", torch.float32) if plan.K_SCALE else []
        return args + (_side_args("v_scale", "h", torch.float32) if plan.V_SCALE == "head" else [])

    def _own_args(self) -> list[Arg]:
        """Pointers that only a kind of forward kernel takes."""
        return []

    def _dtype(self, tensor: str) -> torch.dtype:
        if tensor in self.plan.decoded:
            return torch.uint8
        dtypes: Mapping[str, torch.dtype] = {
            "query": self.plan.query_dtype,
            "key": self.plan.key_dtype,
            "value": self.plan.value_dtype,
            "output": self.plan.query_dtype,
        }
        return dtypes.get(tensor, self.plan.accumulator_dtype)

    def _table_args(self) -> Iterable[Arg]:
        if self.derived:
            yield from (Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in DERIVED_LISTS)
            for dim, axis in enumerate("bh"):
                yield Arg(f"kv_num_blocks_stride_{axis}", Role.TABLE_STRIDE, "kv_num_blocks", dim, "i32", False)
            return
        prefixes = ("", "full_") if self.plan.HAS_FULL_BLOCKS else ("",)
        lists = [prefix + name for prefix in prefixes for name in LISTS]
        yield from (Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in lists)
        for name in lists:
            for dim, axis in enumerate("bhq"):
                yield Arg(f"{name}_stride_{axis}", Role.TABLE_STRIDE, name, dim, "i32", False)


def _pointer(name: str, dtype: torch.dtype) -> Arg:
    return Arg(f"{name}_ptr", Role.TENSOR, name, None, pointer_type(dtype), True)


def _side_args(name: str, axis: str, dtype: torch.dtype) -> list[Arg]:
    """Pointer and stride of a tensor that a call brings besides query, key and value."""
    return [
        Arg(f"{name}_ptr", Role.SIDE, name, None, pointer_type(dtype), True),
        Arg(f"{name}_stride_{axis}", Role.SIDE_STRIDE, name, 0, "i32", True),
    ]


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None

"""The holes of the Hopper templates: parameters, key ranges, masks and calls, computed from a plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexgen.codegen.bounds_printer import PrintedRanges, RangesPrinter, WalkedAxis
from flexgen.codegen.dialects.gluon import translate
from flexgen.codegen.dialects.triton import SIGNATURE_NAMES, TYPE_NAMES, pointer_type
from flexgen.codegen.forward_text import DERIVED_LISTS, LISTS
from flexgen.codegen.gluon_live import print_live
from flexgen.codegen.gluon_walk import Gap, full_names, gap_names, gaps_of, lines_of, outside_of_full
from flexgen.codegen.mod_printer import PrintedMod
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.source import Arg, Role
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS, GluonPlan
from flexgen.lowering.schedule import Walk

WALKS = {Walk.RANGES: "key_ranges", Walk.DERIVED: "key_lists", Walk.TABLE: "key_table"}


@dataclass(frozen=True, slots=True)
class GluonHoles:
    """Everything the Hopper templates print besides the plan; lists of names are parameters and arguments alike."""

    walk: str
    listed: bool
    block_is_tile: bool
    libdevice: bool
    dtype: str
    rows: str
    tiles: tuple[str, ...]
    fulls: bool
    bounds: tuple[str, ...]
    reduced: bool
    gaps: tuple[Gap, ...]
    visited: str
    first_lo: str
    count: str
    key_tiles_params: tuple[str, ...]
    locate_args: tuple[str, ...]
    live_lines: tuple[str, ...]
    live_params: tuple[str, ...]
    finish_params: tuple[str, ...]
    finish_doc: str
    uses_q_idx: bool
    uses_kv_idx: bool
    scale: str
    scale_score: bool
    score_call: str
    needs_mask: str
    needs_mask_params: tuple[str, ...]
    masked: str
    uses_maximum: bool
    natural_max: str
    store_params: tuple[str, ...]
    place_params: tuple[str, ...]
    attend_params: tuple[str, ...]
    forward_params: tuple[str, ...]
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


class GluonText:
    """Computes the holes for one plan and its printed mods, which are in plain Triton's words still."""

    def __init__(
        self, plan: GluonPlan, score: PrintedMod | None, mask: PrintedMod | None, context: PrintContext
    ) -> None:
        self.plan, self.score = plan, score
        self.table = plan.schedule.walk is Walk.TABLE
        self.checks = mask is not None or plan.KV_TAIL or self.table
        self.listed = plan.schedule.walk is not Walk.RANGES
        self.live = print_live(plan.live_keys, context) if self.checks and plan.live_keys is not None else None
        self.mask = mask if self.live is None else None
        self.reduced = any(bound.reduce for segment in plan.schedule.segments for bound in segment.bounds)
        self.ranges = PrintedRanges((), (), (), ()) if self.listed else self._print_ranges(context)
        self.tiles = self._tiles()

    def holes(self) -> GluonHoles:
        plan = self.plan
        segments = self.ranges.names
        args = self._args()
        return GluonHoles(
            walk=WALKS[plan.schedule.walk],
            listed=self.listed,
            block_is_tile=plan.SPARSE_KV_BLOCK_SIZE == plan.BLOCK_N,
            libdevice=any(mod.libdevice for mod in (self.score, self.mask) if mod is not None),
            dtype=f"gl.{TYPE_NAMES[plan.query_dtype]}",
            rows="ROWS",
            tiles=self.tiles,
            fulls=bool(full_names(self.ranges.names)),
            bounds=tuple(translate(line) for line in self.ranges.lines),
            reduced=self.reduced,
            gaps=gaps_of(segments),
            visited=" + ".join(f"{s.hi} - {s.lo}" for s in segments),
            first_lo=segments[0].lo if segments else "",
            count="tiles[1]",
            key_tiles_params=("b", "h", "q_start", "Q_LEN", "KV_LEN", *_names(self._range_args())),
            locate_args=("row_tile", "Q_LEN", "Q_HEADS", *["batch_heads"] * plan.LONG_ROWS_FIRST),
            live_lines=self.live.lines if self.live else (),
            live_params=("b", "h", "q_idx", "Q_LEN", "KV_LEN", *_names(self.live.args if self.live else ())),
            finish_params=tuple(self._finish_params()),
            finish_doc=self._finish_doc(),
            uses_q_idx=self._uses_q_idx,
            uses_kv_idx=self.checks or self.score is not None,
            scale=self._scale,
            scale_score=not plan.FOLD_SCALE and (plan.SM_SCALE is None or plan.SM_SCALE * self._before != 1.0),
            score_call=self.score.call(score="score", **_INDICES) if self.score else "",
            needs_mask=self._needs_mask(),
            needs_mask_params=("step", "tile", "tiles", *["KV_LEN"] * (self.table or (self.listed and plan.KV_TAIL))),
            masked=self._masked(),
            uses_maximum=plan.OUTPUT_LOGSUMEXP or plan.OUTPUT_MAX,
            natural_max="row_max * MAX_SCALE" if plan.FOLD_SCALE or self._after != 1.0 else "row_max",
            store_params=tuple(self._store_params()),
            place_params=tuple(self._place_params()),
            attend_params=tuple(self._attend_params()),
            forward_params=_names(args),
            args=args,
            prelude=self.ranges.prelude + (self.live.prelude if self.live else ()),
        )

    # Facts about the text.

    @property
    def _scale(self) -> str:
        return "sm_scale" if self.plan.SM_SCALE is None else "SCORE_SCALE"

    @property
    def _before(self) -> float:
        return self.plan.score.before if self.plan.score else 1.0

    @property
    def _after(self) -> float:
        return self.plan.score.after if self.plan.score else 1.0

    @property
    def _uses_q_idx(self) -> bool:
        return self.score is not None or self.mask is not None or self.live is not None

    def _mod_args(self) -> tuple[Arg, ...]:
        mods = [mod for mod in (self.score, self.mask) if mod is not None]
        return tuple(dict.fromkeys(arg for mod in mods for arg in mod.args))

    # Key ranges.

    def _tiles(self) -> tuple[str, ...]:
        """The names of what `key_tiles` returns; the second one is how many tiles are visited."""
        match self.plan.schedule.walk:
            case Walk.DERIVED:
                return ("blocks", "count", "num_partial", "num_blocks")
            case Walk.TABLE:
                lists = ["partial", "count", "num_partial", "num_blocks", "past"]
                return (*lists, *["full"] * self.plan.HAS_FULL_BLOCKS)
        return ("first", "count", *gap_names(self.ranges.names), *full_names(self.ranges.names))

    def _print_ranges(self, context: PrintContext) -> PrintedRanges:
        names = ("b", "h", "q_lo", "q_hi", "Q_LEN", "KV_LEN")
        inputs = {name: name for name in names} | {"h_lo": "h", "h_hi": "h", "q_idx": "q_idx"}
        axis = WalkedAxis("KV_LEN", "BLOCK_N", "", "row_exists")
        printed = RangesPrinter(context, inputs, axis).print(self.plan.schedule, full=self.checks)
        used = " ".join(line for line in printed.lines if not line.startswith("#"))
        corners = {"q_lo": "q_start", "q_hi": "tl.minimum(q_start + BLOCK_M, Q_LEN) - 1"}
        lines = tuple(f"{name} = {text}" for name, text in corners.items() if name in used)
        lines = (*self._row_lines(), *lines) if self.reduced else lines
        return PrintedRanges(lines + printed.lines, printed.names, printed.args, printed.prelude)

    def _row_lines(self) -> tuple[str, ...]:
        """Define the row tile's queries, over which bounds are reduced."""
        block = self.plan.BLOCK_M
        rounded = 1 << (block - 1).bit_length()
        inside = "" if rounded == block else " & (row < BLOCK_M)"
        rows = (f"row = tl.arange(0, {rounded}, layout=ROW_LAYOUT)", "q_idx = q_start + row")
        return (*rows, f"row_exists = (q_idx < Q_LEN){inside}" if inside else "row_exists = q_idx < Q_LEN")

    def _needs_mask(self) -> str:
        """The condition under which a key tile is checked, "" where each one is."""
        if self.listed:
            listed = (
                "num_partial"
                if self.plan.SPARSE_KV_BLOCK_SIZE == self.plan.BLOCK_N
                else "num_partial * TILES_PER_BLOCK"
            )
            partial = f"step < {listed}"
            return f"({partial}) | ((tile + 1) * BLOCK_N > KV_LEN)" if self.table or self.plan.KV_TAIL else partial
        return outside_of_full(self.ranges.names)

    # Scores.

    def _finish_params(self) -> list[str]:
        names = ["score", "tile"] if self.checks or self.score else ["score"]
        names += ["checked"] if self._needs_mask() else []
        names += ["q_idx"] if self.score or self.mask else []
        names += ["kv_lo", "kv_width"] if self.live else []
        names += ["b", "h"] if self.score or self.mask else []
        names += ["KV_LEN"] if self.checks and self.live is None else []
        names += ["sm_scale"] if self.plan.SM_SCALE is None else []
        return [*names, *_names(self._mod_args())]

    def _finish_doc(self) -> str:
        parts = ["scale"] if not self.plan.FOLD_SCALE else []
        parts += ["score_mod"] if self.score else []
        parts += ["-inf where no key is live"] if self.checks else []
        return ", ".join(parts) or "nothing is left to do"

    def _masked(self) -> str:
        """The scores of a checked tile, "" where no tile is."""
        if not self.checks:
            return ""
        if self.live is not None:
            return f"keep_interval(score, {self.live.distance}, {self.live.width})"
        mask = [self.mask.call(**_INDICES)] if self.mask else []
        exists = ["(kv_idx < KV_LEN)[None, :]"] if self.table or self.plan.KV_TAIL else []
        return f'gl.where({" & ".join([*exists, *mask])}, score, float("-inf"))'

    # Parameters.

    def _place_params(self) -> Iterable[str]:
        strides = [f"{tensor}_stride_{axis}" for tensor in ("query", "key", "value") for axis in "bh"]
        yield from lines_of([*self._lengths(), *strides])
        yield from lines_of(_names(self._range_args()))

    def _attend_params(self) -> Iterable[str]:
        yield from lines_of([*self._outputs(), *self._lengths()])
        scale = ["sm_scale"] if self.plan.SM_SCALE is None else []
        captured = dict.fromkeys((*self._range_args(), *(self.live.args if self.live else ()), *self._mod_args()))
        yield from lines_of([*scale, *_names(captured)])

    def _store_params(self) -> Iterable[str]:
        yield "acc, row_max, row_sum, b, h, row_start"
        yield from lines_of([*self._outputs(), "Q_LEN", "Q_HEADS"])

    def _lengths(self) -> list[str]:
        return ["Q_LEN", "KV_LEN", "Q_HEADS", *["batch_heads"] * self.plan.LONG_ROWS_FIRST]

    def _outputs(self) -> list[str]:
        return [f"{name}_ptr" for name in self._output_names()] + [f"output_stride_{axis}" for axis in "bhq"]

    def _output_names(self) -> list[str]:
        plan = self.plan
        aux = {"logsumexp": plan.OUTPUT_LOGSUMEXP, "max_scores": plan.OUTPUT_MAX, "logsumexp_tail": plan.OUTPUT_TAIL}
        return ["output", *(name for name, wanted in aux.items() if wanted)]

    def _args(self) -> tuple[Arg, ...]:
        plan = self.plan
        args = [_descriptor("query", WARPGROUP_ROWS, plan.QK_HEAD_DIM_ROUNDED, plan)]
        args += [_descriptor("key", plan.BLOCK_N, plan.QK_HEAD_DIM_ROUNDED, plan)]
        args += [_descriptor("value", plan.BLOCK_N, plan.V_HEAD_DIM_ROUNDED, plan)]
        for name in self._output_names():
            dtype = plan.query_dtype if name == "output" else plan.accumulator_dtype
            args.append(Arg(f"{name}_ptr", Role.TENSOR, name, None, pointer_type(dtype), True))
        for tensor in ("query", "key", "value", "output"):
            args += [_stride(tensor, dim, axis, "i64") for dim, axis in enumerate("bh")]
        args.append(_stride("output", 2, "q", "i64" if "output" in plan.wide else "i32"))
        lengths = ["Q_LEN", "KV_LEN", "Q_HEADS", *["BATCH"] * (plan.LONG_ROWS_FIRST or plan.PERSISTENT)]
        args += [Arg(name, Role.LENGTH, name, None, "i32", False) for name in lengths]
        args += [Arg("sm_scale", Role.SCALE, "scale", None, "fp32", False)] * (plan.SM_SCALE is None)
        live = self.live.args if self.live else ()
        return tuple(dict.fromkeys([*args, *self._mod_args(), *self._range_args(), *live]))

    def _range_args(self) -> tuple[Arg, ...]:
        """Arguments that finding a row tile's key tiles takes."""
        match self.plan.schedule.walk:
            case Walk.DERIVED:
                return derived_args()
            case Walk.TABLE:
                return table_args(self.plan.HAS_FULL_BLOCKS)
        return self.ranges.args


_INDICES = {"b": "b", "h": "h", "q_idx": "q_idx[:, None]", "kv_idx": "kv_idx[None, :]"}


def derived_args() -> tuple[Arg, ...]:
    """Return the arguments of a derived table: pointers to its lists, and strides of those by row of blocks."""
    return (*_lists(DERIVED_LISTS), *_list_strides("kv_num_blocks", "bh"))


def table_args(has_full_blocks: bool) -> tuple[Arg, ...]:
    """Return the arguments of a block mask: pointers to its lists, and their strides."""
    names = [prefix + name for prefix in ("", "full_")[: 1 + has_full_blocks] for name in LISTS]
    return (*_lists(names), *(stride for name in names for stride in _list_strides(name, "bhq")))


def _lists(names: Iterable[str]) -> list[Arg]:
    return [Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in names]


def _list_strides(name: str, axes: str) -> list[Arg]:
    return [Arg(f"{name}_stride_{axis}", Role.TABLE_STRIDE, name, dim, "i32", False) for dim, axis in enumerate(axes)]


def _names(args: Iterable[Arg]) -> tuple[str, ...]:
    return tuple(arg.name for arg in args)


def _descriptor(tensor: str, rows: int, head_dim: int, plan: GluonPlan) -> Arg:
    kind = f"tensordesc<{SIGNATURE_NAMES[plan.query_dtype]}[1, 1, {rows}, {head_dim}]>"
    return Arg(f"{tensor}_desc", Role.DESCRIPTOR, tensor, None, kind, False)


def _stride(tensor: str, dim: int, axis: str, kind: str) -> Arg:
    return Arg(f"{tensor}_stride_{axis}", Role.TENSOR_STRIDE, tensor, dim, kind, tensor == "output")

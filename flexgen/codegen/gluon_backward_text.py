"""The holes of the Hopper backward templates: parameters, ranges, masks and calls, computed from a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flexgen.codegen.bounds_printer import PrintedRanges, RangesPrinter, WalkedAxis
from flexgen.codegen.dialects.gluon import translate
from flexgen.codegen.dialects.triton import SIGNATURE_NAMES, TYPE_NAMES, pointer_type
from flexgen.codegen.gluon_live import print_live
from flexgen.codegen.gluon_walk import Gap, full_names, gap_names, gaps_of, lines_of, outside_of_full
from flexgen.codegen.mod_printer import PrintedMod
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.source import Arg, Role
from flexgen.ir.graph import Node, topological
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.choose_backward import walked_axis
from flexgen.lowering.gluon_hopper.plan import WARPGROUP_ROWS
from flexgen.lowering.schedule import Walk
from flexgen.lowering.triton.backward_plan import BackwardKernel

WALKS = {Walk.RANGES: "ranges", Walk.DERIVED: "lists", Walk.TABLE: "table"}
# Ops that are finite where their operands are, up to overflow.
_KEEPS_FINITE = frozenset(
    {"input", "const", "add", "sub", "mul", "neg", "abs", "tanh", "sigmoid", "sin", "cos", "erf", "where", "cast"}
)


@dataclass(frozen=True, slots=True)
class Side:
    """The queries or the keys of a tile of scores, by the names that the templates use."""

    noun: str
    plural: str
    axis: str
    index: str
    start: str
    block: str
    length: str
    sparse: str


QUERIES = Side("query", "queries", "q", "q_idx", "q_start", "BLOCK_M", "Q_LEN", "SPARSE_Q_BLOCK_SIZE")
KEYS = Side("key", "keys", "kv", "kv_idx", "kv_start", "BLOCK_N", "KV_LEN", "SPARSE_KV_BLOCK_SIZE")


@dataclass(frozen=True, slots=True)
class Sum:
    """A gradient that a kernel adds up: its layouts, its head dim as the tile has it and as the tensor does."""

    name: str
    layout: str
    operands: str
    size: str
    exact: str
    padded: bool
    scaled: bool  # by the softmax scale, when it is stored


@dataclass(frozen=True, slots=True)
class GluonBackwardHoles:
    """Everything the templates print besides the plan; lists of names are parameters and arguments alike."""

    entry: str
    own: Side
    walked: Side
    walk: str
    walk_name: str
    past_lists: bool
    walk_params: tuple[str, ...]
    lists: str
    listed: bool
    block_is_tile: bool
    libdevice: bool
    dtype: str
    sums: tuple[Sum, ...]
    tiles: tuple[str, ...]
    fulls: bool
    bounds: tuple[str, ...]
    reduced: bool
    gaps: tuple[Gap, ...]
    visited: str
    first_lo: str
    live_lines: tuple[str, ...]
    live_params: tuple[str, ...]
    weigh_params: tuple[str, ...]
    weigh_uses_walked: bool
    uses_own: bool
    uses_tile: bool
    hides_tile: bool
    tile: str
    scale: str
    scale_score: bool
    score_call: str
    needs_mask: str
    needs_mask_params: tuple[str, ...]
    masked: str
    weight: str
    differentiate_params: tuple[str, ...]
    differentiate_uses_walked: bool
    delta: str
    grad_call: str
    grad_reads_score: bool
    grad_masked: bool
    in_flight: str
    query_bytes: tuple[str, ...]
    descriptors: tuple[str, ...]
    barriers: tuple[str, ...]
    buffers: tuple[str, ...]
    produce_params: tuple[str, ...]
    consume_params: tuple[str, ...]
    params: tuple[str, ...]
    args: tuple[Arg, ...]
    prelude: tuple[str, ...]


class GluonBackwardText:
    """Computes the holes for one plan and its printed mods, which are in plain Triton's words still.

    Args:
        grad: the printed gradient of score_mod, None where it is the identity or nothing is differentiated; `dscore` is
            its graph.
    """

    def __init__(
        self,
        plan: GluonBackwardPlan,
        score: PrintedMod | None,
        mask: PrintedMod | None,
        grad: PrintedMod | None,
        dscore: Node | None,
        context: PrintContext,
    ) -> None:
        self.plan, self.score, self.grad = plan, score, grad
        self.is_dq = plan.kernel is BackwardKernel.DQ
        self.own, self.walked = (QUERIES, KEYS) if self.is_dq else (KEYS, QUERIES)
        self.table = plan.schedule.walk is Walk.TABLE
        self.listed = plan.schedule.walk is not Walk.RANGES
        self.past_lists = self.table and plan.PIPELINED  # an empty list visits a tile past the end
        # What is prepared for rows after the last query makes weights 0, unless a mod turns their scores into NaN.
        tail = plan.WALKED_TAIL and (self.is_dq or score is not None)
        self.bounds_walked = tail or self.past_lists
        self.checks = mask is not None or self.bounds_walked
        interval = plan.live if self.checks else None
        self.live = print_live(interval, context, walked_axis(plan)) if interval is not None else None
        self.mask = mask if self.live is None else None
        self.reduced = any(bound.reduce for segment in plan.schedule.segments for bound in segment.bounds)
        self.ranges = PrintedRanges((), (), (), ()) if self.listed else self._print_ranges(context)
        self.needs_mask = self._needs_mask()
        self.grad_is_finite = dscore is None or all(node.op in _KEEPS_FINITE for node in topological(dscore))
        inputs = {str(node.attr) for node in topological(dscore) if node.op == "input"} if dscore is not None else set()
        self.grad_reads_score = self.grad is not None and "score" in inputs

    def holes(self) -> GluonBackwardHoles:
        plan, segments = self.plan, self.ranges.names
        args = self._args()
        own, walked = ("[:, None]", "[None, :]")
        indices = {"b": "b", "h": "h", "q_idx": "q_idx", "kv_idx": "kv_idx"}
        indices |= {self.own.index: self.own.index + own, self.walked.index: self.walked.index + walked}
        grad_call = self.grad.call(score="score", grad="grad_score", **indices) if self.grad else ""
        return GluonBackwardHoles(
            entry=plan.sums.value,
            own=self.own,
            walked=self.walked,
            walk=WALKS[plan.schedule.walk],
            past_lists=self.past_lists,
            walk_name="key_tiles" if self.is_dq else "query_tiles",
            walk_params=("b", "h", self.own.start, "Q_LEN", "KV_LEN", *_names(self._range_args())),
            lists=self.walked.axis,
            listed=self.listed,
            block_is_tile=self._tiles_per_block() == 1,
            libdevice=any(mod.libdevice for mod in (self.score, self.mask, self.grad) if mod is not None),
            dtype=f"gl.{TYPE_NAMES[plan.query_dtype]}",
            sums=tuple(self._sums()),
            tiles=self._tiles(),
            fulls=bool(full_names(segments)),
            bounds=tuple(translate(line) for line in self.ranges.lines),
            reduced=self.reduced,
            gaps=gaps_of(segments),
            visited=" + ".join(f"{s.hi} - {s.lo}" for s in segments),
            first_lo=segments[0].lo if segments else "",
            live_lines=self.live.lines if self.live else (),
            live_params=("b", "h", self.own.index, "Q_LEN", "KV_LEN", *_names(self.live.args if self.live else ())),
            weigh_params=tuple(self._weigh_params()),
            weigh_uses_walked=self.score is not None or self.checks,
            uses_own=self._uses_own,
            uses_tile=self._uses_tile,
            hides_tile=self._uses_tile and not self.listed,
            tile="tile" if self.listed else "hidden(tile)",
            scale=self._scale,
            scale_score=self._scales_score,
            score_call=self.score.call(score="score", **indices) if self.score else "",
            needs_mask=self.needs_mask,
            needs_mask_params=("step", *self._needs_mask_params()),
            masked=self._masked(indices),
            weight=self._weight(),
            differentiate_params=tuple(self._differentiate_params()),
            differentiate_uses_walked=self.grad is not None,
            delta="delta[:, None]" if self.is_dq else "delta[None, :]",
            grad_call=grad_call,
            grad_reads_score=self.grad_reads_score,
            grad_masked=self._grad_masked,
            in_flight=", ".join([*(s.name for s in self._sums()), *self._operands()]),
            query_bytes=tuple(f"{name}_desc.block_type.nbytes" for name in ("query", *self._statistics()[:-1])),
            descriptors=tuple(f"{name}_desc" for name in self._described()),
            barriers=("own_full", *(f"{ring}_{state}" for ring in self._rings() for state in ("full", "empty"))),
            buffers=tuple(self._buffers()),
            produce_params=tuple(self._produce_params()),
            consume_params=tuple(self._consume_params()),
            params=_names(args),
            args=args,
            prelude=self.ranges.prelude + (self.live.prelude if self.live else ()),
        )

    # Facts about the text.

    @property
    def _scale(self) -> str:
        return "sm_scale" if self.plan.SM_SCALE is None else "SM_SCALE"

    @property
    def _scales_score(self) -> bool:
        return not self.plan.FOLD_SCALE and self.plan.SM_SCALE != 1.0

    @property
    def _grad_masked(self) -> bool:
        return self.grad is not None and self.checks and not self.grad_is_finite

    @property
    def _uses_own(self) -> bool:
        return self.score is not None or self.mask is not None or self.grad is not None or self.live is not None

    @property
    def _uses_tile(self) -> bool:
        mods = self.score is not None or self.grad is not None
        return mods or self.checks

    def _mod_args(self) -> tuple[Arg, ...]:
        mods = [mod for mod in (self.score, self.mask, self.grad) if mod is not None]
        return tuple(dict.fromkeys(arg for mod in mods for arg in mod.args))

    def _tiles_per_block(self) -> int:
        plan = self.plan
        if self.is_dq:
            return plan.SPARSE_KV_BLOCK_SIZE // plan.BLOCK_N
        return plan.SPARSE_Q_BLOCK_SIZE // plan.BLOCK_M

    def _sums(self) -> Iterable[Sum]:
        plan = self.plan
        qk = ("QK_HEAD_DIM_ROUNDED", "QK_HEAD_DIM", plan.QK_HEAD_DIM != plan.QK_HEAD_DIM_ROUNDED, True)
        v = ("V_HEAD_DIM_ROUNDED", "V_HEAD_DIM", plan.V_HEAD_DIM != plan.V_HEAD_DIM_ROUNDED, False)
        written = {"query": plan.WRITE_GRAD_QUERY, "key": plan.WRITE_GRAD_KEY, "value": plan.WRITE_GRAD_VALUE}
        for name, is_written in written.items():
            if is_written:
                layout = f"{name.upper()}_SUMS"
                yield Sum(f"grad_{name}", layout, f"{name.upper()}_OPERANDS", *(v if name == "value" else qk))

    def _operands(self) -> list[str]:
        """Names of the tiles that are multiplied into the sums, which stay in registers meanwhile."""
        if self.is_dq:
            return ["operand"]
        return ["weight_operand"] * self.plan.WRITE_GRAD_VALUE + ["grad_operand"] * self.plan.WRITE_GRAD_KEY

    # Ranges.

    def _tiles(self) -> tuple[str, ...]:
        """The names of what the walk's function returns; the second one is how many tiles are visited."""
        pipelined = self.plan.PIPELINED
        match self.plan.schedule.walk:
            case Walk.DERIVED:
                return ("blocks", "count", "num_partial", *["num_blocks"] * pipelined)
            case Walk.TABLE:
                lists = ["partial", "count", "num_partial", "num_blocks"]
                return (*lists, *["past"] * pipelined, *["full"] * self.plan.HAS_FULL_BLOCKS)
        return ("first", "count", *gap_names(self.ranges.names), *full_names(self.ranges.names))

    def _print_ranges(self, context: PrintContext) -> PrintedRanges:
        own, walked = self.own, self.walked
        names = ("b", "h", f"{own.axis}_lo", f"{own.axis}_hi", "Q_LEN", "KV_LEN")
        inputs = {name: name for name in names} | {"h_lo": "h", "h_hi": "h", own.index: own.index}
        axis = WalkedAxis(walked.length, walked.block, "", "row_exists")
        printed = RangesPrinter(context, inputs, axis).print(self.plan.schedule, full=self.checks)
        used = " ".join(line for line in printed.lines if not line.startswith("#"))
        last = f"tl.minimum({own.start} + {own.block}, {own.length}) - 1"
        corners = {f"{own.axis}_lo": own.start, f"{own.axis}_hi": last}
        lines = tuple(f"{name} = {text}" for name, text in corners.items() if name in used)
        if self.reduced:
            rows = f"{own.index} = {own.start} + tl.arange(0, {own.block}, layout=ROW_LAYOUT)"
            lines = (rows, f"row_exists = {own.index} < {own.length}", *lines)
        return PrintedRanges(lines + printed.lines, printed.names, printed.args, printed.prelude)

    def _needs_mask(self) -> str:
        """The condition under which a tile is checked, "" where each one is or none."""
        if not self.checks:
            return ""
        if not self.listed:
            return outside_of_full(self.ranges.names)
        partial = "step < num_partial" + ("" if self._tiles_per_block() == 1 else " * TILES_PER_BLOCK")
        if not self.bounds_walked:
            return partial
        return f"({partial}) | ((tile + 1) * {self.walked.block} > {self.walked.length})"

    def _needs_mask_params(self) -> tuple[str, ...]:
        return ("tile", "tiles", *[self.walked.length] * (self.listed and self.bounds_walked))

    # Scores.

    def _weigh_params(self) -> list[str]:
        names = ["score", "row_shift", *["row_tail"] * self.plan.SUBTRACT_FIRST]
        names += ["tile"] if self.score is not None or self.checks else []
        names += ["checked"] if self.needs_mask else []
        names += [self.own.index] if self.score or self.mask else []
        names += [f"{self.walked.axis}_lo", f"{self.walked.axis}_width"] if self.live else []
        names += ["b", "h"] if self.score or self.mask else []
        names += [self.walked.length] if self.bounds_walked and self.live is None else []
        names += ["sm_scale"] if self.plan.SM_SCALE is None and self._scales_score else []
        mods = [mod for mod in (self.score, self.mask) if mod is not None]
        return [*names, *_names(dict.fromkeys(arg for mod in mods for arg in mod.args))]

    def _masked(self, indices: Mapping[str, str]) -> str:
        """The scores of a checked tile, "" where no tile is."""
        if not self.checks:
            return ""
        if self.live is not None:
            return f"keep_interval(score, {self.live.distance}, {self.live.width})"
        exists = [f"({self.walked.index} < {self.walked.length})[None, :]"] * self.bounds_walked
        mask = [self.mask.call(**indices)] if self.mask else []
        return f'gl.where({" & ".join([*exists, *mask])}, score, float("-inf"))'

    def _weight(self) -> str:
        broadcast = "[:, None]" if self.is_dq else "[None, :]"
        if self.plan.SUBTRACT_FIRST:
            return f"gl.exp2((score - row_shift{broadcast} - row_tail{broadcast}) * LOG2_E)"
        return f"gl.exp2(score * {'SCALE_LOG2_E' if self.plan.FOLD_SCALE else 'LOG2_E'} - row_shift{broadcast})"

    def _differentiate_params(self) -> list[str]:
        names = ["weight", "grad_weight", "delta"]
        if self.grad is None:
            return names
        names = ["score", *names] if self.grad_reads_score else names
        names += ["tile", *["checked"] * (self._grad_masked and bool(self.needs_mask)), self.own.index, "b", "h"]
        names += ["sm_scale"] if self.plan.SM_SCALE is None and self.grad_reads_score else []
        return [*names, *_names(self.grad.args)]

    # Parameters.

    def _rings(self) -> tuple[str, str]:
        return ("key", "value") if self.is_dq else ("query", "grad_output")

    def _read(self) -> list[str]:
        """Return the tensors whose tiles are copied; weights alone need no values."""
        values = ["value"] * self.plan.differentiates_scores
        return ["query", "grad_output", "key", *values]

    def _statistics(self) -> list[str]:
        """Return the tensors of one value a row; the last one is needed later than the others."""
        tail = ["row_tail"] * self.plan.SUBTRACT_FIRST
        return ["row_shift", *tail, "delta"]

    def _described(self) -> list[str]:
        if self.is_dq:
            return self._read()
        return [*self._read(), *(name for name in self._statistics() if name != "delta" or self._has_delta)]

    @property
    def _has_delta(self) -> bool:
        return self.plan.differentiates_scores

    def _buffers(self) -> list[str]:
        tiles = {"query": "queries", "grad_output": "grad_outputs", "key": "keys", "value": "values"}
        rows = {"row_shift": "row_shifts", "row_tail": "row_tails", "delta": "deltas"}
        return [(tiles | rows)[name] for name in self._described()]

    def _produce_params(self) -> Iterable[str]:
        strides = [f"{tensor}_stride_{axis}" for tensor in self._read() for axis in "bh"]
        yield from lines_of(["Q_LEN", "KV_LEN", "Q_HEADS", *strides])
        yield from lines_of(_names(self._range_args()))

    def _consume_params(self) -> Iterable[str]:
        rows = [f"{name}_ptr" for name in self._statistics()] if self.is_dq else []
        sums = [f"{s.name}_ptr" for s in self._sums()]
        sums += [f"{s.name}_stride_{axis}" for s in self._sums() for axis in ("b", "h", self.own.axis)]
        yield from lines_of([*rows, *sums, "Q_LEN", "KV_LEN", "Q_HEADS"])
        scale = ["sm_scale"] if self.plan.SM_SCALE is None else []
        captured = dict.fromkeys((*self._range_args(), *(self.live.args if self.live else ()), *self._mod_args()))
        yield from lines_of([*scale, *_names(captured)])

    def _args(self) -> tuple[Arg, ...]:
        plan = self.plan
        args = [self._descriptor(name) for name in self._read()]
        rows = [name for name in self._statistics() if name != "delta" or self._has_delta]
        if self.is_dq:
            args += [Arg(f"{name}_ptr", Role.TENSOR, name, None, "*fp32", True) for name in rows]
        else:
            kind = f"tensordesc<fp32[{plan.BLOCK_M}]>"
            args += [Arg(f"{name}_desc", Role.DESCRIPTOR, name, None, kind, False) for name in rows]
        sums = [s.name for s in self._sums()]
        args += [Arg(f"{name}_ptr", Role.TENSOR, name, None, pointer_type(plan.query_dtype), True) for name in sums]
        for tensor in (*self._read(), *sums):
            args += [_stride(tensor, dim, axis, "i64") for dim, axis in enumerate("bh")]
        for name in sums:
            args.append(_stride(name, 2, self.own.axis, "i64" if name in plan.wide else "i32"))
        args += [Arg(name, Role.LENGTH, name, None, "i32", False) for name in ("Q_LEN", "KV_LEN", "Q_HEADS")]
        args += [Arg("sm_scale", Role.SCALE, "scale", None, "fp32", False)] * (plan.SM_SCALE is None)
        live = self.live.args if self.live else ()
        return tuple(dict.fromkeys([*args, *self._mod_args(), *self._range_args(), *live]))

    def _descriptor(self, tensor: str) -> Arg:
        plan = self.plan
        is_own = tensor in (("query", "grad_output") if self.is_dq else ("key", "value"))
        rows = WARPGROUP_ROWS if is_own else plan.BLOCK_N if self.is_dq else plan.BLOCK_M
        head_dim = plan.QK_HEAD_DIM_ROUNDED if tensor in ("query", "key") else plan.V_HEAD_DIM_ROUNDED
        kind = f"tensordesc<{SIGNATURE_NAMES[plan.query_dtype]}[1, 1, {rows}, {head_dim}]>"
        return Arg(f"{tensor}_desc", Role.DESCRIPTOR, tensor, None, kind, False)

    def _range_args(self) -> tuple[Arg, ...]:
        """Arguments that finding a program's tiles takes."""
        axis = self.walked.axis
        match self.plan.schedule.walk:
            case Walk.DERIVED:
                names = (f"{axis}_num_blocks", f"full_{axis}_num_blocks", f"{axis}_offsets", f"{axis}_indices")
                return (*_lists(names), *_list_strides(names[0], "bh"))
            case Walk.TABLE:
                prefixes = ("", "full_")[: 1 + self.plan.HAS_FULL_BLOCKS]
                lists = [f"{full}{axis}_{name}" for full in prefixes for name in ("num_blocks", "indices")]
                return (*_lists(lists), *(stride for name in lists for stride in _list_strides(name, "bhr")))
        return self.ranges.args


def _lists(names: Iterable[str]) -> list[Arg]:
    return [Arg(f"{name}_ptr", Role.TABLE, name, None, "*i32", True) for name in names]


def _list_strides(name: str, axes: str) -> list[Arg]:
    return [Arg(f"{name}_stride_{axis}", Role.TABLE_STRIDE, name, dim, "i32", False) for dim, axis in enumerate(axes)]


def _names(args: Iterable[Arg]) -> tuple[str, ...]:
    return tuple(arg.name for arg in args)


def _stride(tensor: str, dim: int, axis: str, kind: str) -> Arg:
    return Arg(
        f"{tensor}_stride_{axis}",
        Role.TENSOR_STRIDE,
        tensor,
        dim,
        kind,
        tensor.startswith("grad_") and tensor != "grad_output",
    )

"""Emits a stand-alone module of one configuration: its kernels, their launches, and checks of what they rely on."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexgen.codegen.dialects.gluon import spoken_releases
from flexgen.codegen.export.conditions import condition_text
from flexgen.codegen.export.exported import Exported, Pass, Table
from flexgen.codegen.export.fit import fit
from flexgen.codegen.export.grids import backward_grid, delta_grid, forward_grid
from flexgen.codegen.export.launch_text import LaunchText, launch_text, typed_kernel
from flexgen.codegen.export.merge import Module, Section, docstring, merge
from flexgen.codegen.export.names import HostNames
from flexgen.codegen.export.needs import INPUTS, copied, length_multiples, unit_strides
from flexgen.codegen.export.splits import split_text
from flexgen.codegen.header import row
from flexgen.codegen.render import render
from flexgen.codegen.source import KernelSource, Role
from flexgen.errors import UnsupportedProblemError
from flexgen.ir.graph import Axis, Buffer
from flexgen.lowering.schedule import Walk
from flexgen.lowering.table_plan import TablePlan
from flexgen.lowering.triton.backward_plan import PLAIN_ROWS, Accumulation
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import DecodePlan

_TORCH_OF = {"*i32": "torch.int32", "*i64": "torch.int64", "*fp32": "torch.float32", "*fp64": "torch.float64"}
_HARDWARE_ONLY = ("inline_asm", "libdevice", "@gluon.jit")  # what Triton's interpreter lacks
_DESCRIBING = (  # what descriptors of the copy engine are made with
    "from triton.experimental.gluon import language as gl",
    "from triton.experimental.gluon.nvidia.hopper import TensorDescriptor",
)


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """A kernel that a packed module launches.

    Attributes:
        name: its name in the module; `source.entry` is that in its own text and in its machine code.
        options: Triton's compiler's.
        grid: the expression of how many programs run.
        values: the expression of each argument's value.
        stage: "forward", "backward_delta" and so on, where `Lowered` knows it; else "".
    """

    name: str
    source: KernelSource
    options: Mapping[str, int]
    grid: str
    values: tuple[str, ...]
    stage: str


@dataclass(frozen=True, slots=True)
class TableText:
    """The host function that derives a table.

    Attributes:
        function: its name.
        own, walked: "q" or "kv": whose blocks have a list each, and whose are listed.
        own_blocks, walked_blocks: expressions of how many there are.
        by_batch, by_head: the lists differ between batches, between heads.
        summaries: launches that reduce what depends on one axis, with the tensors they fill.
        count, fill: launches that count what each row lists, and list it.
        drop: that of the kernel which leaves out blocks without a live pair, where the rule cannot tell all of them.
    """

    function: str
    own: str
    walked: str
    own_blocks: str
    walked_blocks: str
    by_batch: bool
    by_head: bool
    summaries: tuple[SummaryText, ...]
    count: LaunchText
    fill: LaunchText
    drop: LaunchText | None


@dataclass(frozen=True, slots=True)
class SummaryText:
    """The extremes of one axis: (name, dtype) of each tensor, their shape, and the kernel that fills them."""

    tensors: tuple[tuple[str, str], ...]
    shape: str
    launch: LaunchText


@dataclass(frozen=True, slots=True)
class PassText:
    """One backward kernel's launch, the table that it walks, if it does, and whether no launch before derived that."""

    launch: LaunchText
    table: TableText | None = None
    derives: bool = False


def emit_module(exported: Exported) -> str:
    """Return the text of a stand-alone module.

    Raises:
        UnsupportedProblemError: the kernels need what plain launches do not give.
    """
    _refuse(exported)
    return _ModuleText(exported).text()


def packed_kernels(exported: Exported) -> tuple[PackedKernel, ...]:
    """Return the kernels that a packed module launches, under the names it has for them."""
    return tuple(_ModuleText(exported).packed())


def _refuse(exported: Exported) -> None:
    if exported.plan.schedule.walk is Walk.TABLE:
        raise UnsupportedProblemError(
            "a kernel that walks a block mask's lists cannot be exported",
            why="a stand-alone module has no block mask to read the lists from",
            fix="export the mask_mod without the block mask: its bounds are proved, or its table derived",
        )
    passes = exported.backward.passes if exported.backward else ()
    if any(one.plan.accumulation is not Accumulation.FLOAT for one in passes):
        raise UnsupportedProblemError(
            "deterministic gradients of captured tensors cannot be exported",
            why="they take two more passes and sums in fixed point, which a stand-alone module does not have",
            fix="export outside of torch.use_deterministic_algorithms(True), or run through flexgen.compile",
        )


class _ModuleText:
    """Computes the holes of the module's template."""

    def __init__(self, exported: Exported) -> None:
        self.exported, self.plan, self.backward = exported, exported.plan, exported.backward
        self.tables = self._own_tables()
        self.merged = merge(self._modules())
        written = {name for section in self.merged.sections for name in section.names.values()}
        self.names = HostNames.of(exported.mods, written, packed=exported.packed)
        self.sections = {section.module.prefix: section for section in self.merged.sections}

    def text(self) -> str:
        exported, plan = self.exported, self.plan
        lines = render(
            "export/module.py.jinja",
            summary=self._summary(),
            how=how_text(exported.how),
            exported=exported,
            rows=self._rows(),
            imports=self._imports(),
            cdiv="cdiv" if exported.packed else "triton.cdiv",
            kernel_names=[kernel.name for kernel in self.packed()] if exported.packed else [],
            merged=self.merged,
            sections=[self._section(section) for section in self.merged.sections],
            plan=plan,
            dtype=str(plan.query_dtype),
            accumulator=str(plan.accumulator_dtype),
            capability=self._capability(),
            hardware_only=any(name in text for text in self._texts() for name in _HARDWARE_ONLY),
            multiples=length_multiples(exported.plans),
            conditions=[condition_text(node, self.names) for node in exported.assumptions],
            small_scalars=self._small_scalars(),
            buffers=[self._captured(buffer) for buffer in exported.mods.buffers],
            captured=list(self.names.captured),
            names=self.names,
            has_scale=plan.SM_SCALE is None,
            forward=self._forward(),
            programs=self._programs(),
            combining=self._combining(),
            splits=split_text(plan) if isinstance(plan, DecodePlan) else None,
            **self._sides_form(),
            tables=[self._table(prefix, table) for prefix, table in self.tables.items()],
            table_of_forward=self._table("table", exported.table) if exported.table else None,
            delta=self._delta(),
            passes=self._passes(),
            undifferentiable=self._undifferentiable(),
            narrow_index=not (isinstance(plan, ForwardPlan) and plan.wide_index),
            rows_checked=_pairs(unit_strides(exported.plans)),
            spans_checked=_pairs(name for name in INPUTS if name not in plan.wide),
            copied=_pairs(copied(exported.plans)),
            element_types=self._element_types(),
            releases=[release.split(".") for release in spoken_releases()],
            asks_memory=isinstance(plan, ForwardPlan) and plan.USE_TMA and not exported.packed,
            offsets_dtype=str(plan.index_map.cu_seqlens),
            **self._rows_form(),
            unwritten=self._unwritten(),
            returns_logsumexp=exported.returns_logsumexp,
            shapes=self._shapes(),
            **self._parameters(),
        )
        return "\n".join(piece.rstrip() for line in lines for piece in fit(line.text))

    def packed(self) -> Iterable[PackedKernel]:
        launches = {launch.kernel: launch for launch in self._launches()}
        for section in self.merged.sections:
            for name, source, options, stage in self._kernels(section.module.prefix):
                values = tuple(self.names.value(arg) for arg in source.args)
                yield PackedKernel(name, source, options, launches[name].grid, values, stage)

    def _launches(self) -> Iterable[LaunchText]:
        yield self._forward()
        if combining := self._combining():
            yield combining
        for prefix, table in self.tables.items():
            text = self._table(prefix, table)
            yield from (*(summary.launch for summary in text.summaries), text.count, text.fill)
            yield from [text.drop] if text.drop else []
        if delta := self._delta():
            yield delta
        yield from (one.launch for one in self._passes())

    def _imports(self) -> list[str]:
        """Return the lines of imports, an empty one before those of the package itself."""
        packed = self.exported.packed
        lines = {"import torch", *(() if packed else ("import triton", *self.merged.imports))}
        lines |= {"from torch.autograd.function import once_differentiable"} if self.backward else set()
        describes = bool(self._element_types())
        lines |= set(_DESCRIBING) if describes and not packed else set()
        names = [*["Described"] * describes, "Kernel", "NotCompiledFor", "cdiv"]
        own = ["", f"from .loader import {', '.join(names)}"] if packed else []
        return sorted(lines, key=lambda line: (line.startswith("from"), line)) + own

    def _element_types(self) -> dict[str, str]:
        """Return Gluon's names of the dtypes that descriptors have, by torch's; nothing where there are none."""
        sources = [self.exported.forward, *(one.source for one in (self.backward.passes if self.backward else ()))]
        types = {arg.type for source in sources for arg in source.args if arg.role is Role.DESCRIPTOR}
        known = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        names = sorted(known[kind.removeprefix("tensordesc<").split("[")[0]] for kind in types)
        return {f"torch.{name}": f"gl.{name}" for name in names}

    def _parameters(self) -> dict[str, Sequence[str]]:
        """Return what the functions of the host code take, and what passes between the forward and the backward."""
        exported, buffers = self.exported, list(self.names.buffers.values())
        packs, drops = exported.packs_sequences, exported.drops
        forward = [arg.of for arg in exported.forward.args if arg.role is Role.TENSOR]
        outputs = [name for name in ("output", "logsumexp", "logsumexp_tail") if name in forward]
        scale = ["scale"] * (self.plan.SM_SCALE is None)
        drawn = ["drop_below", "keep_scale"] * drops
        held = [*INPUTS, *buffers, *["cu_seqlens_q", "cu_seqlens_k"] * packs, *["dropout_seed"] * drops]
        asked = [*INPUTS, *scale, *self.names.captured, *exported.sides]
        numbers = [*scale, *self.names.scalars.values(), *drawn]
        wanted = self.backward.buffers if self.backward else frozenset[str]()
        grads = ["grad_output", *["grad_logsumexp"] * exported.returns_logsumexp]
        return {
            "signature": [
                *asked,
                *["cu_seqlens_q", "cu_seqlens_k=None"] * packs,
                *["*", "dropout_p", "generator=None"] * drops,
            ],
            "checked": [*asked, *["cu_seqlens_q", "cu_seqlens_k"] * packs, *["dropout_p"] * drops],
            "arguments": [*asked, *held[len(INPUTS) + len(buffers) :], *drawn],
            "forward_outputs": outputs,
            "numbers": numbers,
            "saved": [*held, *outputs],
            "differentiated": [name for own, name in self.names.buffers.items() if own in wanted],
            "backward_params": [*held, *outputs, *numbers, *grads],
        }

    def _sides_form(self) -> dict[str, object]:
        """Return what is static about what a call brings besides its tensors, and about keys and values in 8 bits."""
        plan = self.plan
        dtypes = {"query": plan.query_dtype}
        if isinstance(plan, ForwardPlan):
            dtypes |= {"key": plan.key_dtype, "value": plan.value_dtype}
        return {
            "sides": self.exported.sides,
            "page_size": plan.index_map.page_size,
            "lengths_dtype": str(plan.lengths_dtype) if isinstance(plan, ForwardPlan) else "",
            "v_scale_is_number": isinstance(plan, ForwardPlan) and plan.V_SCALE == "number",
            "dtypes": {name: str(dtypes.get(name, plan.query_dtype)) for name in INPUTS},
            "decoded": sorted(plan.decoded) if isinstance(plan, ForwardPlan) else [],
        }

    def _rows_form(self) -> dict[str, object]:
        """Return how the kernel that prepares rows writes them, and whether the copy engine reads the gradients."""
        rows = self.backward.delta[1].rows if self.backward else PLAIN_ROWS
        passes = self.backward.passes if self.backward else ()
        described = any(arg.role is Role.DESCRIPTOR for one in passes for arg in one.source.args)
        return {"row_multiple": rows.ROW_MULTIPLE, "writes_tail": rows.writes_tail, "describes_grad": described}

    def _shapes(self) -> dict[str, tuple[str, ...]]:
        """Return the sizes B, H, L, D of each input's gradient."""
        qk, v = str(self.plan.QK_HEAD_DIM), str(self.plan.V_HEAD_DIM)
        return {
            "query": ("batch", "q_heads", "q_len", qk),
            "key": ("batch", "kv_heads", "kv_len", qk),
            "value": ("batch", "kv_heads", "kv_len", v),
        }

    # What stands in the module.

    def _own_tables(self) -> dict[str, Table]:
        """Tables by the prefix of their names; a backward kernel may share the forward's."""
        found: dict[str, Table] = {"table": self.exported.table} if self.exported.table else {}
        for one in self.backward.passes if self.backward else ():
            if one.table and all(one.table.source.text != known.source.text for known in found.values()):
                found[f"{one.name}_table"] = one.table
        return found

    def _modules(self) -> list[Module]:
        second = self.exported.forward.second
        found = [Module("forward", self.exported.forward.text, ("forward", *([second.entry] if second else [])))]
        if self.backward:
            if self.backward.passes:
                found.append(Module("delta", self.backward.delta[0].text, ("backward_delta",)))
            found += [Module(one.name, one.source.text, (one.source.entry,)) for one in self.backward.passes]
        return found + [Module(prefix, table.source.text, ()) for prefix, table in self.tables.items()]

    def _texts(self) -> Iterable[str]:
        yield from (*self.merged.constants, *self.merged.functions)
        for section in self.merged.sections:
            yield from (*section.constants, *section.functions)

    def _section(self, section: Section) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Return a section's comment, template variables and functions, its kernels typed for a plain launch."""
        functions = list(section.functions)
        for name, source, *_ in self._kernels(section.module.prefix):
            at = next(at for at, text in enumerate(functions) if f"def {name}(" in text)
            functions[at] = typed_kernel(functions[at], name, source.args)
        return _comment(section.module), section.constants, tuple(functions)

    def _kernels(self, prefix: str) -> list[tuple[str, KernelSource, Mapping[str, int], str]]:
        """Return the kernels of a section: names in the module, sources, compiler's options, names in `Lowered`."""
        if prefix in self.tables:
            source, options = self.tables[prefix].source, _table_options(self.tables[prefix].plan)
            found = [*source.summaries.values(), source.count, source.fill, *([source.drop] if source.drop else [])]
            return [(self.sections[prefix].names[kernel.entry], kernel, options, "") for kernel in found]
        if prefix == "forward":
            first = ("forward", self.exported.forward, self.plan.compile_options, "forward")
            if not isinstance(self.plan, DecodePlan):
                return [first]
            second = self.exported.forward.of_second()
            return [first, (second.entry, second, self.plan.combining.compile_options, second.entry)]
        assert self.backward is not None
        if prefix == "delta":
            delta, plan = self.backward.delta
            return [("backward_delta", delta, plan.compile_options, "backward_delta")]
        passes = [one for one in self.backward.passes if one.name == prefix]
        return [(one.source.entry, one.source, one.plan.compile_options, one.source.entry) for one in passes]

    # The header.

    def _summary(self) -> str:
        return "forward and backward" if self.backward else "forward"

    def _rows(self) -> str:
        mods, plan = self.exported.mods, self.plan
        tensors = f"{str(plan.query_dtype).removeprefix('torch.')}, head dim {plan.QK_HEAD_DIM}"
        tensors += f" and {plan.V_HEAD_DIM} of values" if plan.V_HEAD_DIM != plan.QK_HEAD_DIM else ""
        group = plan.GQA_SHARED_HEADS
        tensors += f", {group} query heads for each key head" if group > 1 else ", as many key as query heads"
        return "\n".join(
            row(label, text)
            for label, text in (
                ("score_mod", mods.score.name if mods.score else "none: softmax of scaled products"),
                ("mask_mod", mods.mask.name if mods.mask else "none: every key is live"),
                ("target", plan.target.name),
                ("tensors", tensors),
                ("lengths", self._lengths_text()),
            )
        )

    def _lengths_text(self) -> str:
        q, kv = length_multiples(self.exported.plans)
        parts = [f"queries in multiples of {q}"] * (q > 1) + [f"keys in multiples of {kv}"] * (kv > 1)
        parts += [condition_text(node, self.names).holds for node in self.exported.assumptions]
        return ", ".join(parts) or "any"

    # Checks.

    def _capability(self) -> tuple[int, int] | str | None:
        """Return what the device has to be: a compute capability, an architecture, or anything."""
        target = self.plan.target
        if target.backend == "cuda":
            return divmod(int(target.arch), 10)
        return str(target.arch) if target.backend == "hip" else None

    def _small_scalars(self) -> list[tuple[str, int]]:
        """Captured whole numbers and the exponent of two below which the kernels take them to be."""
        whole = [scalar for scalar in self.exported.mods.scalars if not scalar.dtype.is_floating_point]
        return [(self.names.scalars[scalar.name], 47 if scalar.name in self.plan.wide else 29) for scalar in whole]

    def _captured(self, buffer: Buffer) -> tuple[str, int, str, str, str, bool]:
        """Return name, rank, dtype, strides and sizes that are relied on, and whether offsets fit 32 bits."""
        strides = ["None" if stride == "*" else stride for stride in buffer.strides]
        sizes = [str(size) for size in buffer.sizes]
        return (
            self.names.buffers[buffer.name],
            buffer.rank,
            str(buffer.dtype),
            _tuple_text(strides),
            _tuple_text(sizes),
            buffer.name not in self.plan.wide,
        )

    def _undifferentiable(self) -> list[str]:
        """Names of tensors that may require grad, and whose gradient the module does not compute."""
        floating = [buffer.name for buffer in self.exported.mods.buffers if buffer.dtype.is_floating_point]
        inputs = self.backward.inputs if self.backward else frozenset[str]()
        buffers = self.backward.buffers if self.backward else frozenset[str]()
        missing = [name for name in INPUTS if name not in inputs]
        return missing + [self.names.buffers[name] for name in floating if name not in buffers]

    # Launches.

    def _programs(self) -> str:
        return forward_grid(self.plan, self._constant("forward", "BLOCK_M", self.plan.BLOCK_M), self._cdiv)

    def _forward(self) -> LaunchText:
        plan = self.plan
        grid = self._programs()
        grid = "programs, splits" if isinstance(plan, DecodePlan) else grid
        return launch_text("forward", grid, self.exported.forward.args, self.names, plan.compile_options)

    def _combining(self) -> LaunchText | None:
        """Return the launch of the kernel that combines the splits of a decode kernel."""
        if not isinstance(self.plan, DecodePlan):
            return None
        second = self.exported.forward.of_second()
        options = self.plan.combining.compile_options
        return launch_text(second.entry, "batch * q_heads * q_len", second.args, self.names, options)

    def _delta(self) -> LaunchText | None:
        if not self.backward or not self.backward.passes:
            return None
        source, plan = self.backward.delta
        grid = delta_grid(plan, self._constant("delta", "BLOCK_M", plan.BLOCK_M), self._cdiv)
        return launch_text(source.entry, grid, source.args, self.names, plan.compile_options)

    def _passes(self) -> list[PassText]:
        found: list[PassText] = []
        for one in self.backward.passes if self.backward else ():
            text = self._pass(one)
            derived = any(before.table == text.table for before in found)
            found.append(PassText(text.launch, text.table, not derived))
        return found

    def _pass(self, one: Pass) -> PassText:
        plan = one.plan
        block_m = self._constant(one.name, "BLOCK_M", plan.BLOCK_M)
        block_n = self._constant(one.name, "BLOCK_N", plan.BLOCK_N)
        grid = backward_grid(plan, block_m, block_n, self._cdiv)
        launch = launch_text(one.source.entry, grid, one.source.args, self.names, plan.compile_options)
        if one.table is None:
            return PassText(launch)
        text = one.table.source.text
        found = next(p for p, table in self.tables.items() if table.source.text == text)
        return PassText(launch, self._table(found, one.table))

    def _unwritten(self) -> list[str]:
        """Inputs whose gradient is wanted and that no kernel writes: it is 0."""
        if not self.backward:
            return []
        flags = {
            name: any(getattr(one.plan, f"WRITE_GRAD_{name.upper()}") for one in self.backward.passes)
            for name in INPUTS
        }
        return [name for name in flags if name in self.backward.inputs and not flags[name]]

    def _name(self, prefix: str, name: str) -> str:
        return self.sections[prefix].names[name]

    def _cdiv(self, number: str, divisor: str) -> str:
        return f"{'cdiv' if self.exported.packed else 'triton.cdiv'}({number}, {divisor})"

    def _constant(self, prefix: str, name: str, value: int) -> str:
        """Return a template variable for the host code; there is none in a packed module."""
        return str(value) if self.exported.packed else f"{self._name(prefix, name)}.value"

    # Tables.

    def _table(self, prefix: str, table: Table) -> TableText:
        plan, source = table.plan, table.source
        own, walked = ("q", "kv") if plan.walked is Axis.KV else ("kv", "q")
        options = _table_options(plan)

        def launch(kernel: KernelSource, grid: str) -> LaunchText:
            return launch_text(self._name(prefix, kernel.entry), grid, kernel.args, self.names, options)

        rows = "rows, mask_heads, mask_batch"
        return TableText(
            function=f"derive_{prefix}",
            own=own,
            walked=walked,
            own_blocks=self._block_count(prefix, own),
            walked_blocks=self._block_count(prefix, walked),
            by_batch=Axis.B in plan.axes,
            by_head=Axis.H in plan.axes,
            summaries=tuple(
                SummaryText(
                    tuple((arg.of, _TORCH_OF[arg.type]) for arg in kernel.args if arg.role is Role.TABLE),
                    self._summary_shape(axis, plan, own),
                    launch(kernel, ", ".join(reversed(self._summary_shape(axis, plan, own).split(", ")))),
                )
                for axis, kernel in source.summaries.items()
            ),
            count=launch(source.count, rows),
            fill=launch(source.fill, rows),
            drop=launch(source.drop, rows) if source.drop else None,
        )

    def _block_count(self, prefix: str, axis: str) -> str:
        plan = self.tables[prefix].plan
        size = plan.q_block_size if axis == "q" else plan.kv_block_size
        return self._cdiv(f"{axis}_len", self._constant(prefix, f"SPARSE_{axis.upper()}_BLOCK_SIZE", size))

    @staticmethod
    def _summary_shape(axis: str, plan: TablePlan, own: str) -> str:
        axes = frozenset[Axis]().union(*(leaf.node.axes for leaf in plan.rule.leaves_of(Axis(axis))))
        batch, heads = "mask_batch" if Axis.B in axes else "1", "mask_heads" if Axis.H in axes else "1"
        return f"{batch}, {heads}, {'rows' if axis == own else 'columns'}"


def how_text(how: str) -> str:
    """Return a command as the lines of a docstring."""
    safe = how.replace("\\", "/").replace('"""', "'''")
    lines = textwrap.wrap(safe, 110, break_long_words=False, break_on_hyphens=False)
    return "\n".join(f"    {line}" if number == 0 else f"        {line}" for number, line in enumerate(lines))


def _table_options(plan: TablePlan) -> dict[str, int]:
    return {"num_warps": plan.num_warps, "num_stages": 1}


def _pairs(names: Iterable[str]) -> str:
    """Return the inside of a tuple of (name, tensor) pairs."""
    pairs = [f'("{name}", {name})' for name in names]
    return ", ".join(pairs) + ("," if len(pairs) == 1 else "")


def _tuple_text(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"


_GRADIENTS = {"dq": "dQ", "dkdv": "dK and dV", "dk": "dK", "dv": "dV"}


def _title(prefix: str) -> str:
    match prefix:
        case "forward":
            return "The forward kernel."
        case "delta":
            return "The backward kernels: what each row needs."
        case "table":
            return "The block table: which blocks each row of blocks visits."
    kernel = _GRADIENTS[prefix.removesuffix("_table")]
    is_table = prefix.endswith("_table")
    return f"The block table of the {kernel} kernel." if is_table else f"The backward kernels: {kernel}."


def _comment(module: Module) -> str:
    """Return the comment above a section: its title, and what its own docstring said of its plan."""
    body = docstring(module).split("\n\n", 1)
    kept: list[str] = []
    skipping = False
    for line in body[1].splitlines() if len(body) > 1 else ():
        skipping = line.startswith(("score_mod ", "mask_mod ")) or (skipping and line.startswith(" "))
        kept += [] if skipping else [line]
    return "\n".join(f"# {line}".rstrip() for line in [_title(module.prefix), *([""] if kept else []), *kept])

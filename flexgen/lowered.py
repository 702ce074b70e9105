"""`Lowered`: everything flexgen knows about one configuration, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen.codegen.source import KernelSource, line_map_text
from flexgen.explain import explain, explain_backward
from flexgen.ir.grad_text import print_score_grad
from flexgen.ir.text import print_mods
from flexgen.lowering.plans import AnyBackwardPlan, RowPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import Accumulation, DeltaPlan
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.pipeline import BackwardKernels, ForwardKernel, TableKernel, Understood
from flexgen.runtime.compile_job import CompileJob

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary


@dataclass(frozen=True, slots=True)
class LoweredBackward:
    """The backward of one configuration, lowered.

    Attributes:
        kernels: planned and emitted, in the order in which they run.
        divisible: for delta and each pass, the positions of arguments that are multiples of 16.
        tables: for each pass, the kernels that derive the block table that it walks, if it does.
    """

    kernels: BackwardKernels
    divisible: tuple[frozenset[int], ...]
    tables: tuple[TableKernel | None, ...]

    @property
    def passes(self) -> dict[str, tuple[KernelSource, DeltaPlan | AnyBackwardPlan]]:
        """Source and plan of each kernel by name, in the order in which they run."""
        return {"backward_delta": self.kernels.delta} | {_pass_name(s, p): (s, p) for s, p in self.kernels.passes}

    @property
    def sources(self) -> dict[str, KernelSource]:
        """Emitted modules by name: of each kernel, and of those that derive its block table."""
        names = [_pass_name(*one) for one in self.kernels.passes]
        derived = {f"{name}_block_table": t.source.fill for name, t in zip(names, self.tables, strict=True) if t}
        return derived | {name: source for name, (source, _) in self.passes.items()}


def _pass_name(source: KernelSource, plan: AnyBackwardPlan) -> str:
    return source.entry + ("_measure" if plan.accumulation is Accumulation.MEASURE else "")


@dataclass(frozen=True, slots=True)
class Lowered:
    """One configuration, lowered.

    Attributes:
        understood: captured and simplified mods, and facts.
        forward: the forward kernel.
        divisible: positions of the kernel's arguments that are multiples of 16 in this configuration.
        second_divisible: the same of the kernel that combines the splits of a decode kernel.
        table: the kernels that derive the block table, where the forward kernel walks one.
        backward: the backward kernels, where a tensor requires grad.
    """

    understood: Understood
    forward: ForwardKernel
    divisible: frozenset[int]
    second_divisible: frozenset[int] = frozenset()
    table: TableKernel | None = None
    backward: LoweredBackward | None = None

    @property
    def source(self) -> dict[str, str]:
        """Emitted text by name: "forward", "block_table", "backward_delta", "backward_dq", "backward_dkdv"
        (where keys and values have a kernel each, "backward_dk" and "backward_dv").

        The kernels that derive a backward kernel's table go by its name with "_block_table".
        """
        return {name: source.text for name, source in self.sources.items()}

    @property
    def sources(self) -> dict[str, KernelSource]:
        """The same by the same names, with the kernels' arguments and the origin of each line."""
        sources = {self.forward.source.entry: self.forward.source}
        sources |= {"block_table": self.table.source.fill} if self.table else {}
        return sources | (self.backward.sources if self.backward else {})

    @property
    def plan(self) -> ForwardPlan:
        """The frozen plan: every template variable."""
        return self.forward.plan

    def explain(self) -> str:
        """Return each decision, its value, why, and what was rejected."""
        rule = self.understood.rule if self.table else None
        report = explain(self.plan, self.understood.facts, self.understood.simplified, rule)
        backward = self.backward.kernels.passes if self.backward else ()
        return "\n".join([report, *(explain_backward(_pass_name(*one), one[1]) for one in backward)])

    @property
    def stages(self) -> list[tuple[str, str]]:
        """(name, text) of each stage, in order."""
        captured = self.understood.captured
        simplified = self.understood.simplified
        fired = "".join(f"# {name} x{count}\n" for name, count in simplified.fired)
        return [
            ("01_captured.ir", print_mods(captured.mods, captured.origins)),
            ("02_simplified.ir", fired + print_mods(simplified.mods, simplified.origins)),
            *self._score_grad(),
            ("03_facts.txt", self.understood.facts.describe() + "\n"),
            ("04_plan.txt", self.explain()),
            *((f"05_{entry}.py", text) for entry, text in self.source.items()),
            *((f"05_{entry}.lines.json", line_map_text(source)) for entry, source in self.sources.items()),
        ]

    def _score_grad(self) -> Iterator[tuple[str, str]]:
        grad = self.backward.kernels.score_grad if self.backward else None
        score = self.understood.mods.score
        if grad is not None and score is not None:
            yield "03_score_grad.ir", print_score_grad(grad, score)

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the kernels that `binary` compiles, in the order in which they run."""
        second = self.forward.source.second
        return ("forward", *([second.entry] if second else []), *(self.backward.passes if self.backward else ()))

    def plan_of(self, entry: str) -> WalkPlan | RowPlan:
        """Return the plan of one of `entries`."""
        return self._kernel(entry)[1]

    def binary(self, entry: str = "forward") -> Binary:
        """Compile a kernel for its target, offline, with the launcher's own specialisation.

        Args:
            entry: one of `entries`; of a decode kernel, "combine" stands in the text of "forward".

        Raises:
            KernelCompileError: Triton or the assembler refused the kernel.
        """
        return self.compile_job(entry).run()

    def compile_job(self, entry: str = "forward") -> CompileJob:
        """Return what `binary` does, as a value that another process may do."""
        source, plan, divisible = self._kernel(entry)
        return CompileJob(source, plan.target, tuple(plan.compile_options.items()), divisible)

    def _kernel(self, entry: str) -> tuple[KernelSource, WalkPlan | RowPlan, frozenset[int]]:
        if entry == "forward":
            return self.forward.source, self.plan, self.divisible
        if isinstance(self.plan, DecodePlan) and entry == "combine":
            return self.forward.source.of_second(), self.plan.combining, self.second_divisible
        passes = self.backward.passes if self.backward else {}
        if self.backward is None or entry not in passes:
            raise KeyError(f"no kernel {entry!r}; there are {', '.join(self.entries)}")
        return *passes[entry], self.backward.divisible[list(passes).index(entry)]

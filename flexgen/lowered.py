"""`Lowered`: everything flexgen knows about one configuration, without running it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flexgen.explain import explain
from flexgen.ir.text import print_mods
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.pipeline import ForwardKernel, TableKernel, Understood
from flexgen.runtime.kernel import module_of

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary


@dataclass(frozen=True, slots=True)
class Lowered:
    """One configuration, lowered.

    Attributes:
        understood: captured and simplified mods, and facts.
        forward: the forward kernel.
        divisible: positions of the kernel's arguments that are multiples of 16 in this configuration.
        table: the kernels that derive the block table, where the forward kernel walks one.
    """

    understood: Understood
    forward: ForwardKernel
    divisible: frozenset[int]
    table: TableKernel | None = None

    @property
    def source(self) -> dict[str, str]:
        """Emitted text by entry name."""
        sources = {self.forward.source.entry: self.forward.source.text}
        return sources | ({"block_table": self.table.source.text} if self.table else {})

    @property
    def plan(self) -> ForwardPlan:
        """The frozen plan: every template variable."""
        return self.forward.plan

    def explain(self) -> str:
        """Return each decision, its value, why, and what was rejected."""
        rule = self.understood.rule if self.table else None
        return explain(self.plan, self.understood.facts, self.understood.simplified, rule)

    @property
    def stages(self) -> list[tuple[str, str]]:
        """(name, text) of each stage, in order."""
        captured = self.understood.captured
        simplified = self.understood.simplified
        fired = "".join(f"# {name} x{count}\n" for name, count in simplified.fired)
        return [
            ("01_captured.ir", print_mods(captured.mods, captured.origins)),
            ("02_simplified.ir", fired + print_mods(simplified.mods, simplified.origins)),
            ("03_facts.txt", self.understood.facts.describe() + "\n"),
            ("04_plan.txt", self.explain()),
            *((f"05_{entry}.py", text) for entry, text in self.source.items()),
        ]

    def binary(self) -> Binary:
        """Compile the forward kernel for its target, offline, with the launcher's own specialisation.

        Raises:
            KernelCompileError: Triton or the assembler refused the kernel.
        """
        from flexgen.runtime.build import compile_entry  # triton is absent on some systems

        source = self.forward.source
        options = dict(self.plan.compile_options)
        return compile_entry(
            module_of(source),
            source.entry,
            source.args,
            self.plan.target,
            num_warps=options.pop("num_warps"),
            num_stages=options.pop("num_stages"),
            extra_options=options,
            divisible=self.divisible,
        )

"""The compiler, top to bottom: one line a stage, one frozen value out of each."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.capture.live import Captured
from flexgen.codegen.emit import emit_forward
from flexgen.codegen.source import KernelSource
from flexgen.ir.graph import Graph, Mods
from flexgen.ir.origins import Origins
from flexgen.ir.simplify import Simplified, simplify
from flexgen.lowering.facts import MaskFacts, analyse_mask
from flexgen.lowering.schedule import forward_schedule
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.choose import Question, choose_forward
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem


@dataclass(frozen=True, slots=True)
class Understood:
    """What is known before a call's shapes are: the mods, simplified, and the facts about the mask."""

    captured: Captured
    simplified: Simplified
    facts: MaskFacts  # tiles of one head
    packed_facts: MaskFacts  # tiles that hold the heads of a group

    @property
    def mods(self) -> Mods:
        return self.simplified.mods

    @property
    def origins(self) -> Origins:
        return self.simplified.origins


@dataclass(frozen=True, slots=True)
class ForwardKernel:
    """A planned and emitted forward kernel."""

    plan: ForwardPlan
    source: KernelSource


def understand(captured: Captured) -> Understood:
    """Simplify the mods and analyse the mask."""
    simplified = simplify(captured.mods, captured.origins)
    mods = _without_constant_mask(simplified.mods)
    simplified = Simplified(mods, simplified.origins, simplified.fired)
    facts = analyse_mask(simplified.mods.mask, origins=simplified.origins, single_head=True)
    packed = analyse_mask(simplified.mods.mask, origins=simplified.origins)
    return Understood(captured, simplified, facts, packed)


def _without_constant_mask(mods: Mods) -> Mods:
    """Drop a mask that is true everywhere: it is no mask."""
    mask: Graph | None = mods.mask
    if mask is not None and mask.root.op == "const" and mask.root.attr is True:
        return Mods(mods.score, None)
    return mods


def compile_forward(
    understood: Understood, problem: Problem, guard: Guard, target: Target, options: KernelOptions, trusted: bool
) -> ForwardKernel:
    """Decide a forward plan and emit its kernel."""
    packs = problem.group > 1 and guard.q_bucket == 16 and problem.table is None
    facts = understood.packed_facts if packs else understood.facts
    schedule = forward_schedule(facts, table=problem.table is not None, trusted=trusted)
    plan = choose_forward(Question(problem, guard, target, options, understood.mods, facts, schedule))
    return ForwardKernel(plan, emit_forward(understood.mods, understood.origins, plan))

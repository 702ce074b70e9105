"""The compiler, top to bottom: one line a stage, one frozen value out of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flexgen.backends import choose_backend, choose_backward_backend
from flexgen.capture.live import Captured
from flexgen.codegen.arguments import passable
from flexgen.codegen.block_table_emit import TableSource, emit_block_table
from flexgen.codegen.emit_backward import emit_delta
from flexgen.codegen.source import KernelSource
from flexgen.ir.grad import score_grad
from flexgen.ir.graph import Axis, Graph, Mods, Node, topological
from flexgen.ir.origins import Origins
from flexgen.ir.score_grad import ScoreGrad
from flexgen.ir.simplify import Simplified, simplify
from flexgen.ir.sizes import split_size_name
from flexgen.lowering.blocks import BlockRule, block_rule
from flexgen.lowering.facts import MaskFacts, analyse_mask
from flexgen.lowering.host_value import predicate
from flexgen.lowering.index_map import packs_heads
from flexgen.lowering.plans import AnyBackwardPlan
from flexgen.lowering.schedule import backward_schedule, forward_schedule
from flexgen.lowering.table_plan import TablePlan
from flexgen.lowering.targets import Target
from flexgen.lowering.triton.backward_plan import BackwardKernel, DeltaPlan
from flexgen.lowering.triton.backward_tasks import backward_tasks
from flexgen.lowering.triton.choose import Question, scores_may_be_extreme
from flexgen.lowering.triton.choose_backward import choose_delta
from flexgen.lowering.triton.choose_table import TABLE_TIERS, TableChoice, choose_table
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem, TableForm


@dataclass(frozen=True, slots=True)
class Understood:
    """What is known before a call's shapes are: the mods, simplified, and the facts about the mask."""

    captured: Captured
    simplified: Simplified
    facts: MaskFacts  # of tiles of one head
    rule: BlockRule | None = None  # how blocks are classified, for masks that are no intervals
    numbers_hold: Callable[[Mapping[str, int | float]], bool] | None = None  # what proofs assume of captured numbers

    def packed_facts(self) -> MaskFacts:
        """Analyse the mask for tiles that hold the heads of a group; few calls need it."""
        return analyse_mask(self.mods.mask, origins=self.origins)

    @property
    def mods(self) -> Mods:
        return self.simplified.mods

    @property
    def origins(self) -> Origins:
        return self.simplified.origins


@dataclass(frozen=True, slots=True)
class TableKernel:
    """Planned and emitted kernels that derive a block table."""

    plan: TablePlan
    source: TableSource


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
    mask = simplified.mods.mask
    rule = block_rule(mask, simplified.origins) if mask is not None and facts.tier in TABLE_TIERS else None
    assumed = [condition for condition in facts.rows_safe.assumptions if _reads_numbers(condition)]
    return Understood(captured, simplified, facts, rule, predicate(assumed) if assumed else None)


def _reads_numbers(condition: Node) -> bool:
    """Whether a condition depends on a captured number, rather than on lengths and sizes alone."""
    return any(node.op == "scalar" and split_size_name(node.attr) is None for node in topological(condition))


def has_tail(understood: Understood, query_dtype: torch.dtype) -> bool:
    """Whether the logsumexp comes in two parts: scores may be so large that one part rounds their differences away."""
    return scores_may_be_extreme(understood.mods.score, query_dtype) is not None


def _without_constant_mask(mods: Mods) -> Mods:
    """Drop a mask that is true everywhere: it is no mask."""
    mask: Graph | None = mods.mask
    if mask is not None and mask.root.op == "const" and mask.root.attr is True:
        return Mods(mods.score, None)
    return mods


def implicit_table(
    understood: Understood, problem: Problem, guard: Guard, target: Target, options: KernelOptions, trusted: bool
) -> TableChoice:
    """Decide whether a call without a block table gets one derived from its mask."""
    return choose_table(understood.facts, understood.rule, problem, guard, target, options, trusted=trusted)


def compile_table(understood: Understood, form: TableForm, guard: Guard, target: Target, walked: Axis) -> TableKernel:
    """Emit the kernels that derive a table of a form; the mask has a rule."""
    rule, mask = understood.rule, understood.mods.mask
    assert rule is not None and mask is not None
    plan = TablePlan(target, rule, form.q_block_size, form.kv_block_size, walked, guard.wide, guard.wide_index)
    return TableKernel(plan, emit_block_table(mask, understood.origins, plan))


def _why_no_table(
    understood: Understood, problem: Problem, guard: Guard, target: Target, options: KernelOptions, trusted: bool
) -> str:
    if understood.rule is None:
        return ""
    return implicit_table(understood, problem, guard, target, options, trusted).because


def compile_forward(
    understood: Understood, problem: Problem, guard: Guard, target: Target, options: KernelOptions, trusted: bool
) -> ForwardKernel:
    """Decide a forward plan and emit its kernel."""
    facts = understood.packed_facts() if packs_heads(problem, guard) else understood.facts
    refusal = "" if problem.table else _why_no_table(understood, problem, guard, target, options, trusted)
    schedule = forward_schedule(facts, table=problem.table, trusted=trusted, without_table=refusal)
    chosen = choose_backend(Question(problem, guard, target, options, understood.mods, facts, schedule))
    return ForwardKernel(chosen.plan, passable(chosen.emit(understood.mods, understood.origins, chosen.plan), target))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which gradients a backward computes.

    Attributes:
        inputs: of "query", "key" and "value".
        buffers: names of captured buffers.
        from_logsumexp: the loss depends on the logsumexp.
        deterministic: sums do not depend on the order in which programs run.
    """

    inputs: frozenset[str]
    buffers: frozenset[str]
    from_logsumexp: bool
    deterministic: bool = False


@dataclass(frozen=True, slots=True)
class BackwardKernels:
    """The planned and emitted backward kernels of a configuration, in the order in which they run.

    Attributes:
        delta: prepares the rows.
        passes: the others.
        score_grad: the gradients of the score_mod, if there is one.
        wanted: the gradients that they compute.
    """

    delta: tuple[KernelSource, DeltaPlan]
    passes: tuple[tuple[KernelSource, AnyBackwardPlan], ...]
    score_grad: ScoreGrad | None
    wanted: Wanted


def compile_backward(
    understood: Understood,
    problem: Problem,
    guard: Guard,
    target: Target,
    options: KernelOptions,
    *,
    trusted: bool,
    wanted: Wanted,
) -> BackwardKernels:
    """Decide the backward plans that the wanted gradients need, and emit their kernels."""
    mods = understood.mods
    grad = score_grad(mods.score, wanted.buffers, understood.origins) if mods.score else None
    tasks = []
    for task in backward_tasks(grad, wanted.inputs, options.WRITE_DQ, deterministic=wanted.deterministic):
        schedule = backward_schedule(understood.facts, task.kernel is BackwardKernel.DQ, problem.table, trusted=trusted)
        tasks.append((Question(problem, guard, target, options, mods, understood.facts, schedule), task))
    chosen = choose_backward_backend(tasks)
    passes = tuple((passable(emit(mods, understood.origins, grad, plan), target), plan) for plan, emit in chosen.plans)
    from_logsumexp = wanted.from_logsumexp
    delta = choose_delta(problem, guard, target, has_grad_logsumexp=from_logsumexp, row_form=chosen.rows)
    return BackwardKernels((emit_delta(delta), delta), passes, grad, wanted)

"""The registry of backends: in order of preference, what each one can serve, and which one serves a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from flexgen.codegen.decode_emit import emit_decode
from flexgen.codegen.dialects.gluon import installed_spelling, why_unavailable
from flexgen.codegen.emit import emit_forward
from flexgen.codegen.emit_backward import emit_backward
from flexgen.codegen.gluon_backward_emit import emit_gluon_backward
from flexgen.codegen.gluon_emit import emit_gluon
from flexgen.codegen.source import KernelSource
from flexgen.errors import OptionError
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.ir.score_grad import ScoreGrad
from flexgen.lowering.decision import Rejected
from flexgen.lowering.gluon_hopper import choose as hopper
from flexgen.lowering.gluon_hopper import choose_backward as hopper_backward
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.lowering.triton.backward_plan import PLAIN_ROWS, BackwardTask, RowForm
from flexgen.lowering.triton.choose import Question, choose_forward
from flexgen.lowering.triton.choose_backward import choose_backward
from flexgen.lowering.triton_decode import choose as decode
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem

Emit = Callable[[Mods, Origins, Any], KernelSource]
EmitBackward = Callable[[Mods, Origins, ScoreGrad | None, Any], KernelSource]


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to compile the forward.

    Attributes:
        name: as the option BACKEND spells it.
        refusal: why it cannot serve a call; None where it can.
        recommended: why it is the default for a call that it can serve, a measurement; None where it is not.
        choose: decides a plan, given why this backend.
        emit: emits a plan's kernel.
    """

    name: str
    refusal: Callable[[Question], str | None]
    recommended: Callable[[Question], str | None]
    choose: Callable[[Question, str], Any]
    emit: Emit


@dataclass(frozen=True, slots=True)
class Chosen:
    """A plan and what emits it."""

    plan: Any
    emit: Emit


def _hopper_refusal(question: Question) -> str | None:
    return hopper.refusal(question) or why_unavailable()


def _choose_hopper(question: Question, because: str) -> GluonPlan:
    return hopper.choose_gluon(question, because, installed_spelling())


BACKENDS = (
    Backend("TRITON_DECODE", decode.refusal, decode.recommended, decode.choose_decode, emit_decode),
    Backend("GLUON", _hopper_refusal, hopper.verified_to_win, _choose_hopper, emit_gluon),
)


def choose_backend(question: Question) -> Chosen:
    """Decide which backend serves a call, and its plan; plain Triton serves what no other does.

    Raises:
        OptionError: the backend that was asked for cannot serve the call.
    """
    _check_selecting(question)
    passed_over: list[Rejected] = []
    for backend in BACKENDS:
        because, reason = _verdict(backend, question)
        if because is not None:
            return Chosen(backend.choose(question, because), backend.emit)
        if reason:
            passed_over.append(Rejected(backend.name, reason))
    return Chosen(choose_forward(replace(question, passed_over=tuple(passed_over))), emit_forward)


def relevant_guard(problem: Problem, guard: Guard, options: KernelOptions) -> Guard:
    """Return what the plan of a call looks at of its guard, where the backend is settled without the rest."""
    decodes = options.BACKEND in (None, "AUTO", "TRITON_DECODE") and not decode.refusal_of(problem, guard, options)
    return decode.relevant(guard) if decodes else guard


def _check_selecting(question: Question) -> None:
    """Refuse an option that selects a backend, where that cannot serve the call or another one was asked for."""
    asked, splits = question.options.BACKEND, question.options.SPLIT_KV
    refusal = decode.refusal(question) if asked in (None, "AUTO", "TRITON_DECODE") else f"BACKEND={asked!r}"
    if splits is not None and refusal is not None:
        raise OptionError(
            f"SPLIT_KV={splits} cannot be honoured: {refusal}",
            why="only the TRITON_DECODE backend splits keys over programs",
            fix="drop SPLIT_KV for this call, or compile an attention for decoding alone",
        )


def _verdict(backend: Backend, question: Question) -> tuple[str | None, str]:
    """Return why a backend serves a call, or None and why it does not."""
    return _judge(backend.name, question, partial(backend.refusal, question), partial(backend.recommended, question))


Reason = Callable[[], str | None]


def _judge(name: str, question: Question, why_not: Reason, recommended: Reason) -> tuple[str | None, str]:
    asked = question.options.BACKEND
    if asked not in (None, "AUTO", name):
        return None, ""
    refusal = why_not()
    if asked == name and refusal is not None:
        raise OptionError(
            f"BACKEND={asked!r} cannot be honoured: {refusal}",
            why="its kernels do not serve this call",
            fix="leave BACKEND at 'AUTO', which falls back to plain Triton and says why",
        )
    if refusal is not None:
        return None, refusal
    if asked == name:
        return "asked for", ""
    return recommended(), "not measured to win here"


# Backward.


@dataclass(frozen=True, slots=True)
class BackwardBackend:
    """One way to compile the kernels of a backward.

    Attributes:
        name: as the option BACKEND spells it.
        refusal, recommended: as of a forward backend, for what one kernel computes.
        parts: the kernels that this takes.
        choose: decides the plan of a part, given why this backend.
        emit: emits a plan's kernel.
    """

    name: str
    refusal: Callable[[Question, BackwardTask], str | None]
    recommended: Callable[[Question, BackwardTask], str | None]
    parts: Callable[[Question, BackwardTask], tuple[BackwardTask, ...]]
    choose: Callable[[Question, BackwardTask, str], Any]
    emit: EmitBackward


@dataclass(frozen=True, slots=True)
class ChosenBackward:
    """The plans of all kernels, in order, what emits each, and how they read the values of rows."""

    plans: tuple[tuple[Any, EmitBackward], ...]
    rows: RowForm


def _hopper_backward_refusal(question: Question, task: BackwardTask) -> str | None:
    return hopper_backward.refusal(question, task) or why_unavailable()


def _choose_hopper_backward(question: Question, task: BackwardTask, because: str) -> GluonBackwardPlan:
    return hopper_backward.choose_gluon_backward(question, task, because, installed_spelling())


BACKWARD_BACKENDS = (
    BackwardBackend(
        "GLUON",
        _hopper_backward_refusal,
        hopper_backward.verified_to_win,
        hopper_backward.parts_of,
        _choose_hopper_backward,
        emit_gluon_backward,
    ),
)


def choose_backward_backend(tasks: Sequence[tuple[Question, BackwardTask]]) -> ChosenBackward:
    """Decide which backend serves all kernels of a backward, and the plans; plain Triton serves what no other does.

    The kernels share the values of rows, which each backend wants in a form of its own.

    Raises:
        OptionError: the backend that was asked for cannot serve the call.
    """
    passed_over: list[Rejected] = []
    for backend in BACKWARD_BACKENDS:
        verdicts = [_backward_verdict(backend, question, task) for question, task in tasks]
        because = [found for found, _ in verdicts if found is not None]
        if tasks and len(because) == len(tasks):
            parts = [(question, part) for question, task in tasks for part in backend.parts(question, task)]
            plans = [backend.choose(question, part, because[0]) for question, part in parts]
            return ChosenBackward(tuple((plan, backend.emit) for plan in plans), plans[0].rows)
        reason = next((why for found, why in verdicts if found is None), "")
        passed_over += [Rejected(backend.name, reason)] if reason else []
    plain = [(replace(question, passed_over=tuple(passed_over)), task) for question, task in tasks]
    return ChosenBackward(tuple((choose_backward(*one), emit_backward) for one in plain), PLAIN_ROWS)


def _backward_verdict(backend: BackwardBackend, question: Question, task: BackwardTask) -> tuple[str | None, str]:
    reasons = (partial(backend.refusal, question, task), partial(backend.recommended, question, task))
    return _judge(backend.name, question, *reasons)

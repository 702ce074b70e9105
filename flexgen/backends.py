"""The registry of forward backends: in order of preference, what each one can serve, and which one serves a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from flexgen.codegen.decode_emit import emit_decode
from flexgen.codegen.dialects.gluon import why_unavailable
from flexgen.codegen.emit import emit_forward
from flexgen.codegen.gluon_emit import emit_gluon
from flexgen.codegen.source import KernelSource
from flexgen.errors import OptionError
from flexgen.ir.graph import Mods
from flexgen.ir.origins import Origins
from flexgen.lowering.decision import Rejected
from flexgen.lowering.gluon_hopper import choose as hopper
from flexgen.lowering.triton.choose import Question, choose_forward
from flexgen.lowering.triton_decode import choose as decode
from flexgen.options import KernelOptions
from flexgen.problem import Guard, Problem

Emit = Callable[[Mods, Origins, Any], KernelSource]


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


BACKENDS = (
    Backend("TRITON_DECODE", decode.refusal, decode.recommended, decode.choose_decode, emit_decode),
    Backend("GLUON", _hopper_refusal, hopper.verified_to_win, hopper.choose_gluon, emit_gluon),
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
    asked = question.options.BACKEND
    if asked not in (None, "AUTO", backend.name):
        return None, ""
    refusal = backend.refusal(question)
    if asked == backend.name and refusal is not None:
        raise OptionError(
            f"BACKEND={asked!r} cannot be honoured: {refusal}",
            why="its kernels do not serve this call",
            fix="leave BACKEND at 'AUTO', which falls back to plain Triton and says why",
        )
    if refusal is not None:
        return None, refusal
    if asked == backend.name:
        return "asked for", ""
    return backend.recommended(question), "not measured to win here"

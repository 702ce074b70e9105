"""The docstring at the top of an emitted module: which case it is for, and why it is the way it is."""

from __future__ import annotations

import textwrap

from flexgen.ir.graph import Graph, Mods
from flexgen.lowering.decision import Decision
from flexgen.lowering.dropout import Draws
from flexgen.lowering.schedule import Schedule
from flexgen.lowering.triton.backward_plan import BackwardKernel, BackwardPlan, DeltaPlan
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.lowering.triton_decode.plan import DecodePlan

FLAGS = (
    "IS_DIVISIBLE",
    "SAFE_HEAD_DIM",
    "PRESCALE_QK",
    "ROWS_GUARANTEED_SAFE",
    "BLOCKS_ARE_CONTIGUOUS",
    "HAS_FULL_BLOCKS",
    "USE_TMA",
    "USE_SUBTILING",
    "FAST_TANH",
    "LONG_ROWS_FIRST",
    "OUTPUT_LOGSUMEXP",
    "OUTPUT_MAX",
    "OUTPUT_TAIL",
)
_WIDTH = 110


def header(mods: Mods, plan: ForwardPlan) -> str:
    """Return the module docstring."""
    return _docstring("Fused attention, forward", plan, _rows(mods, plan))


def decode_header(mods: Mods, plan: DecodePlan) -> str:
    """Return the module docstring of a decode kernel."""
    rows = _rows(mods, plan)
    live = f"a row has at most {plan.LIVE_KEYS} live keys" if plan.LIVE_KEYS is not None else ""
    splits = f"{plan.SPLIT_KV or 'counted by each launch'}   because: {_because(plan, 'SPLIT_KV')}"
    rows.insert(4, ("splits", "\n".join(text for text in (splits, live) if text)))
    return _docstring("Fused attention, decoding", plan, rows)


def _docstring(what: str, plan: ForwardPlan, rows: list[tuple[str, str]]) -> str:
    body = "\n".join(row(label, text) for label, text in rows)
    return f'"""{what}, for {plan.target.name}. Written by flexgen.\n\n{body}\n"""'


def _rows(mods: Mods, plan: ForwardPlan) -> list[tuple[str, str]]:
    return [
        ("score_mod", _name(mods.score, "none: softmax of scaled products")),
        ("mask_mod", _name(mods.mask, "none: every key is live")),
        ("tile", _tile(plan)),
        *_sequences(plan),
        ("keys", _keys(plan.schedule)),
        ("rows safe", _yes(plan.ROWS_GUARANTEED_SAFE, _because(plan, "ROWS_GUARANTEED_SAFE"))),
        *_dropout(plan),
        ("flags", ", ".join(f"{name}={getattr(plan, name)}" for name in FLAGS)),
    ]


def backward_header(mods: Mods, plan: BackwardPlan) -> str:
    """Return the module docstring of a backward kernel."""
    what = "dQ" if plan.kernel is BackwardKernel.DQ else "dK and dV"
    walked = "keys" if plan.kernel is BackwardKernel.DQ else "queries"
    sizes = f"{plan.BLOCK_M} queries x {plan.BLOCK_N} keys, {plan.num_warps} warps, {plan.num_stages} stages"
    rows = [
        ("score_mod", _name(mods.score, "none: softmax of scaled products")),
        ("mask_mod", _name(mods.mask, "none: every key is live")),
        ("tile", f"{sizes}   because: {_because(plan, 'BLOCK_M')}"),
        *_sequences(plan),
        (walked, _keys(plan.schedule)),
        *_dropout(plan),
        ("flags", ", ".join(f"{name}={getattr(plan, name)}" for name in FLAGS if hasattr(plan, name))),
    ]
    body = "\n".join(row(label, text) for label, text in rows)
    return f'"""Fused attention, backward, {what}, for {plan.target.name}. Written by flexgen.\n\n{body}\n"""'


def delta_header(plan: DeltaPlan) -> str:
    """Return the module docstring of the kernel that prepares rows for the backward kernels."""
    return f'"""Fused attention, backward, row statistics, for {plan.target.name}. Written by flexgen."""'


def row(label: str, text: str) -> str:
    """Return a labelled paragraph of a module's docstring."""
    safe = text.replace("\\", "/").replace('"""', "'''")
    indent = " " * 13
    paragraphs = safe.splitlines() or [""]
    wrapped = [
        textwrap.fill(line, _WIDTH, initial_indent=indent, subsequent_indent=indent + "    ", break_long_words=False)
        for line in paragraphs
    ]
    text = "\n".join(wrapped)
    return f"{label:<13}" + text[13:]


def _name(graph: Graph | None, absent: str) -> str:
    return absent if graph is None else graph.name


def _tile(plan: ForwardPlan) -> str:
    sizes = f"{plan.BLOCK_M} query rows x {plan.BLOCK_N} keys, {plan.num_warps} warps, {plan.num_stages} stages"
    return f"{sizes}   because: {_because(plan, 'BLOCK_M')}"


def _sequences(plan: ForwardPlan | BackwardPlan) -> list[tuple[str, str]]:
    packed = plan.index_map.packs_sequences
    return [("sequences", f"packed: {_because(plan, 'SEARCH_WIDTH')}")] if packed else []


def _keys(schedule: Schedule) -> str:
    known = [segment.because for segment in schedule.segments if segment.because not in schedule.because]
    return "\n".join([schedule.because, *known])


def _dropout(plan: ForwardPlan | BackwardPlan) -> list[tuple[str, str]]:
    if plan.DROPOUT is Draws.NONE:
        return []
    return [("dropout", f"{plan.DROPOUT}   because: {_because(plan, 'DROPOUT')}")]


def _yes(value: bool, because: str) -> str:
    return f"{'yes' if value else 'no'}   because: {because}"


def _because(plan: ForwardPlan | BackwardPlan, name: str) -> str:
    return _decision(plan, name).because


def _decision(plan: ForwardPlan | BackwardPlan, name: str) -> Decision:
    return next(decision for decision in plan.decisions if decision.name == name)

"""Assembles what the report shows, as frozen values, and renders it as one page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from flexgen.codegen.html import asset, content_hash, render_html
from flexgen.commands.console import counted
from flexgen.commands.file_spec import parse_file_spec
from flexgen.commands.mask_subject import MaskSubject, Place, mask_subject
from flexgen.commands.offline import Built, build_offline, triton_is_installed
from flexgen.commands.predict import predict
from flexgen.commands.report_mask import MaskPicture, mask_box, mask_picture
from flexgen.commands.report_plot import Plot
from flexgen.commands.report_score import ScoreSubject, score_plots
from flexgen.commands.report_source import SourceView, source_views
from flexgen.commands.report_work import roofline
from flexgen.commands.resource_report import occupancy_text
from flexgen.commands.spills import spill_reasons, spills
from flexgen.commands.subject import Subject, fitting_shape
from flexgen.commands.tile_map import map_tiles
from flexgen.errors import FlexgenError
from flexgen.explain import value_text
from flexgen.explain_score import score_facts
from flexgen.explain_work import duration, work_rows
from flexgen.lowered import Lowered
from flexgen.lowering.decision import Decision
from flexgen.lowering.plans import AnyBackwardPlan, RowPlan, WalkPlan
from flexgen.lowering.triton.backward_plan import DeltaPlan
from flexgen.runtime.machine_code import EXPONENTIAL, LOAD, LOCAL, MATRIX, STORE
from flexgen.work import Work

_MOST_INSTRUCTIONS = 14  # opcodes listed, the most frequent
_MOST_LENGTHS = 8  # of packed sequences, listed


@dataclass(frozen=True, slots=True)
class Row:
    """A label and its text."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Rejection:
    """What a decision rejected, and why."""

    value: str
    because: str


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One template variable: its value, why, and what was rejected."""

    name: str
    value: str
    because: str
    rejected: tuple[Rejection, ...]


@dataclass(frozen=True, slots=True)
class KernelDecisions:
    """The decisions about one kernel."""

    kernel: str
    walk: str
    rows: tuple[DecisionRow, ...]


@dataclass(frozen=True, slots=True)
class Count:
    """How many instructions of a kind there are in the whole kernel, and in its main loop; "" where it has none."""

    kind: str
    all: str
    loop: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What one compiled kernel costs.

    Attributes:
        numbers: registers, spills, shared memory, occupancy.
        spills: registers are spilled.
        reasons: why they are, where they are.
        shared_share: of the target's shared memory that is used, from 0 to 1.
        counts: instructions by kind.
        instructions: opcode, count, and its share of the most frequent one's.
    """

    kernel: str
    tile: str
    numbers: tuple[Row, ...]
    spills: bool
    reasons: tuple[Row, ...]
    shared_share: float
    counts: tuple[Count, ...]
    instructions: tuple[tuple[str, int, float], ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkView:
    """The predicted work of one kernel, and the share of each unit's least time in the longest."""

    kernel: str
    rows: tuple[Row, ...]
    units: tuple[tuple[str, float, str], ...]


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that the report shows.

    Attributes:
        title: the file's name and the names in it that are meant.
        command: what makes the same page again.
        setting: target, dtype, sizes, mods.
        place: batch and query head that pictures are of.
        mask: None where there are no queries or no keys.
        score: of the score_mod; none without one.
        no_costs: why there is no machine code; "" where there is.
    """

    title: str
    command: str
    setting: tuple[Row, ...]
    place: str
    mask: MaskPicture | None
    score: tuple[Plot, ...]
    facts: tuple[Row, ...]
    decisions: tuple[KernelDecisions, ...]
    emitted: tuple[SourceView, ...]
    users: tuple[SourceView, ...]
    costs: tuple[Cost, ...]
    no_costs: str
    works: tuple[WorkView, ...]
    roofline: Plot | None


def report_page(subject: Subject, lowered: Lowered, place: Place, command: str) -> Page:
    """Return what the report of a lowered configuration shows.

    Raises:
        UserFileError: a mod reads outside of what it captured, at this shape.
    """
    mask = mask_subject(subject, place)
    built, no_costs = _built(lowered)
    spilled = {each.entry: each.resources.spilled_lines for each in built}
    emitted, users = source_views(lowered.sources, spilled)
    works = predict(subject, lowered)
    sizes = mask.shape
    with fitting_shape(sizes):
        has_tiles = bool(sizes.Lq and sizes.Lk)
        tiles = map_tiles(mask, lowered.plan, lowered.understood.rule) if has_tiles else None
        plots = _score(mask, lowered, place) if has_tiles else ()
    packed = lowered.plan.index_map.packed_heads
    return Page(
        title=_title(subject),
        command=command,
        setting=tuple(_setting(subject, lowered)),
        place=f"{'batch' if subject.packed is None else 'sequence'} {place.b}, query head {place.h}",
        mask=mask_picture(tiles, sizes.Lq, sizes.Lk, packed) if tiles else None,
        score=plots,
        facts=tuple(_facts(lowered)),
        decisions=tuple(_decisions(lowered)),
        emitted=emitted,
        users=users,
        costs=tuple(map(_cost, built)),
        no_costs=no_costs,
        works=tuple(_work(work, subject) for work in works),
        roofline=roofline(works),
    )


def render_page(page: Page) -> str:
    """Return the page's HTML: one file that loads nothing."""
    style, script = asset("report/style.css"), asset("report/script.js")
    return render_html(
        "report/page.html.jinja",
        page=page,
        style=style,
        script=script,
        style_hash=content_hash(style),
        script_hash=content_hash(script),
        mask_data=_mask_data(page.mask) if page.mask else None,
        mask_box=mask_box(page.mask) if page.mask else None,
    )


def _mask_data(mask: MaskPicture) -> dict[str, object]:
    """Return what the page's script reads of the mask."""
    names = ("rows", "columns", "q_step", "kv_step", "q_len", "kv_len", "side", "states", "live", "packed_heads")
    values = asdict(mask)
    kept: dict[str, object] = json.loads(json.dumps({name: values[name] for name in names}))
    return kept


def _title(subject: Subject) -> str:
    spec = parse_file_spec(subject.name)
    return ":".join([spec.path.name, *([",".join(spec.names)] if spec.names else [])])


def _setting(subject: Subject, lowered: Lowered) -> Iterator[Row]:
    sizes, mods = subject.shape, lowered.understood.mods
    yield Row("target", lowered.plan.target.name)
    yield Row("dtype", str(subject.dtype).removeprefix("torch."))
    yield Row("score_mod", mods.score.name if mods.score else "none")
    yield Row("mask_mod", mods.mask.name if mods.mask else "none")
    if subject.packed is None:
        yield Row("batch", str(sizes.B))
    else:
        listed = ", ".join(map(str, subject.packed[:_MOST_LENGTHS])) + ", \u2026" * (
            len(subject.packed) > _MOST_LENGTHS
        )
        yield Row("packed sequences", f"{len(subject.packed)}, of {listed} tokens")
    yield Row("heads", f"{sizes.Hq} of queries, {sizes.Hkv} of keys")
    yield Row("lengths", f"{sizes.Lq:,} queries, {sizes.Lk:,} keys")
    if subject.dropout_p:
        yield Row("dropout", f"{subject.dropout_p:g}")
    yield Row("head dims", f"{sizes.Dqk}, values {sizes.Dv}" if sizes.Dv != sizes.Dqk else str(sizes.Dqk))


_LABELLED = re.compile(r"(?P<label>\S+(?: \S+)*?)\s{2,}(?P<text>.*)")


def _facts(lowered: Lowered) -> Iterator[Row]:
    packs = lowered.plan.index_map.packs
    facts = lowered.understood.packed_facts() if packs else lowered.understood.facts
    yield from (_labelled(line) for line in facts.describe().splitlines())
    yield from (Row(*row) for row in score_facts(lowered.understood.mods.score, lowered.plan.query_dtype))
    schedule = lowered.plan.schedule
    yield Row("walk", f"{schedule.walk.value}: {schedule.because}")
    for number, segment in enumerate(schedule.segments, 1):
        yield Row(f"range {number}", segment.because)
    if lowered.table and lowered.understood.rule:
        yield from (Row(f"table, {label}", text) for label, text in lowered.understood.rule.describe())
    fired = ", ".join(f"{name} x{count}" for name, count in lowered.understood.simplified.fired)
    if fired:
        yield Row("simplified by", fired)


def _labelled(line: str) -> Row:
    found = _LABELLED.fullmatch(line) or re.fullmatch(r"(?P<label>.{18}) (?P<text>.*)", line)
    return Row(found["label"].strip(), found["text"]) if found else Row("", line)


def _decisions(lowered: Lowered) -> Iterator[KernelDecisions]:
    yield _of_plan("forward", lowered.plan)
    for name, plan in _passes(lowered):
        if isinstance(plan, AnyBackwardPlan):
            yield _of_plan(name, plan)


def _passes(lowered: Lowered) -> list[tuple[str, DeltaPlan | AnyBackwardPlan]]:
    passes = lowered.backward.passes if lowered.backward else {}
    return [(name, plan) for name, (_, plan) in passes.items()]


def _of_plan(kernel: str, plan: WalkPlan) -> KernelDecisions:
    walk = f"{plan.schedule.walk.value}: {plan.schedule.because}"
    return KernelDecisions(kernel, walk, tuple(_decision(decision) for decision in plan.decisions))


def _decision(decision: Decision) -> DecisionRow:
    rejected = tuple(Rejection(value_text(other.value), other.because) for other in decision.rejected)
    return DecisionRow(decision.name, value_text(decision.value), decision.because, rejected)


def _score(mask: MaskSubject, lowered: Lowered, place: Place) -> tuple[Plot, ...]:
    graph = lowered.understood.mods.score
    if graph is None:
        return ()
    return score_plots(ScoreSubject(graph, mask.shape, place.h, place.b, mask.buffers, mask.scalars))


# Costs.

_KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("matrix", MATRIX),
    ("exponentials", EXPONENTIAL),
    ("loads", LOAD),
    ("stores", STORE),
    ("local memory", LOCAL),
)


def _built(lowered: Lowered) -> tuple[tuple[Built, ...], str]:
    """Compile every kernel for its target; return them, or why there is no machine code."""
    if lowered.plan.target.backend == "interpret":
        return (), "The target interpret has no machine code."
    if not triton_is_installed():
        return (), "Triton, which compiles the emitted source, is not installed here."
    try:
        return tuple(build_offline(lowered, entry) for entry in lowered.entries), ""
    except FlexgenError as error:
        return (), f"There is no machine code: {error.render()}"


def _cost(built: Built) -> Cost:
    plan, costs = built.plan, built.resources
    spilled = costs.spill_stores + costs.spill_loads
    ordered = sorted(costs.instructions.items(), key=lambda item: (-item[1], item[0]))[:_MOST_INSTRUCTIONS]
    most = ordered[0][1] if ordered else 1
    loop = costs.main_loop
    counts = [Count("all", f"{costs.code.total:,}", f"{loop.total:,}" if loop else "")]
    counts += [
        Count(name, f"{costs.code.count(*kind):,}", f"{loop.count(*kind):,}" if loop else "") for name, kind in _KINDS
    ]
    shared = plan.target.shared_bytes
    planned = "" if isinstance(plan, RowPlan) else f", planned at most {plan.shared_bytes:,}"
    return Cost(
        kernel=built.entry,
        tile=_tile(plan, costs.num_warps),
        numbers=(
            Row("registers", f"{costs.registers} a thread"),
            Row("spilled", f"{costs.spill_stores} + {costs.spill_loads} bytes a thread" if spilled else "nothing"),
            Row("shared memory", f"{costs.shared_bytes:,} bytes{planned}"),
            Row("occupancy", occupancy_text(built)),
        ),
        spills=spilled > 0,
        reasons=tuple(Row(*reason) for reason in spill_reasons(built)) if spills(built) else (),
        shared_share=min(costs.shared_bytes / shared, 1.0) if shared else 0.0,
        counts=tuple(counts),
        instructions=tuple((name, count, count / most) for name, count in ordered),
        warnings=costs.warnings,
    )


def _tile(plan: WalkPlan | RowPlan, warps: int) -> str:
    if isinstance(plan, RowPlan):
        return f"{counted(plan.BLOCK_M, 'row')}, {counted(warps, 'warp')}"
    return (
        f"{plan.BLOCK_M} queries x {plan.BLOCK_N} keys, {counted(warps, 'warp')}, {counted(plan.num_stages, 'stage')}"
    )


# Work.


def _work(work: Work, subject: Subject) -> WorkView:
    longest = work.bound.seconds if work.bound else 0.0
    units = tuple((one.unit, one.seconds / longest, _duration(one.seconds)) for one in work.bounds if longest)
    rows = tuple(Row(label, text) for label, text in work_rows(work, subject.shape))
    return WorkView(work.kernel, rows, units)


def _duration(seconds: float) -> str:
    return duration(seconds).replace(" us", " \N{MICRO SIGN}s")

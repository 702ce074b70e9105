"""`flexgen mask`: what the compiler knows about a mask, and the tiles that follow from it."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexgen.commands.arguments import Shape, add_file, add_problem
from flexgen.commands.console import Console, Span, counted, wrapped
from flexgen.commands.explain import painted
from flexgen.commands.mask_figure import mask_figure
from flexgen.commands.mask_plot import Format, format_of, require_matplotlib, save
from flexgen.commands.mask_subject import MaskSubject, Place, add_place, mask_subject, place_of
from flexgen.commands.picture import CHECKED, LEGEND, NEEDLESS, draw, shrink
from flexgen.commands.subject import Subject, choose_target, fitting_shape, load_subject
from flexgen.commands.tile_map import Live, TileMap, Visit, map_tiles
from flexgen.commands.tile_map_table import TableSummary, derived_form, summarise_table
from flexgen.errors import OptionError
from flexgen.ir.graph import Axis
from flexgen.lowered import Lowered
from flexgen.lowering.blocks import BlockRule
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.facts import MaskFacts
from flexgen.lowering.schedule import Walk
from flexgen.lowering.table_plan import drops_empty, table_axes
from flexgen.lowering.triton.choose_table import TABLE_TIERS
from flexgen.problem import TableForm

EXAMPLES = """\
  flexgen mask causal.py                         facts, ranges, tile counts and a picture
  flexgen mask causal.py -o mask.png -o mask.svg the same, and pictures to look at or to show
  flexgen mask causal.py --shape 1,1,1,4096,4096,64,64 --set BLOCK_M=64 BLOCK_N=64
  flexgen mask prefix.py --batch 1 --head 3      where the mask depends on them"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16", dropout=False, packed=False)
    add_place(parser)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the tiles into a PNG file (needs matplotlib)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the tiles into an SVG file (needs matplotlib)")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="draw the tiles into a .png or .svg file, whichever its name says; may be repeated",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    pictures = _pictures(arguments)
    subject = load_subject(arguments)
    place = place_of(arguments, subject)
    lowered = subject.lower(choose_target(arguments.target, console))
    facts = _facts(lowered)
    _write_facts(subject, lowered, facts, console)
    _write_segments(lowered, console)
    if subject.shape.Lq and subject.shape.Lk:
        mask = mask_subject(subject, place)
        with fitting_shape(subject.shape):
            _write_table(mask, lowered, console)
            tiles = map_tiles(mask, lowered.plan, lowered.understood.rule)
        _write_counts(tiles, subject.shape, place, console)
        _draw_text(tiles, console)
        _save(pictures, _title(arguments, lowered), mask, tiles, facts, console)
    elif pictures:
        raise OptionError(
            "there are no tiles to picture", why="the shape has no queries or no keys", fix="give --shape"
        )
    return 0


def _pictures(arguments: argparse.Namespace) -> list[tuple[Path, Format]]:
    """Return the files to draw, before the work that would be lost if they cannot be."""
    named: list[tuple[Path | None, Format]] = [(arguments.png, "png"), (arguments.svg, "svg")]
    named += [(path, format_of(path)) for path in arguments.output]
    wanted = [(path, kind) for path, kind in named if path is not None]
    if wanted:
        require_matplotlib()
    return wanted


def _facts(lowered: Lowered) -> MaskFacts:
    packs = lowered.plan.index_map.packs
    return lowered.understood.packed_facts() if packs else lowered.understood.facts


def _write_facts(subject: Subject, lowered: Lowered, facts: MaskFacts, console: Console) -> None:
    mask = lowered.understood.mods.mask
    console.line(Span(f"{subject.name}: {mask.name if mask else 'no mask'}", "bold"))
    for line in facts.describe().splitlines():
        _write_wrapped(f"  {line}", console)
    schedule = lowered.plan.schedule
    if facts.tier in TABLE_TIERS and schedule.walk is not Walk.DERIVED:
        _write_wrapped(f"  {'walk':<19}{schedule.walk.value}: {schedule.because}", console)


def _write_wrapped(text: str, console: Console) -> None:
    for part in wrapped(text):
        console.line(*painted(part))


def _write_table(mask: MaskSubject, lowered: Lowered, console: Console) -> None:
    """Write what a block table derived on the device holds, where the kernel walks one."""
    rule, plan = lowered.understood.rule, lowered.plan
    if plan.schedule.walk is not Walk.DERIVED or rule is None:
        return
    console.line()
    form = derived_form(plan)
    title = f"block table of {plan.SPARSE_Q_BLOCK_SIZE} queries x {plan.SPARSE_KV_BLOCK_SIZE} keys"
    console.line(Span(f"{title}, derived on the device", "bold"))
    for label, text in _table_rows(summarise_table(rule, plan, mask), rule, form):
        _write_wrapped(f"  {label:<19}{text}", console)


def _table_rows(table: TableSummary, rule: BlockRule, form: TableForm) -> list[tuple[str, str]]:
    partial = table.listed - table.full
    axes = [name for axis, name in ((Axis.B, "batch"), (Axis.H, "query head")) if axis in table_axes(rule, form)]
    kept = f"one for each {' and '.join(axes)}" if axes else "one for every batch and query head"
    unknown = [("not classified", f"{expression_text(part.node)}: {part.why}") for part in rule.unsolved]
    if drops_empty(rule, form):
        unknown.append(("", "the mask is evaluated in listed blocks that are not full, and empty ones are left out"))
    return [
        ("listed", f"{table.listed:,} of {counted(table.blocks, 'block')}: {table.full:,} full, {partial:,} partial"),
        ("memory", f"{_bytes_text(table.nbytes)}, {kept}, as attention.block_table(query, key) makes it"),
        ("", f"at most {_bytes_text(table.most_bytes)} where a call makes its own, without waiting for the size"),
        ("empty unless", expression_text(rule.may_live)),
        ("full if", expression_text(rule.all_live)),
        *unknown,
    ]


def _bytes_text(number: int) -> str:
    if number < 1 << 10:
        return f"{number} bytes"
    return f"{number / (1 << 10):.1f} KiB" if number < 1 << 20 else f"{number / (1 << 20):.1f} MiB"


def _write_segments(lowered: Lowered, console: Console) -> None:
    """Write the ranges of keys that a tile of queries [q_lo, q_hi] visits, before they are rounded to tiles."""
    for number, segment in enumerate(lowered.plan.schedule.segments, 1):
        console.line()
        console.line(Span(f"range {number} of a tile of queries q_lo to q_hi: {segment.because}", "bold"))
        for label, lo, hi in _ends(segment):
            _write_wrapped(f"  {label:<19}[{lo}, {hi})", console)


def _ends(segment: SegmentBounds) -> list[tuple[str, str, str]]:
    rows = [("visited", _bound_text(segment.visit_lo), _bound_text(segment.visit_hi))]
    if segment.full_lo is not None and segment.full_hi is not None:
        rows.append(("without the mask", _bound_text(segment.full_lo), _bound_text(segment.full_hi)))
    return rows


def _bound_text(bound: Bound) -> str:
    text = expression_text(bound.node)
    return f"{bound.reduce} over rows of ({text})" if bound.reduce else text


def _write_counts(tiles: TileMap, shape: Shape, place: Place, console: Console) -> None:
    total = tiles.count()
    visited = total - tiles.count(Visit.SKIPPED)
    console.line()
    title = f"{counted(total, 'tile')} of {tiles.rows} queries x {tiles.columns} keys"
    console.line(Span(f"{title}, shape {shape}, batch {place.b}, head {place.h}", "bold"))
    console.line(Span("  visited            ", "cyan"), f"{visited:,} ({visited / total:.1%})")
    console.line(Span("  without the mask   ", "cyan"), f"{tiles.count(Visit.UNMASKED):,}")
    live = f"{tiles.count(live=Live.FULL):,} full, {tiles.count(live=Live.PARTIAL):,} partial"
    console.line(Span("  live, by the mask  ", "cyan"), f"{live}, {tiles.count(live=Live.EMPTY):,} empty")
    if tiles.needless:
        console.line(Span("  visited needlessly ", "cyan"), f"{tiles.needless:,}")


def _draw_text(tiles: TileMap, console: Console) -> None:
    side = shrink(tiles)
    console.line()
    for line in draw(tiles):
        console.line(*line)
    console.line()
    legend = [f"{mark} {meaning}" for mark, meaning in LEGEND if mark != NEEDLESS or tiles.needless]
    for start in range(0, len(legend), 2):
        console.line(Span("  " + "".join(f"{text:<44}" for text in legend[start : start + 2]).rstrip(), "dim"))
    each = (
        "one character is one tile"
        if side == 1
        else f"one character is {side} x {side} tiles; mixed ones are {CHECKED}"
    )
    console.line(Span(f"  queries go down, keys to the right; {each}", "dim"))


def _title(arguments: argparse.Namespace, lowered: Lowered) -> str:
    mask = lowered.understood.mods.mask
    return f"{arguments.file.path.name}: {mask.name if mask else 'no mask'}"


def _save(
    pictures: list[tuple[Path, Format]],
    title: str,
    mask: MaskSubject,
    tiles: TileMap,
    facts: MaskFacts,
    console: Console,
) -> None:
    if not pictures:
        return
    figure = mask_figure(title, mask, tiles, facts.kv)
    for path, kind in pictures:
        save(figure, path, kind)
        console.note(f"wrote {path}")

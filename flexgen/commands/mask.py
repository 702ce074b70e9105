"""`flexgen mask`: what the compiler knows about a mask, and the tiles that follow from it."""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from flexgen.capture.live import LiveMods
from flexgen.commands.arguments import Shape, add_file, add_problem
from flexgen.commands.console import Console, Span, counted, wrapped
from flexgen.commands.explain import painted
from flexgen.commands.picture import CHECKED, LEGEND, NEEDLESS, draw, shrink
from flexgen.commands.subject import Subject, choose_target, fitting_shape, load_subject
from flexgen.commands.tile_map import Live, Place, TileMap, Visit, map_tiles
from flexgen.errors import OptionError
from flexgen.lowered import Lowered
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.expression_text import expression_text

EXAMPLES = """\
  flexgen mask causal.py                         facts, ranges, tile counts and a picture
  flexgen mask causal.py --shape 1,1,1,4096,4096,64,64 --set BLOCK_M=64 BLOCK_N=64
  flexgen mask prefix.py --batch 1 --head 3      where the mask depends on them"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16")
    parser.add_argument("--batch", type=int, default=0, metavar="B", help="which batch to picture (default: 0)")
    parser.add_argument("--head", type=int, default=0, metavar="H", help="which query head to picture (default: 0)")


def run(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments)
    place = _place(arguments, subject.shape)
    lowered = subject.lower(choose_target(arguments.target, console))
    _write_facts(subject, lowered, console)
    _write_segments(lowered, console)
    if subject.shape.Lq and subject.shape.Lk:
        tiles = _tiles(subject, lowered, place)
        _write_counts(tiles, subject.shape, place, console)
        _write_picture(tiles, console)
    return 0


def _place(arguments: argparse.Namespace, shape: Shape) -> Place:
    for name, value, size in (("batch", arguments.batch, shape.B), ("head", arguments.head, shape.Hq)):
        if not 0 <= value < size:
            raise OptionError(f"--{name} {value} is outside of the shape", fix=f"choose one from 0 to {size - 1}")
    return Place(arguments.batch, arguments.head)


def _tiles(subject: Subject, lowered: Lowered, place: Place) -> TileMap:
    attention = subject.attention
    reading = LiveMods(attention.score_mod, attention.mask_mod).current()
    mods = reading.captured.mods
    buffers = dict(zip((buffer.name for buffer in mods.buffers), map(_on_cpu, reading.buffers), strict=True))
    scalars = dict(zip((scalar.name for scalar in mods.scalars), reading.scalars, strict=True))
    with fitting_shape(subject.shape):
        return map_tiles(attention.mask_mod, lowered.plan, subject.shape, place, buffers, scalars)


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.device("cpu"))


def _write_facts(subject: Subject, lowered: Lowered, console: Console) -> None:
    mask = lowered.understood.mods.mask
    console.line(Span(f"{subject.name}: {mask.name if mask else 'no mask'}", "bold"))
    packs = lowered.plan.index_map.packs
    facts = lowered.understood.packed_facts if packs else lowered.understood.facts
    for line in facts.describe().splitlines():
        for part in wrapped(f"  {line}"):
            console.line(*painted(part))


def _write_segments(lowered: Lowered, console: Console) -> None:
    """Write the ranges of keys that a tile of queries [q_lo, q_hi] visits, before they are rounded to tiles."""
    for number, segment in enumerate(lowered.plan.schedule.segments, 1):
        console.line()
        console.line(Span(f"range {number} of a tile of queries q_lo to q_hi: {segment.because}", "bold"))
        for label, lo, hi in _ends(segment):
            for part in wrapped(f"  {label:<19}[{lo}, {hi})"):
                console.line(*painted(part))


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


def _write_picture(tiles: TileMap, console: Console) -> None:
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

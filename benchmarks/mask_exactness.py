"""How many tiles a forward kernel visits for each one that it has to, over the masks of the tests and of attn-gym.

    python -m benchmarks.mask_exactness --out benchmarks/results

Needs no GPU. A tile has to be visited if it holds a live pair, which is found by evaluating the mask on every pair.
Tiles are the kernel's own, planned for sm_90 in bfloat16 with head dims of 128. Writes mask_exactness.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import flexgen
from benchmarks.about import environment
from benchmarks.cases import cases
from benchmarks.gym_masks import gym_masks, gym_queries
from flexgen.capture.live import LiveMods
from flexgen.commands.arguments import Shape
from flexgen.commands.mask_subject import MaskSubject, Place, mask_subject
from flexgen.commands.subject import Subject
from flexgen.commands.tile_map import Live, TileMap, Visit, map_tiles
from flexgen.lowered import Lowered
from flexgen.lowering.bounds import Bound
from flexgen.lowering.facts import Direction, Tier
from flexgen.pipeline import understand
from tests.corpus.case import Shape as CorpusShape
from tests.corpus.masks import MASKS

Mod = Callable[..., torch.Tensor]

LENGTHS = (2048, 4096, 8192)
ROUNDS = 5
# What a mask reads for each pair takes gigabytes beyond this length.
TABLES_OF_PAIRS = {"dense_table": 2048, "dense_table_transposed": 2048, "jetspec tree": 4096}
INTERVALS = (Tier.ALL_TRUE, Tier.ALL_FALSE, Tier.NO_MASK, Tier.CLOSED_FORM, Tier.ROW_REDUCED)


@dataclass(frozen=True, slots=True)
class Entry:
    """A mask to look at: where it comes from, its name, and the shape it is meant for."""

    source: str
    name: str
    mask: Mod
    shape: Shape
    place: Place


@dataclass(frozen=True, slots=True)
class Row:
    """What was found of one mask at one length.

    Attributes:
        tier, walk: of the keys of a query tile.
        tile: queries x keys.
        visited, ideal: tiles, of one (batch, head).
        q_tier: of the queries of a key tile; q_visited: tiles that its segments visit, None where it has none.
        capture_ms, analysis_ms: CPU time, medians; analysis is simplification, facts (twice: of tiles of one head and
            of tiles that hold a group of heads), and the block rule.
        first_ms: capture and analysis, the first time.
        unsolved: why blocks of a part of the mask cannot be classified; empty where all can.
    """

    source: str
    mask: str
    length: int
    tier: str
    walk: str
    tile: str
    visited: int
    ideal: int
    q_tier: str
    q_visited: int | None
    capture_ms: float
    analysis_ms: float
    first_ms: float
    unsolved: str

    @property
    def ratio(self) -> float:
        return ratio(self.visited, self.ideal)


def ratio(visited: int, ideal: int) -> float:
    return visited / ideal if ideal else 1.0 + visited


def entries(length: int) -> Iterator[Entry]:
    """Yield masks whose captured tensors fit into memory at the length."""
    for case in cases(length, 2, "cpu"):
        if case.mask_mod is not None and case.score_mod is None:
            yield Entry("benchmarks", case.name, case.mask_mod, _shape(1, length, length), Place())
    shape = CorpusShape(2, 2, 2, length, length)
    for case in MASKS:
        if case.fits(shape) and length <= TABLES_OF_PAIRS.get(case.name, length):
            mask = case.build(shape, torch.device("cpu"))
            yield Entry("tests/corpus", case.name, mask, _shape(2, length, length), Place(1, 1))
    for name, mask in gym_masks(length).items():
        if length <= TABLES_OF_PAIRS.get(name, length):
            yield Entry("attn-gym", name, mask, _shape(1, gym_queries(name, length), length), Place())


def _shape(batch: int, queries: int, keys: int) -> Shape:
    return Shape(batch, batch, batch, queries, keys, 128, 128)


def measure(entry: Entry, rounds: int = ROUNDS) -> Row:
    capture_ms, analysis_ms, first_ms = timings(entry.mask, rounds)
    subject = Subject(entry.name, flexgen.compile(None, entry.mask), entry.shape, torch.bfloat16)
    lowered = subject.lower("sm_90")
    mask = mask_subject(subject, entry.place)
    rule = lowered.understood.rule
    tiles = map_tiles(mask, lowered.plan, rule)
    return Row(
        entry.source,
        entry.name,
        entry.shape.Lk,
        lowered.understood.facts.kv.tier.value,
        lowered.plan.schedule.walk.value,
        f"{tiles.rows} x {tiles.columns}",
        tiles.count() - tiles.count(Visit.SKIPPED),
        tiles.count() - tiles.count(live=Live.EMPTY),
        lowered.understood.facts.q.tier.value,
        queries_visited(mask, lowered, tiles),
        capture_ms,
        analysis_ms,
        first_ms,
        "; ".join(part.why for part in rule.unsolved) if rule is not None else "",
    )


def timings(mask: Mod, rounds: int) -> tuple[float, float, float]:
    """Return milliseconds of CPU time: medians of capture and of analysis, and both together the first time."""
    captures, analyses = [], []
    for _ in range(rounds):
        start = time.process_time()
        captured = LiveMods(None, mask).current().captured
        middle = time.process_time()
        understand(captured)
        captures.append((middle - start) * 1e3)
        analyses.append((time.process_time() - middle) * 1e3)
    return statistics.median(captures), statistics.median(analyses), captures[0] + analyses[0]


# Queries of a key tile, as a backward kernel walks them.


def queries_visited(mask: MaskSubject, lowered: Lowered, tiles: TileMap) -> int | None:
    """Count the tiles that tiles of keys visit along their segments of queries."""
    direction = lowered.understood.facts.q
    if direction.tier not in INTERVALS:
        return None
    visited = torch.zeros(tiles.visits.shape[1], tiles.visits.shape[0], dtype=torch.bool)
    index = torch.arange(tiles.visits.shape[0])
    for lo, hi in _ranges(mask, direction, tiles.columns):
        start, stop = lo // tiles.rows, -(-hi // tiles.rows)
        visited |= (lo < hi)[:, None] & (index >= start[:, None]) & (index < stop[:, None])
    return int(visited.sum())


def _ranges(mask: MaskSubject, direction: Direction, columns: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    start = torch.arange(0, mask.shape.Lk, columns)
    stop = (start + columns).clamp(max=mask.shape.Lk)
    heads = torch.tensor(mask.place.h)
    inputs = {"h": heads, "h_lo": heads, "h_hi": heads, "kv_lo": start, "kv_hi": stop - 1}
    inputs["kv_idx"] = torch.arange(mask.shape.Lk)

    def end(bound: Bound) -> torch.Tensor:
        value = mask.value(bound.node, inputs)
        if bound.reduce is not None:
            parts = value.expand(mask.shape.Lk).split(columns)
            value = torch.stack([part.min() if bound.reduce == "min" else part.max() for part in parts])
        return value.clamp(0, mask.shape.Lq).expand(len(start))

    for segment in direction.segments:
        yield end(segment.visit_lo), end(segment.visit_hi)


# The report.


def report(rows: Sequence[Row], about: dict[str, Any]) -> str:
    lines = ["# Exactness of mask analysis", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "Tiles that the forward kernel visits for each one that holds a live pair, at the kernel's own tile size",
        "(planned for sm_90, bfloat16, head dims of 128). 1.00 is ideal. Masks of `tests/corpus` have the small",
        "parameters that the tests give them: windows and documents of a few tokens. Times are CPU time on this",
        "machine, which is shared with other work: indicative only.",
        "",
        *_summary(rows),
        "",
        *_slowest(rows),
        "",
        *_in_vain(rows),
        "",
    ]
    for source in dict.fromkeys(row.source for row in rows):
        lines += [f"## {source}", "", *_table([row for row in rows if row.source == source]), ""]
    return "\n".join(lines)


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield "| keys of a query | masks and lengths | exact | median | worst | where |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for tier, walk in sorted({(row.tier, row.walk) for row in rows}):
        chosen = [row for row in rows if (row.tier, row.walk) == (tier, walk)]
        worst = max(chosen, key=lambda row: row.ratio)
        exact = sum(row.ratio == 1 for row in chosen)
        where = f"{worst.mask}, {worst.length}" if worst.ratio > 1 else ""
        median = statistics.median(row.ratio for row in chosen)
        yield f"| {tier}, {walk} | {len(chosen)} | {exact} | {median:.2f} | {worst.ratio:.2f} | {where} |"
    solved = [row for row in rows if row.q_visited is not None]
    exact = sum(row.q_visited == row.ideal for row in solved)
    worst = max(solved, key=lambda row: ratio(row.q_visited or 0, row.ideal))
    bound = ratio(worst.q_visited or 0, worst.ideal)
    median = statistics.median(ratio(row.q_visited or 0, row.ideal) for row in solved)
    where = f"{worst.mask}, {worst.length}" if bound > 1 else ""
    yield f"| queries of a key, intervals | {len(solved)} | {exact} | {median:.2f} | {bound:.2f} | {where} |"


def _slowest(rows: Sequence[Row]) -> Iterator[str]:
    times = sorted(row.analysis_ms for row in rows)
    slowest = max(rows, key=lambda row: row.analysis_ms)
    over = len({row.mask for row in rows if row.analysis_ms > 25})
    yield (
        f"Analysis takes a median of {statistics.median(times):.1f} ms, at most {slowest.analysis_ms:.1f} ms "
        f"({slowest.mask}); {over} masks take more than 25 ms. It does not depend on the length."
    )


def _in_vain(rows: Sequence[Row]) -> Iterator[str]:
    yield "Masks that visit tiles in vain:"
    yield ""
    for name in dict.fromkeys(row.mask for row in rows if row.ratio > 1):
        mine = [row for row in rows if row.mask == name]
        worst = max(mine, key=lambda row: row.ratio)
        why = worst.unsolved or "interval arithmetic over a block is sound, not exact, for its terms over both axes"
        yield f"- {name}, at most {worst.ratio:.2f} ({worst.length} tokens): {why}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    lengths = sorted({row.length for row in rows})
    yield (
        "| mask | keys of a query | walk | tile | "
        + " | ".join(f"visited / ideal at {length}" for length in lengths)
        + " | queries of a key | capture ms | analysis ms |"
    )
    yield "| --- | --- | --- | --- | " + "---: | " * len(lengths) + "--- | ---: | ---: |"
    for name in dict.fromkeys(row.mask for row in rows):
        mine = {row.length: row for row in rows if row.mask == name}
        last = mine[max(mine)]
        cells = [_cell(mine.get(length)) for length in lengths]
        found = last.q_tier if last.q_visited is None else f"{last.q_tier}, {ratio(last.q_visited, last.ideal):.2f}"
        times = f"{last.capture_ms:.1f} | {last.analysis_ms:.1f}"
        yield f"| {name} | {last.tier} | {last.walk} | {last.tile} | {' | '.join(cells)} | {found} | {times} |"


def _cell(row: Row | None) -> str:
    return f"{row.visited} / {row.ideal} = {row.ratio:.2f}" if row else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--out", type=Path, help="folder for mask_exactness.md and mask_exactness.json")
    args = parser.parse_args()
    rows = []
    for length in args.length:
        for entry in entries(length):
            rows.append(measure(entry))
            row = rows[-1]
            print(
                f"{row.length} {row.source} {row.mask}: {row.tier}, {_cell(row)}, {row.analysis_ms:.1f} ms", flush=True
            )
    about = environment("mask_exactness", gpu=False)
    text = report(rows, about)
    if args.out is None:
        print(text)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "mask_exactness.json").write_text(_json(rows, about))
    (args.out / "mask_exactness.md").write_text(text)


def _json(rows: Sequence[Row], about: dict[str, Any]) -> str:
    """Return one line a row, so that a change of one is a change of one line."""
    lines = ",\n".join(json.dumps(asdict(row) | {"ratio": round(row.ratio, 4)}) for row in rows)
    return f'{{"environment": {json.dumps(about)},\n"rows": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    main()

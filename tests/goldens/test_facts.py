"""What is proven about each mask of the corpus, and the ranges that a tile visits because of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.lowering.bounds import Bound, SegmentBounds
from flexgen.lowering.expression_text import expression_text
from flexgen.lowering.facts import Direction, MaskFacts
from flexgen.pipeline import understand
from tests.corpus.case import Case, Shape
from tests.corpus.masks import MASKS

SHAPE = Shape(B=2, Hq=4, Hkv=2, Lq=64, Lk=96)
SQUARE = Shape(B=2, Hq=4, Hkv=2, Lq=64, Lk=64)


@pytest.mark.parametrize("case", list(MASKS), ids=lambda case: case.name)
def test_facts(case: Case, golden: Callable[[str, str], None]) -> None:
    shape = SHAPE if case.fits(SHAPE) else SQUARE
    mask = case.build(shape, torch.device("cpu"))
    golden(f"facts/{case.name}.txt", facts_text(understand(LiveMods(None, mask).current().captured).facts))


def facts_text(facts: MaskFacts) -> str:
    parts = [facts.describe() + "\n", *direction_text("keys", facts.kv), *direction_text("queries", facts.q)]
    if facts.scalar_ranges or facts.trusted_buffers:
        parts.append(f"\ntrusted: {', '.join([*facts.scalar_ranges, *facts.trusted_buffers])}\n")
    return "".join(parts)


def direction_text(name: str, direction: Direction) -> Iterator[str]:
    order = "" if direction.sorted else ", in an order known at run time"
    yield f"\n{name} that a tile visits{order}:\n"
    for segment in direction.segments:
        yield f"  {segment_text(segment)}\n"
    if not direction.segments:
        yield "  none\n"


def segment_text(segment: SegmentBounds) -> str:
    visited = f"[{bound_text(segment.visit_lo)}, {bound_text(segment.visit_hi)})"
    if segment.full_lo is None or segment.full_hi is None:
        return f"{visited}   every tile is checked"
    return f"{visited}   unchecked in [{bound_text(segment.full_lo)}, {bound_text(segment.full_hi)})"


def bound_text(bound: Bound) -> str:
    text = expression_text(bound.node)
    return f"{bound.reduce} over rows of {text}" if bound.reduce else text

"""Kernels of the corpus and of attn-gym visit no tile in vain where the live keys are intervals, and few elsewhere."""

from __future__ import annotations

import pytest

from benchmarks.mask_exactness import INTERVALS, Entry, entries, measure, ratio
from flexgen.lowering.facts import Tier
from flexgen.lowering.schedule import Walk

LENGTH = 1024
ENTRIES = [entry for entry in entries(LENGTH) if entry.source != "benchmarks"]
TIERS = {tier.value for tier in INTERVALS}
MOST_OF_A_TABLE = 1.2
MOST_OF_REDUCED_ROWS = 1.25


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: f"{entry.source}-{entry.name}")
def test_visits_are_few_beyond_those_that_are_needed(entry: Entry) -> None:
    row = measure(entry, rounds=1)
    if row.tier == Tier.ROW_REDUCED.value:  # exact for each row; a tile visits what any of its rows needs
        assert row.ratio <= MOST_OF_REDUCED_ROWS
    elif row.tier in TIERS:
        assert row.visited == row.ideal
    elif row.walk == Walk.DERIVED.value:
        assert row.ratio <= MOST_OF_A_TABLE
    if row.q_visited is not None:
        assert row.q_visited == row.ideal


def test_a_ratio_without_ideal_tiles_counts_every_visit() -> None:
    assert (ratio(0, 0), ratio(2, 0), ratio(3, 2)) == (1.0, 3.0, 1.5)

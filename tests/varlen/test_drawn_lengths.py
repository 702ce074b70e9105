"""Any lengths of any sequences, drawn by Hypothesis, with masks whose bounds come from each of the ways there are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.varlen.run import check_packed, pack

everyday = settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))

LENGTH = st.one_of(st.integers(0, 3), st.sampled_from([15, 16, 17, 32, 33]), st.integers(0, 40))
PAIRS = st.lists(st.tuples(LENGTH, LENGTH), min_size=1, max_size=6)
UNUSED = st.sampled_from([0, 1, 16, 20])
MASKS = st.sampled_from(["none", "causal", "window", "prefix", "blocks"])


def mask_named(name, count):
    prefix = torch.arange(count) * 5 % 13

    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    def window(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx < 8 + b) & (kv_idx - q_idx < 3)

    def prefix_lm(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) | (kv_idx < prefix[b])

    def blocks(b, h, q_idx, kv_idx):
        return q_idx // 10 == kv_idx // 10

    return {"none": None, "causal": causal, "window": window, "prefix": prefix_lm, "blocks": blocks}[name]


def check(pairs, unused, name, *, together, grad):
    q_lengths, kv_lengths = [q for q, _ in pairs], [kv for _, kv in pairs]
    packed = pack(q_lengths, None if together else kv_lengths, heads=(1, 1), unused=unused, grad=grad)
    check_packed(packed, mask=mask_named(name, len(pairs)))


@everyday
@given(PAIRS, UNUSED, MASKS, st.booleans())
def test_drawn_lengths(pairs, unused, name, together):
    check(pairs, unused, name, together=together, grad=True)


@pytest.mark.slow
@thorough
@given(PAIRS, UNUSED, MASKS, st.booleans())
def test_many_drawn_lengths(pairs, unused, name, together):
    check(pairs, unused, name, together=together, grad=True)

"""Calls that are wrong: each must be refused with flexgen's own error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from flexgen.errors import FlexgenError

QUERY = torch.randn(1, 1, 20, 16)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e300, -3e38, 10**400, "1", 1j, torch.tensor(0.5), True])
def test_scale_that_is_no_finite_number_is_refused(scale: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(QUERY, QUERY, QUERY, scale=scale)


@pytest.mark.parametrize(
    "keywords",
    [
        {"kernel_options": {"BLOCK_MM": 64}},
        {"kernel_options": [1]},
        {"kernel_options": {"BLOCK_M": [64]}},
        {"kernel_options": {"BLOCK_M": 64, 3: 4}},
        {"block_mask": "causal"},
        {"block_mask": torch.ones(20, 20)},
    ],
)
def test_drop_in_refuses_malformed_keywords(keywords: dict[str, Any]) -> None:
    with pytest.raises(FlexgenError):
        flexgen.flex_attention(QUERY, QUERY, QUERY, **keywords)


@pytest.mark.parametrize("query", [None, QUERY.numpy(), QUERY[0], QUERY.to_sparse()])
def test_query_that_is_no_dense_tensor_is_refused(query: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(query, QUERY, QUERY)


def test_constant_below_the_normal_numbers_runs() -> None:
    output = flexgen.compile(lambda s, b, h, q, k: s.clamp(min=1e-40))(QUERY, QUERY, QUERY)
    right = (QUERY @ QUERY.mT / 4).clamp(min=1e-40).softmax(-1) @ QUERY
    assert torch.allclose(output, right, atol=1e-5)


@pytest.mark.parametrize("scale", [2.3e38, -2.3e38, 1.2e-38, 1e-45])
def test_largest_and_smallest_scales_give_no_nan(scale: float) -> None:
    small = QUERY * 1e-3  # so that scores are finite
    assert not flexgen.compile()(small * 1e-35, small, QUERY, scale=scale).isnan().any()
    assert not flexgen.compile(lambda s, b, h, q, k: s / 3e35)(small, small, QUERY, scale=scale).isnan().any()

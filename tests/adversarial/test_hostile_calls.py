"""Calls that are wrong: each must be refused with flexgen's own error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from flexgen.errors import FlexgenError

QUERY = torch.randn(1, 1, 20, 16)

RAW = pytest.mark.xfail(strict=True, reason="Python's or torch's own error comes through")


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "1", 1j, torch.tensor(0.5), True])
def test_scale_that_is_no_finite_number_is_refused(scale: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(QUERY, QUERY, QUERY, scale=scale)


@pytest.mark.parametrize(
    "keywords",
    [
        {"kernel_options": {"BLOCK_MM": 64}},
        pytest.param({"kernel_options": [1]}, marks=RAW),
        pytest.param({"kernel_options": {"BLOCK_M": [64]}}, marks=RAW),
        pytest.param({"kernel_options": {"BLOCK_M": 64, 3: 4}}, marks=RAW),
        pytest.param({"block_mask": "causal"}, marks=RAW),
        pytest.param({"block_mask": torch.ones(20, 20)}, marks=RAW),
    ],
)
def test_drop_in_refuses_malformed_keywords(keywords: dict[str, Any]) -> None:
    with pytest.raises(FlexgenError):
        flexgen.flex_attention(QUERY, QUERY, QUERY, **keywords)


@pytest.mark.parametrize("query", [None, QUERY.numpy(), QUERY[0], pytest.param(QUERY.to_sparse(), marks=RAW)])
def test_query_that_is_no_dense_tensor_is_refused(query: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(query, QUERY, QUERY)


@pytest.mark.xfail(strict=True, reason="Triton reads a literal below float32's smallest normal number as float64")
def test_constant_below_the_normal_numbers_runs() -> None:
    output = flexgen.compile(lambda s, b, h, q, k: s.clamp(min=1e-40))(QUERY, QUERY, QUERY)
    right = (QUERY @ QUERY.mT / 4).clamp(min=1e-40).softmax(-1) @ QUERY
    assert torch.allclose(output, right, atol=1e-5)

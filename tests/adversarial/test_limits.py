"""Sizes at a limit of the hardware, of an integer or of Python's stack: they work, or are refused clearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.errors import UnsupportedProblemError
from flexgen.problem import GRID_LIMIT
from flexgen.runtime import table_kernels
from tests.adversarial.dense import attention as dense_attention

QUERY, KEY, VALUE = (torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))


def error_of(score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None = None) -> float:
    output = flexgen.compile(score_mod, mask_mod)(QUERY, KEY, VALUE)
    return float((output - dense_attention(QUERY, KEY, VALUE, score_mod, mask_mod)).abs().max())


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Programs of a launch.


@pytest.mark.parametrize(
    ("batch", "heads"), [(1, GRID_LIMIT + 2), pytest.param(GRID_LIMIT + 2, 1, marks=pytest.mark.slow)]
)
def test_more_heads_or_batch_entries_than_a_grids_second_dimension(batch: int, heads: int) -> None:
    query = torch.randn(batch, heads, 1, 8)
    key = torch.randn(batch, 1, 2, 8)
    output = flexgen.compile(None, lambda b, h, q, k: k <= (b + h) % 2)(query, key, key)
    two = ((torch.arange(batch)[:, None] + torch.arange(heads)) % 2 == 1)[:, :, None, None]
    scores = query @ key.mT / 8**0.5
    scores[..., 1:].masked_fill_(~two, -torch.inf)
    assert torch.allclose(output, scores.softmax(-1) @ key, atol=1e-5)


@pytest.mark.parametrize(("batch", "heads"), [(GRID_LIMIT + 1, 1), (1, GRID_LIMIT + 1), (GRID_LIMIT, 1)])
def test_a_table_is_derived_only_where_its_kernels_can_be_launched(batch: int, heads: int) -> None:
    documents = meta(max(batch, heads), 300, dtype=torch.int32)

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = b if batch > 1 else h
        return documents[row, q] == documents[row, k]

    tensors = [meta(batch, heads, 300, 64) for _ in range(3)]
    told = flexgen.compile(None, mask).lower(*tensors, target="sm_80").explain()
    fits = max(batch, heads) <= GRID_LIMIT
    assert ("derived table" in told) == fits
    assert ("more than 65535 heads or batch entries" in told) != fits


def test_no_launch_has_a_larger_grid_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a small limit, so that it is quick: masks of every tier, called and asked for their table."""
    limit, grids = 3, []
    monkeypatch.setattr("flexgen.runtime.describe.GRID_LIMIT", limit)
    run = table_kernels.TableKernels._run

    def noted(self: Any, source: Any, grid: Any, *rest: Any) -> None:
        grids.append(grid)
        run(self, source, grid, *rest)

    monkeypatch.setattr(table_kernels.TableKernels, "_run", noted)
    documents = torch.arange(8)[:, None] + torch.arange(40) // 7
    query = torch.randn(8, 2, 40, 16)
    attention = flexgen.compile(None, lambda b, h, q, k: documents[b, q] == documents[b, k], {"BLOCK_N": 16})
    scores = (query @ query.mT / 4).masked_fill((documents[:, :, None] != documents[:, None])[:, None], -torch.inf)
    assert torch.allclose(attention(query, query, query), scores.softmax(-1) @ query, atol=1e-5)
    assert attention.block_table(query, query) is None
    assert grids == []
    attention(query[:3], query[:3], query[:3])
    assert grids and all(max(y, z) <= limit for _, y, z in grids)


# Lengths.


@pytest.mark.parametrize("length", [1 << 20, (1 << 24) + 1, (1 << 31) + 77])
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_lengths_of_millions_are_planned_with_offsets_of_64_bits(length: int, target: str) -> None:
    tensors = [meta(1, 4, length, 128) for _ in range(3)]
    lowered = flexgen.compile(None, lambda b, h, q, k: (q >= k) & (q - k < 1024)).lower(*tensors, target=target)
    assert lowered.forward.plan.target.name == target
    wide = length * 128 >= 1 << 31
    text = lowered.source["forward"]
    assert not wide or "int64" in text or "USE_TMA" in text, text


def test_rows_behind_two_billion_elements_are_found() -> None:
    """Rows that lie 2**27 elements apart: the last one's offset needs 64 bits; the memory between is never touched."""
    stride, rows = 1 << 27, 20
    storage = torch.empty(stride * rows, dtype=torch.float16)  # virtual: only touched pages exist
    far = storage.as_strided((1, 1, rows, 16), (0, 0, stride, 1))
    far.copy_(QUERY)
    near = far.clone()
    for mask in (None, lambda b, h, q, k: q >= k):
        attention = flexgen.compile(None, mask)
        assert torch.equal(attention(far, far, far), attention(near, near, near))
    bias = storage.as_strided((rows,), (stride,), 2)
    bias.copy_(torch.linspace(-1, 1, rows))
    biased = [flexgen.compile(lambda s, b, h, q, k, it=it: s + it[k]) for it in (bias, bias.clone())]
    assert torch.equal(*(attention(near, near, near) for attention in biased))


@pytest.mark.parametrize("shift", [2**31 - 5, -(2**31) + 5, 2**40, 2**62, -(2**62)])
def test_indices_next_to_the_end_of_an_integer(shift: int) -> None:
    assert error_of(None, lambda b, h, q, k: q + shift >= k + shift - 3) < 1e-5
    offset = torch.tensor(shift)
    assert error_of(None, lambda b, h, q, k: (q + offset) - (k + offset) <= 4) < 1e-5
    assert error_of(lambda s, b, h, q, k: s + ((q + shift) % 7) * 0.1) < 1e-5


# Mods of any size.


@pytest.mark.parametrize("count", [40, 1500])
def test_hundreds_of_captured_tensors(count: int) -> None:
    tables = [torch.randn(20, generator=torch.Generator().manual_seed(i)) for i in range(count)]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for table in tables:
            score = score + 0.01 * table[k]
        return score

    assert error_of(score_mod) < 1e-4


def test_more_captured_tensors_than_a_kernel_takes_arguments_are_refused_for_a_gpu() -> None:
    tables = [meta(20, dtype=torch.float32) for _ in range(5000)]

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for table in tables:
            score = score + table[k]
        return score

    attention = flexgen.compile(score_mod)
    with pytest.raises(UnsupportedProblemError, match="5000 captured tensors and numbers") as refusal:
        attention.lower(*(meta(1, 1, 128, 64) for _ in range(3)), target="sm_90")
    assert "torch.stack" in str(refusal.value)


def test_thousands_of_operations_in_a_row() -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(4000):
            score = torch.sin(score) + 0.001
        return score

    assert error_of(score_mod) < 1e-3


def test_thousands_of_operations_have_a_gradient() -> None:
    query = QUERY.clone().requires_grad_()

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        for _ in range(1500):
            score = score * 1.0005 + 0.0001 * torch.cos(score)
        return score

    outputs = flexgen.compile(score_mod)(query, KEY, VALUE), dense_attention(query, KEY, VALUE, score_mod, None)
    found, wanted = (torch.autograd.grad(it.square().sum(), query)[0].double() for it in outputs)
    assert torch.allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("count", [300])
def test_masks_of_hundreds_of_terms(count: int) -> None:
    def union(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = q == k
        for number in range(count):
            found = found | (q + 3 * k == number)
        return found

    def nest(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = q >= k
        for number in range(count):
            found = ~(found & (q + number != 2 * k))
        return found | (q == k)

    for mask in (union, nest):
        assert error_of(None, mask) < 1e-5

"""Partial results of a sharded sequence, added up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexgen.distributed.merge import Cover, MergedRows, RowSums, joined
from flexgen.distributed.plan import Span

ROWS, KEYS = 12, 20
SPANS = {
    "one part": [(0, 12)],
    "a border": [(0, 12), (0, 3)],
    "everywhere": [(0, 12), (0, 12), (0, 12)],
    "apart": [(0, 5), (5, 12)],
    "overlapping": [(0, 7), (4, 12)],
    "two borders": [(0, 12), (0, 3), (9, 12)],
    "rows of none": [(2, 7), (4, 9)],
    "none": [],
}


def attention_of(score: Tensor, value: Tensor) -> dict[str, Tensor]:
    """Return what a kernel returns: rows without a key are 0."""
    lse = score.logsumexp(-1)
    weight = torch.where(score.isinf(), 0.0, torch.exp(score - torch.where(lse.isinf(), 0.0, lse)[..., None]))
    return {"output": weight @ value, "logsumexp": lse, "max_scores": score.amax(-1)}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("tail", [False, True], ids=["", "in two numbers"])
def test_outputs_are_weighted_by_their_sums_of_exponentials(spans, tail):
    """Each part has keys of its own, which its rows alone see."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randn(2, 3, ROWS, KEYS * 3, generator=generator, dtype=torch.float64) * 4
    value = torch.randn(2, 3, KEYS * 3, 8, generator=generator, dtype=torch.float64)
    live = torch.zeros(ROWS, KEYS * 3, dtype=torch.bool)
    parts = []
    for number, (start, stop) in enumerate(spans):
        keys = slice(number * KEYS, (number + 1) * KEYS)
        live[start:stop, keys] = True
        score[:, :, start, keys] = float("-inf")  # a part's first row sees none of its keys
        part = attention_of(score[:, :, start:stop, keys], value[:, :, keys])
        parts.append((start, {name: tensor.float() for name, tensor in part.items()}))
        if tail:
            exact, rounded = part["logsumexp"], parts[-1][1]["logsumexp"]
            parts[-1][1]["logsumexp_tail"] = torch.where(exact.isinf(), 0.0, exact - rounded).float()
    merged = MergedRows(Cover.of(ROWS, [Span(*span) for span in spans]))
    for start, part in parts:
        merged.add(start, part)
    names = ["output", "logsumexp", "max_scores", *["logsumexp_tail"] * tail]
    like = {name: torch.empty(2, 3, 0, *[8] * (name == "output")) for name in names}
    found, expected = merged.total(like), attention_of(score.masked_fill(~live, float("-inf")), value)
    assert found.keys() == like.keys()
    if tail:
        found["logsumexp"] = found["logsumexp"].double() + found["logsumexp_tail"]
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor, rtol=1e-5, atol=1e-5)


def test_a_logsumexp_in_two_numbers_keeps_digits_of_large_scores():
    merged = MergedRows(Cover.of(1, [Span(0, 1), Span(0, 1)]))
    exact = torch.tensor(1e6 + 0.01, dtype=torch.float64)
    part = {"output": torch.ones(1, 1, 1, 4), "logsumexp": exact.float().reshape(1, 1, 1)}
    part["logsumexp_tail"] = (exact - exact.float()).float().reshape(1, 1, 1)
    merged.add(0, part)
    merged.add(0, part)
    like = {name: tensor[:, :, :0] for name, tensor in part.items()}
    found = merged.total(like)
    assert float(found["logsumexp"].double() + found["logsumexp_tail"]) == pytest.approx(
        1e6 + 0.01 + 0.6931472, abs=1e-6
    )


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_float32(spans, dtype):
    parts = [
        torch.full((1, 2, stop - start, 4), 1 + 2.0**-7 * number, dtype=dtype)
        for number, (start, stop) in enumerate(spans)
    ]
    sums, expected = RowSums(Cover.of(ROWS, [Span(*span) for span in spans]), torch.float32), torch.zeros(1, 2, ROWS, 4)
    for (start, stop), part in zip(spans, parts, strict=True):
        sums.add(start, part.clone())
        expected[:, :, start:stop] += part.float()
    total = sums.total(torch.empty(1, 2, ROWS, 4, dtype=dtype))
    assert torch.equal(total, expected.to(dtype))


def test_rows_of_one_part_are_not_copied():
    whole, border = torch.ones(1, 2, ROWS, 4, dtype=torch.bfloat16), torch.ones(1, 2, 3, 4, dtype=torch.bfloat16)
    cover = Cover.of(ROWS, [Span(0, ROWS), Span(0, 3)])
    assert cover == Cover(ROWS, Span(0, 3), is_whole=True)
    sums = RowSums(cover, torch.float32)
    sums.add(0, whole)
    sums.add(0, border)
    total = sums.total(whole)
    assert total.data_ptr() == whole.data_ptr()
    assert total[0, 0, :, 0].tolist() == [2.0] * 3 + [1.0] * 9


def test_covers_are_counted_right():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        ends = torch.randint(0, ROWS + 1, (4, 2), generator=generator).sort(1).values.tolist()
        parts = [Span(*pair) for pair in ends if pair[0] < pair[1]]
        counts = [sum(part.start <= row < part.stop for part in parts) for row in range(ROWS)]
        shared = [row for row, count in enumerate(counts) if count > 1]
        cover = Cover.of(ROWS, parts)
        assert cover.shared == (Span(shared[0], shared[-1] + 1) if shared else Span(0, 0))
        assert cover.is_whole == (0 not in counts)


def test_chunks_are_joined_in_the_order_of_memory():
    chunks = [torch.rand(2, rows, 3, 4).transpose(1, 2) for rows in (5, 6)]
    found = joined(chunks)
    assert torch.equal(found, torch.cat(chunks, 2)) and found.transpose(1, 2).is_contiguous()
    assert joined(chunks[:1]) is chunks[0]

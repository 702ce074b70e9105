"""Every tensor of a call lies between guards: none is read, which NaN and huge indices would show, and none written.

The interpreter refuses accesses outside of what a tensor's sizes and strides span; the guards are also inside of that,
between rows and elements, where padded and masked lanes would reach.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.errors import KernelMemoryError, UnsupportedProblemError
from tests.adversarial.dense import attention as dense_attention

MARGIN = 3  # guards at each side of each dimension
HUGE = {torch.int32: 1 << 30, torch.int64: 1 << 40, torch.int16: 1 << 14, torch.int8: 100, torch.bool: 1}


@dataclass
class Guards:
    """Places tensors between guards, and knows whether those still are what they were."""

    placed: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def place(self, tensor: Tensor, requires_grad: bool = False) -> Tensor:
        """Return the same values between guards of NaN or of a huge number."""
        guard = float("nan") if tensor.dtype.is_floating_point else HUGE[tensor.dtype]
        room = torch.full([size + 2 * MARGIN for size in tensor.shape], guard, dtype=tensor.dtype)
        inside = tuple(slice(MARGIN, MARGIN + size) for size in tensor.shape)
        room[inside] = tensor
        is_guard = torch.ones(room.shape, dtype=torch.bool)
        is_guard[inside] = False
        self.placed.append((room, is_guard, room.clone()))
        return room[inside].requires_grad_(requires_grad)

    def check(self) -> None:
        for room, is_guard, before in self.placed:
            assert torch.equal(room[is_guard].nan_to_num(nan=7.0), before[is_guard].nan_to_num(nan=7.0))


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), atol=1e-4, rtol=1e-4)


# Head dims and lengths that leave lanes of every tile empty.
SHAPES = [(16, 16, 33, 33), (5, 3, 7, 50), (17, 40, 65, 31), (1, 1, 1, 1), (80, 24, 2, 129), (64, 64, 128, 128)]
OPTIONS = [{}, {"BLOCK_M": 16, "BLOCK_N": 16}, {"BLOCK_M": 32, "BLOCK_N": 64, "BACKEND": "TRITON"}]
TABLE, PAIRS, OFFSETS = drawn(40), drawn(2, 31, seed=1), torch.tensor([0, 5, 11, 40, 3] * 30)


def mods_of(guards: Guards, name: str) -> tuple[Callable[..., Any] | None, Callable[..., Any] | None]:
    table, pairs, offsets = (guards.place(it) for it in (TABLE, PAIRS, OFFSETS))
    scores = {
        "tables": lambda s, b, h, q, k: s + table[(q - k) % 40] + pairs[h, k % 31],
        "outside": lambda s, b, h, q, k: s + table[k - 20] + pairs[h - 1, q],
    }
    masks = {
        "window": lambda b, h, q, k: (q - k).abs() < 9,
        "rows": lambda b, h, q, k: k < offsets[q] + 4,
        "documents": lambda b, h, q, k: offsets[q] == offsets[k],
        "empty": lambda b, h, q, k: (k < q - 3) & (q % 3 == 0),
    }
    return scores.get(name), masks.get(name)


@pytest.mark.parametrize("options", OPTIONS, ids=["own tiles", "smallest tiles", "uneven tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["none", "tables", "outside", "window", "rows", "documents", "empty"])
def test_forward_and_backward_touch_no_guard(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    head_dim, value_dim, queries, keys = shape
    guards = Guards()
    score_mod, mask_mod = mods_of(guards, name)
    plain = [drawn(2, 2, queries, head_dim), drawn(2, 1, keys, head_dim, seed=1), drawn(2, 1, keys, value_dim, seed=2)]
    inputs = [guards.place(tensor, requires_grad=True) for tensor in plain]
    output = flexgen.compile(score_mod, mask_mod, options)(*inputs)
    weight = guards.place(drawn(2, 2, queries, value_dim, seed=3))
    found = [output, *torch.autograd.grad(output, inputs, weight, materialize_grads=True)]
    guards.check()
    exact = [tensor.double().requires_grad_() for tensor in plain]
    right = dense_attention(*exact, _within(score_mod, name), mask_mod)
    wanted = [right, *torch.autograd.grad(right, exact, weight.double(), materialize_grads=True)]
    assert all(itertools.starmap(close, zip(found, wanted, strict=True)))


def _within(score_mod: Callable[..., Any] | None, name: str) -> Callable[..., Any] | None:
    """Return what a score_mod means to torch, which raises outside of a tensor where flexgen reads 0."""
    if name != "outside":
        return score_mod

    def at(values: Tensor, index: Tensor) -> Tensor:
        index = torch.where(index < 0, index + len(values), index)
        return torch.where((index >= 0) & (index < len(values)), values[index.clamp(0, len(values) - 1)], 0.0)

    def read(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        pair = torch.where(h - 1 < 0, at(PAIRS[1], q), at(PAIRS[0], q))
        return s + at(TABLE, k - 20) + pair

    return read


@pytest.mark.parametrize("queries", [1, 5, 40])
def test_pages_and_their_table_touch_no_guard(queries: int) -> None:
    guards, size, lengths = Guards(), 16, [37, 0, 16]
    keys, values = drawn(3, 2, 48, 16), drawn(3, 2, 48, 8, seed=1)
    order = torch.tensor([[4, 1, 7], [0, 0, 0], [2, 0, 0]], dtype=torch.int32)
    pages = [torch.full((9, 2, size, it.shape[3]), torch.nan) for it in (keys, values)]
    table = torch.full((3, 3), 1 << 30, dtype=torch.int32)  # of what is behind the last key, too
    for row, length in enumerate(lengths):
        for page in range(-(-length // size)):
            table[row, page] = order[row, page]
            rows = slice(page * size, min((page + 1) * size, length))
            for held, whole in zip(pages, (keys, values), strict=True):
                held[order[row, page], :, : rows.stop - rows.start] = whole[row, :, rows]
    query = guards.place(drawn(3, 4, queries, 16, seed=2))
    paged = [guards.place(it) for it in pages]
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    attention = flexgen.compile(None, lambda b, h, q, k: k % 5 != 1)
    sides = {"kv_lengths": kv_lengths, "page_table": guards.place(table)}
    output = attention(query, *paged, validate=True, **sides)
    guards.check()
    for row, length in enumerate(lengths):
        own = (it[row : row + 1, :, :length] for it in (keys, values))
        if length:
            mask = lambda b, h, q, k: k % 5 != 1  # noqa: E731
            assert close(output[row : row + 1], dense_attention(query[row : row + 1], *own, None, mask))
        else:
            assert not output[row].any()


def test_packed_sequences_touch_no_guard() -> None:
    guards, ends = Guards(), torch.tensor([0, 7, 7, 40, 61], dtype=torch.int32)
    plain = [drawn(1, 2, 64, 16, seed=seed) for seed in range(3)]
    inputs = [guards.place(tensor, requires_grad=True) for tensor in plain]
    whole = torch.cat([torch.full((3,), 1 << 30, dtype=torch.int32), ends, torch.full((3,), 1 << 30)]).int()
    attention = flexgen.compile(None, lambda b, h, q, k: q >= k)
    output = attention(*inputs, cu_seqlens_q=whole[3:-3])
    grads = torch.autograd.grad(output.square().sum(), inputs)
    guards.check()
    for start, stop in itertools.pairwise(ends.tolist()):
        if stop > start:
            own = [it[:, :, start:stop].double().requires_grad_() for it in plain]
            right = dense_attention(*own, None, lambda b, h, q, k: q >= k)
            assert close(output[:, :, start:stop], right)
            for found, wanted in zip(grads, torch.autograd.grad(right.square().sum(), own), strict=True):
                assert close(found[:, :, start:stop], wanted)
    assert not any(it[:, :, 61:].any() for it in (output, *grads))


@pytest.mark.parametrize("unused", [1 << 30, -1, 77])
def test_entries_of_a_block_mask_behind_a_rows_count_are_not_followed(unused: int) -> None:
    guards = Guards()
    mask = lambda b, h, q, k: (q >= k) & (q - k < 20)  # noqa: E731
    blocks = flexgen.create_block_mask(mask, None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(blocks, f"{kind}_num_blocks"), getattr(blocks, f"{kind}_indices")
        used = torch.arange(indices.shape[-1]) < counts[..., None]
        setattr(blocks, f"{kind}_indices", guards.place(torch.where(used, indices, unused).int()))
    plain = [drawn(1, 2, 70, 16, seed=seed) for seed in range(3)]
    inputs = [guards.place(tensor, requires_grad=True) for tensor in plain]
    attention = flexgen.compile(None, mask, {"BLOCK_M": 16, "BLOCK_N": 16})
    output = attention(*inputs, block_table=blocks, validate=True)
    grads = torch.autograd.grad(output.square().sum(), inputs)
    guards.check()
    exact = [it.double().requires_grad_() for it in plain]
    right = dense_attention(*exact, None, mask)
    wanted = torch.autograd.grad(right.square().sum(), exact)
    assert close(output, right) and all(itertools.starmap(close, zip(grads, wanted, strict=True)))


@pytest.mark.parametrize("wrong", [1 << 30, -1, 5])
def test_an_index_that_names_no_block_is_refused(wrong: int) -> None:
    blocks = flexgen.create_block_mask(lambda b, h, q, k: q >= k, None, None, 70, 70, device="cpu", BLOCK_SIZE=16)
    blocks.full_kv_indices[0, 0, 3, 0] = wrong
    query = drawn(1, 1, 70, 16)
    attention = flexgen.compile(None, lambda b, h, q, k: q >= k, {"BLOCK_M": 16, "BLOCK_N": 16})
    with pytest.raises(UnsupportedProblemError, match=r"names a block that is not in 0\.\.4"):
        attention(query, query, query, block_table=blocks, validate=True)


@pytest.mark.parametrize("wrong", [1 << 30, -1, 9])
def test_a_page_that_is_none_is_refused_or_found(wrong: int) -> None:
    pages, query = drawn(9, 1, 16, 16), drawn(1, 1, 1, 16)
    sides = {
        "kv_lengths": torch.tensor([40], dtype=torch.int32),
        "page_table": torch.tensor([[1, wrong, 2]], dtype=torch.int32),
    }
    attention = flexgen.compile()
    with pytest.raises(UnsupportedProblemError, match=r"page_table\[0, 1\] is .*, and there are 9 pages"):
        attention(query, pages, pages, validate=True, **sides)
    with pytest.raises(KernelMemoryError):
        attention(query, pages, pages, **sides)

"""Block masks made anew for each step: nothing is prepared again, nothing is kept, and each step's lists count."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import flexgen
from flexgen.runtime import kernel
from tests.addressed import Addressed
from tests.reference import dense_attention

SHAPE = (2, 2, 200, 16)


@pytest.fixture(params=["interpreted", "as a GPU launches"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = kernel.executor
    if request.param == "as a GPU launches":
        monkeypatch.setattr(kernel, "executor", lambda *arguments: Addressed(executor(*arguments)))


def drawn(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(SHAPE, requires_grad=True) for _ in range(3)]


def mask_of(document: torch.Tensor):
    def same(b, h, q_idx, kv_idx):
        return (document[b, q_idx] == document[b, kv_idx]) & (q_idx >= kv_idx)

    return same


def check(inputs, block_mask, expected_mask) -> None:
    output = flexgen.flex_attention(*inputs, block_mask=block_mask)
    grad = torch.randn_like(output)
    dense = dense_attention(*inputs, None, expected_mask).out
    torch.testing.assert_close(output.double(), dense, rtol=0, atol=1e-5)
    wanted = torch.autograd.grad(dense, inputs, grad.double())
    for one, other in zip(torch.autograd.grad(output, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)


def documents(step: int) -> torch.Tensor:
    return (torch.arange(200) // torch.tensor([[30 + 7 * step], [50 + step]])).to(torch.int32)


def made(mask, **options):
    return flexgen.create_block_mask(mask, 2, None, 200, 200, device="cpu", BLOCK_SIZE=64, **options)


def test_each_steps_lists_count(launched, monkeypatch):
    described: list[object] = []
    describe = flexgen.Attention._describe
    monkeypatch.setattr(flexgen.Attention, "_describe", lambda *args: described.append(args) or describe(*args))
    for step in range(5):
        mask = mask_of(documents(step))
        check(drawn(step), made(mask), mask)
    assert len(described) <= 1, "once, if no test has made such a call before"


def test_no_mask_is_kept(launched):
    kept = []
    for step in range(3):
        mask = mask_of(documents(step))
        block_mask = made(mask)
        check(drawn(step), block_mask, mask)
        kept.append(weakref.ref(block_mask.kv_indices))
        del block_mask, mask
    gc.collect()
    assert [one() for one in kept] == [None] * 3


def test_without_lists_by_columns(launched):
    for step in range(3):
        mask = mask_of(documents(step))
        block_mask = made(mask)
        block_mask.q_indices = block_mask.q_num_blocks = None
        block_mask.full_q_indices = block_mask.full_q_num_blocks = None
        check(drawn(step), block_mask, mask)


def test_lists_that_change_in_place_count(launched):
    """Also those of another dtype, which kernels read as copies."""
    masks = [mask_of(documents(step)) for step in range(3)]
    for dtype in (torch.int32, torch.int64):
        first = made(masks[0])
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            setattr(first, name, getattr(first, name).to(dtype).clone())
        first.q_indices = first.q_num_blocks = first.full_q_indices = first.full_q_num_blocks = None
        for step, mask in enumerate(masks):
            other = made(mask)
            for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
                getattr(first, name).copy_(getattr(other, name))
            first.mask_mod = mask
            check(drawn(step), first, mask)


def test_a_mask_may_be_changed_and_copied_after_it_was_read(launched):
    mask = mask_of(documents(0))
    block_mask = made(mask)
    check(drawn(0), block_mask, mask)
    check(drawn(1), copy.copy(block_mask), mask)
    inputs = [tensor.detach()[:, :, :100].requires_grad_() for tensor in drawn(2)]
    with pytest.raises(flexgen.UnsupportedProblemError, match="made for 200 queries"):
        flexgen.flex_attention(*inputs, block_mask=block_mask)
    other = mask_of(documents(3))
    replaced = made(other)
    block_mask.kv_num_blocks, block_mask.kv_indices = replaced.kv_num_blocks, replaced.kv_indices
    block_mask.full_kv_num_blocks, block_mask.full_kv_indices = replaced.full_kv_num_blocks, replaced.full_kv_indices
    block_mask.q_num_blocks = block_mask.q_indices = None
    block_mask.full_q_num_blocks = block_mask.full_q_indices = None
    block_mask.mask_mod = other
    check(drawn(4), block_mask, other)


def test_a_promise_is_checked_also_of_a_mask_that_was_read_without_it(launched):
    def gap(b, h, q_idx, kv_idx):
        return (kv_idx < 64) | (kv_idx >= 128)

    block_mask, inputs = made(gap), drawn(0)
    check(inputs, block_mask, gap)
    with pytest.raises(flexgen.OptionError, match="BLOCKS_ARE_CONTIGUOUS=True, but"):
        flexgen.flex_attention(*inputs, block_mask=block_mask, kernel_options={"BLOCKS_ARE_CONTIGUOUS": True})

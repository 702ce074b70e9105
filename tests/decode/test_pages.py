"""Keys and values in pages: any multiple of 16 keys, in any order, with whatever lies in the rest of them."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, Inputs, assert_output, assert_statistics, random_inputs, refusal
from tests.reference import dense_attention, eager_attention

CPU = torch.device("cpu")
LENGTHS = (200, 0, 77)
FAR = 10**9  # a page that is not there, in entries that no kernel may follow


@dataclass(frozen=True, slots=True)
class Paged:
    """The same keys and values one after the other and in pages, [n_pages, Hkv, page_size, D]."""

    flat: Inputs
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    lengths: torch.Tensor


def in_pages(tensor: torch.Tensor, table: torch.Tensor, page_size: int, n_pages: int) -> torch.Tensor:
    """Return pages that hold [B, Hkv, L, D]; what holds no key is NaN."""
    batch, heads, length, head_dim = tensor.shape
    pages = torch.full((n_pages, heads, page_size, head_dim), float("nan"), dtype=torch.float32, device=tensor.device)
    pages[table.long()] = tensor.float().view(batch, heads, length // page_size, page_size, head_dim).transpose(1, 2)
    return pages.to(tensor.dtype)


def paged_inputs(page_size: int, queries: int, device, dtype=torch.float32, lengths=LENGTHS) -> Paged:
    batch, max_pages = 3, -(-200 // page_size)
    flat = random_inputs(Shape(batch, 6, 2, queries, max_pages * page_size), device, dtype=dtype, v_head_dim=24)
    n_pages = batch * max_pages + 3
    order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(1))[: batch * max_pages]
    table = order.view(batch, max_pages).int().to(device)
    key, value = (in_pages(tensor, table, page_size, n_pages) for tensor in list(flat)[1:])
    for row, length in enumerate(lengths):
        table[row, -(-length // page_size) :] = FAR if row else -5
    return Paged(flat, key, value, table, torch.tensor(lengths, dtype=torch.int32, device=device))


def softcap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def sinks_and_window(b, h, q_idx, kv_idx):
    distance = q_idx + 70 - kv_idx
    return ((distance >= 0) & (distance < 30)) | (kv_idx < 4)


def every_third(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx) % 3 == 0


def check(paged: Paged, mask, options=None, **call) -> None:
    attention = flexgen.compile(softcap, mask, options)
    query, key, value = paged.flat.query, paged.key, paged.value
    bshd = attention.options.layout == "bshd"
    tensors = [tensor.transpose(1, 2).contiguous() if bshd else tensor for tensor in (query, key, value)]
    output, aux = attention(
        *tensors, kv_lengths=paged.lengths, page_table=paged.table, validate=True, return_aux=EVERYTHING, **call
    )

    def live(b, h, q_idx, kv_idx):
        exists = kv_idx < paged.lengths[b]
        return exists if mask is None else exists & mask(b, h, q_idx, kv_idx)

    dense = dense_attention(*paged.flat, softcap, live)
    eager = eager_attention(query, *(t.to(query.dtype) for t in list(paged.flat)[1:]), softcap, live)
    assert_output(paged.flat, output.transpose(1, 2) if bshd else output, dense, eager)
    assert_statistics(paged.flat, aux, dense)


@pytest.mark.parametrize("page_size", [16, 48, 64, 128])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("options", [{}, {"BLOCK_N": 16, "layout": "bshd"}, {"BLOCK_N": 64}])
def test_pages_of_any_size(page_size, queries, options, device):
    check(paged_inputs(page_size, queries, device), sinks_and_window, options)


@pytest.mark.parametrize("page_size", range(16, 273, 32))
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("queries", [3, 20])
def test_any_multiple_of_16_in_both_layouts(page_size, layout, queries, device):
    check(paged_inputs(page_size, queries, device), sinks_and_window, {"layout": layout})


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("mask", [None, every_third])
def test_masks_see_positions_in_the_sequence(queries, mask, device):
    check(paged_inputs(32, queries, device, torch.bfloat16), mask)


def test_splits_of_pages(device):
    check(paged_inputs(16, 2, device), sinks_and_window, {"SPLIT_KV": 5, "BLOCK_N": 32})


@pytest.mark.parametrize("block", [32, 48])
def test_blocks_of_a_block_mask_are_positions_in_the_sequence(block, device):
    paged = paged_inputs(32, 40, device)
    keys = paged.flat.key.shape[2]
    block_mask = flexgen.create_block_mask(every_third, 1, 1, 40, keys, device=device, BLOCK_SIZE=block)
    check(paged, every_third, block_table=block_mask)


def test_float8_pages_with_scales(device):
    paged = paged_inputs(64, 1, device, torch.bfloat16)
    key, value = paged.key.to(torch.float8_e4m3fn), paged.value.to(torch.float8_e5m2)
    scale = torch.tensor([0.5, 2.0], device=device)
    output = flexgen.compile()(
        paged.flat.query,
        key,
        value,
        kv_lengths=paged.lengths,
        page_table=paged.table,
        k_scale=scale,
        v_scale=scale,
    )
    stored = (paged.flat.key.to(key.dtype), paged.flat.value.to(value.dtype))
    flat = [tensor.double() * scale.double()[:, None, None] for tensor in stored]
    dense = dense_attention(paged.flat.query, *flat, None, lambda b, h, q_idx, kv_idx: kv_idx < paged.lengths[b])
    torch.testing.assert_close(output.double(), dense.out, rtol=0, atol=3e-2)


def test_lengths_and_tables_that_change_use_the_kernel_at_hand(device):
    paged = paged_inputs(16, 1, device)
    attention = flexgen.compile()
    for step in (1, 16, 17, 70):
        paged.lengths[2] = step
        attention(paged.flat.query, paged.key, paged.value, kv_lengths=paged.lengths, page_table=paged.table.clone())
    assert len(attention._kernels) == 1


# Refusals.


def call_with(paged: Paged, **changes):
    given = {"kv_lengths": paged.lengths, "page_table": paged.table, **changes}
    return lambda: flexgen.compile()(paged.flat.query, paged.key, paged.value, **given)


def test_a_page_that_is_not_there_is_found():
    paged = paged_inputs(16, 1, CPU)
    paged.table[2, 4] = 77777
    call = call_with(paged, validate=True)
    refusal(call, flexgen.UnsupportedProblemError, "page_table[2, 4] is 77777", "77 keys")
    paged.table[2, 4] = -1
    refusal(call, flexgen.UnsupportedProblemError, "page_table[2, 4] is -1")


def test_page_tables_are_checked():
    paged = paged_inputs(16, 1, CPU)
    table = paged.table
    refusal(call_with(paged, page_table=table.long()), flexgen.ProblemTypeError, "torch.int64", "int32")
    refusal(call_with(paged, page_table=table[:2]), flexgen.UnsupportedProblemError, "batch size 3", "max_pages")
    refusal(call_with(paged, page_table=table.t().contiguous().t()), flexgen.UnsupportedProblemError, "strided")
    refusal(call_with(paged, kv_lengths=None), flexgen.UnsupportedProblemError, "without kv_lengths")


def test_page_sizes_are_multiples_of_16():
    query = torch.randn(1, 1, 1, 16)
    pages = torch.randn(4, 1, 24, 16)
    table, lengths = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    call = lambda: flexgen.compile()(query, pages, pages, kv_lengths=lengths, page_table=table)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "pages have 24 keys", "multiples of 16")


def test_gradients_are_refused():
    paged = paged_inputs(16, 1, CPU)
    paged.flat.query.requires_grad_()
    refusal(call_with(paged), flexgen.UnsupportedProblemError, "gradients", "kv_lengths")


def test_gluon_leaves_pages_to_plain_triton():
    pages = torch.empty(64, 4, 128, 64, device="meta", dtype=torch.bfloat16)
    query = torch.empty(2, 4, 512, 64, device="meta", dtype=torch.bfloat16)
    table, lengths = (torch.empty(size, dtype=torch.int32, device="meta") for size in ((2, 8), (2,)))
    plan = flexgen.compile().lower(query, pages, pages, target="sm_90", kv_lengths=lengths, page_table=table).plan
    backend = next(decision for decision in plan.decisions if decision.name == "BACKEND")
    assert {str(rejected.value): rejected.because for rejected in backend.rejected}["GLUON"] == "keys lie in pages"

"""Backward of masks that are no intervals: dQ walks lists of keys, dK and dV of queries, derived on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.lowered import Lowered
from flexgen.runtime import derived_table, table_cache
from tests.backward.run import check_backward, draw, gradients, learned, loss_of, training_inputs
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.forward.run import Inputs, refusal, square

FORWARD = {"BLOCK_M": 16, "BLOCK_N": 16}
TILES = {"BLOCK_M1": 16, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 16}
SMALL = {**FORWARD, **TILES}
OBLONG = {**FORWARD, "BLOCK_M1": 32, "BLOCK_N1": 16, "BLOCK_M2": 16, "BLOCK_N2": 32}
Mask = Callable[..., Tensor]


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu)])
def gpu(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def documents(ids: Tensor, *, causal: bool = True) -> Mask:
    def document_mask(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & ((q_idx >= kv_idx) if causal else (kv_idx >= 0))

    return document_mask


def of_lengths(*lengths: int, device: Any = "cpu") -> Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device, torch.int32)


def modulo(b, h, q, k):
    return ((q % 3) == (k % 3)) & (q >= k)


def dilated(b, h, q, k):
    return ((q - k) % 24 < 4) & (q - k >= 0)


def tables_built(attention: flexgen.Attention) -> int:
    return attention._tables.cache.built


def grads_of(attention: flexgen.Attention, inputs: Inputs, **options: Any) -> list[Tensor]:
    return gradients(loss_of(attention(*inputs, **options), None, inputs.query.dtype), list(inputs))


def assert_same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


# The text.


def lower(mask: Mask, head_dim: int) -> Lowered:
    query = torch.empty(1, 4, 1024, head_dim, device="meta", dtype=torch.bfloat16, requires_grad=True)
    return flexgen.compile(None, mask).lower(query, query, query, target="sm_90")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_kernels_walk_lists_of_blocks_as_large_as_their_tiles(head_dim: int) -> None:
    lowered = lower(documents(of_lengths(300, 724)), head_dim)
    assert lowered.backward is not None
    assert {"backward_dq_block_table", "backward_dkdv_block_table"} <= set(lowered.source)
    for entry, axis in (("backward_dq", "kv"), ("backward_dkdv", "q")):
        text, (_, plan) = lowered.source[entry], lowered.backward.passes[entry]
        assert f"listed = tl.load({axis}_offsets_ptr + line_of_blocks)" in text
        assert f"last = tl.load(full_{axis}_num_blocks_ptr + line_of_blocks)" in text
        assert f"{axis}_start = next_block * BLOCK_" in text
        assert "tiles_per_block" not in text
        assert (plan.SPARSE_Q_BLOCK_SIZE, plan.SPARSE_KV_BLOCK_SIZE) == (plan.BLOCK_M, plan.BLOCK_N)
    assert lowered.explain().count("derived table: blocks as its tiles") == 2


def test_masks_that_are_intervals_walk_no_list() -> None:
    lowered = lower(lambda b, h, q, k: q >= k, 64)
    assert not any("indices_ptr" in text for text in lowered.source.values())


def test_blocks_that_are_not_listed_are_not_visited(device: torch.device) -> None:
    """A NaN of a visited tile would reach the sums, though its weight is 0."""
    inputs = training_inputs(square(64), device)
    with torch.no_grad():
        for tensor in inputs:
            tensor[:, :, 32:].fill_(float("nan"))
    attention = flexgen.compile(None, documents(of_lengths(32, 32, device=device), causal=False), SMALL)
    out = attention(*inputs)[:, :, :32]
    for grad in torch.autograd.grad(out.sum(), list(inputs)):
        assert grad[:, :, :32].isfinite().all()


# Gradients.


@pytest.mark.parametrize("options", [SMALL, OBLONG, {}], ids=["small", "oblong", "default"])
@pytest.mark.parametrize("lengths", [(32, 32, 32), (20, 33, 5, 12), (1, 69)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_documents(device: torch.device, options: dict[str, int], lengths: tuple[int, ...], causal: bool) -> None:
    mask = documents(of_lengths(*lengths, device=device), causal=causal)
    attention = flexgen.compile(None, mask, options)
    check_backward(training_inputs(square(sum(lengths)), device), None, mask, attention=attention, use_lse=True)
    assert tables_built(attention) >= 2 or not options


@pytest.mark.parametrize("mask", [modulo, dilated])
def test_regular_patterns(device: torch.device, mask: Mask) -> None:
    check_backward(training_inputs(Shape(1, 2, 2, 70, 70), device), None, mask, options=SMALL)


@pytest.mark.parametrize("name", ["documents_per_batch_packed", "random_blocks", "exclusive_or", "strided"])
def test_masks_of_the_corpus_with_grouped_heads(device: torch.device, name: str) -> None:
    shape = Shape(2, 4, 2, 53, 53)
    mask = MASKS[name].build(shape, device)
    attention = flexgen.compile(None, mask, OBLONG)
    check_backward(training_inputs(shape, device), None, mask, attention=attention)
    assert tables_built(attention) == 3


@pytest.mark.parametrize("lengths", [(31, 90), (90, 31), (64, 128), (131, 67)])
def test_lengths_need_not_be_equal_nor_whole_blocks(device: torch.device, lengths: tuple[int, int]) -> None:
    mask = documents(of_lengths(40, 35, 25, 31, device=device), causal=False)
    check_backward(training_inputs(Shape(2, 6, 2, *lengths), device), None, mask, options=OBLONG)


def test_lists_that_differ_between_heads_of_a_group(device: torch.device) -> None:
    ids = torch.stack([of_lengths(10 * h + 3, 60 - 10 * h, 7, device=device) for h in range(4)])
    mask = lambda b, h, q, k: ids[h, q] == ids[h, k]  # noqa: E731
    check_backward(training_inputs(Shape(2, 4, 2, 70, 70), device), None, mask, options=SMALL)


@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_captured_tensors(device: torch.device, deterministic: bool) -> None:
    mask, shape = documents(of_lengths(20, 33, 17, device=device)), Shape(2, 4, 2, 70, 70)
    relative, of_keys, of_rows = (draw(*size, device=device) for size in ((139,), (4, 70), (70,)))
    score = learned(
        lambda t, u, w: lambda score, b, h, q, k: score * (1 + u[h, k]) + t[q - k + 69] + w[q],
        relative, of_keys, of_rows,
    )  # fmt: skip
    torch.use_deterministic_algorithms(deterministic)
    try:
        check_backward(training_inputs(shape, device), score, mask, options=OBLONG)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["neighbourhood_2d", "dilated_per_head", "documents_causal"])
@pytest.mark.parametrize("options", [SMALL, OBLONG], ids=["small", "oblong"])
def test_a_table_made_by_the_caller(device: torch.device, name: str, options: dict[str, int]) -> None:
    shape = Shape(2, 4, 2, 53, 53)
    mask, inputs = MASKS[name].build(shape, device), training_inputs(shape, device)
    attention = flexgen.compile(None, mask, options)
    table = attention.block_table(inputs.query, inputs.key)
    assert table is not None
    check_backward(inputs, None, mask, attention=attention, block_mask=None)
    given, implicit = grads_of(attention, inputs, block_table=table), grads_of(flexgen.compile(None, mask), inputs)
    assert_same(given, implicit)


def test_lists_without_room_visit_every_block(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_cache, "MAX_BLOCKS", 3)
    mask = documents(of_lengths(30, 41, 29, device=device), causal=False)
    check_backward(training_inputs(square(100), device), None, mask, options=SMALL)


# How often tables are made.


def test_tables_are_made_once_for_repeated_steps(device: torch.device) -> None:
    inputs = training_inputs(square(70), device)
    attention = flexgen.compile(None, documents(of_lengths(30, 40, device=device)), SMALL)
    first = grads_of(attention, inputs)
    assert tables_built(attention) == 2, "forward and dQ, whose tiles are alike, share one"
    for _ in range(2):
        assert_same(grads_of(attention, inputs), first)
    assert tables_built(attention) == 2


def test_a_given_table_serves_a_kernel_of_the_same_tiles(device: torch.device) -> None:
    inputs = training_inputs(square(70), device)
    attention = flexgen.compile(None, documents(of_lengths(30, 40, device=device)), SMALL)
    table = attention.block_table(inputs.query, inputs.key)
    for _ in range(2):
        grads_of(attention, inputs, block_table=table)
    assert tables_built(attention) == 1, "of dK and dV alone"


def test_ids_changed_between_steps_get_new_tables(device: torch.device) -> None:
    ids = of_lengths(30, 40, device=device)
    mask, inputs = documents(ids), training_inputs(square(70), device)
    attention = flexgen.compile(None, mask, SMALL)
    check_backward(inputs, None, mask, attention=attention)
    ids.copy_(of_lengths(10, 25, 35, device=device))
    check_backward(inputs, None, mask, attention=attention)
    assert tables_built(attention) == 4


def test_a_changed_number_is_that_of_the_forward(device: torch.device) -> None:
    def stripes(b, h, q_idx, kv_idx, period=16):
        return (q_idx // period) % 3 == (kv_idx // period) % 3

    inputs = training_inputs(square(96), device)
    attention = flexgen.compile(None, stripes, SMALL)
    expected = grads_of(attention, inputs)
    out = attention(*inputs)
    stripes.__defaults__ = (24,)
    attention(*inputs)
    assert_same(gradients(loss_of(out, None, torch.float32), list(inputs)), expected)


def test_saved_tensors_may_be_moved_away(device: torch.device) -> None:
    """Hooks bring back other tensors than were saved; tables are then made of those."""
    inputs = training_inputs(square(70), device)
    attention = flexgen.compile(None, documents(of_lengths(30, 40, device=device)), SMALL)
    expected = grads_of(attention, inputs)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        out = attention(*inputs)
    assert_same(gradients(loss_of(out, None, torch.float32), list(inputs)), expected)


def test_a_capture_needs_tables_made_before_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = training_inputs(square(70), device)
    attention = flexgen.compile(None, documents(of_lengths(30, 40, device=device)), SMALL)
    out = attention(*inputs)
    with monkeypatch.context() as capturing:
        capturing.setattr(derived_table, "is_capturing", lambda device: True)
        refusal(
            lambda: torch.autograd.grad(out.sum(), list(inputs)),
            flexgen.UnsupportedProblemError,
            "while a CUDA graph is captured",
            "run the call once",
        )
    expected = grads_of(attention, inputs)
    with monkeypatch.context() as capturing:
        capturing.setattr(derived_table, "is_capturing", lambda device: True)
        assert_same(grads_of(attention, inputs), expected)


# On a GPU.


def half_inputs() -> Inputs:
    return training_inputs(square(2048, heads=2), torch.device("cuda"), dtype=torch.bfloat16, head_dim=64)


def test_kernels_compiled_for_a_gpu_agree_with_float64(gpu: torch.device) -> None:
    mask = documents(of_lengths(100, 700, 3, 221, device=gpu))
    inputs = training_inputs(Shape(2, 4, 2, 1024, 1024), gpu, dtype=torch.bfloat16, head_dim=64)
    check_backward(inputs, None, mask)


def test_a_step_with_new_ids_waits_for_nothing(gpu: torch.device) -> None:
    ids, inputs = of_lengths(1000, 1048, device=gpu), half_inputs()
    attention = flexgen.compile(None, documents(ids))
    expected = torch.autograd.grad(attention(*inputs), list(inputs), torch.ones_like(inputs.query))
    ids.add_(1)
    ones = torch.ones_like(inputs.query)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = torch.autograd.grad(attention(*inputs), list(inputs), ones)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(list(found), list(expected))


def test_a_captured_step_replays_with_tables_made_before(gpu: torch.device) -> None:
    inputs = half_inputs()
    attention = flexgen.compile(None, documents(of_lengths(1000, 1048, device=gpu)))
    ones = torch.ones_like(inputs.query)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = torch.autograd.grad(attention(*inputs), list(inputs), ones)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(attention(*inputs), list(inputs), ones)
    graph.replay()
    assert_same(list(found), list(expected))

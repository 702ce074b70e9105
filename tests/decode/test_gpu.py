"""What only a GPU shows of decoding: CUDA graphs, memory, waiting, several streams, and the time of the host."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.decode.test_pages import paged_inputs
from tests.forward.run import Inputs, random_inputs
from tests.reference import dense_attention

pytestmark = pytest.mark.gpu
SHAPE = Shape(4, 8, 2, 1, 4096)
OPTIONS = [{"SPLIT_KV": 1}, {"SPLIT_KV": 8}, {}]


def drawn(seed: int = 0) -> Inputs:
    return random_inputs(SHAPE, torch.device("cuda"), dtype=torch.bfloat16, head_dim=64, seed=seed)


def up_to(lengths: torch.Tensor) -> Callable[..., torch.Tensor]:
    return lambda b, h, q_idx, kv_idx: kv_idx < lengths[b]


def captured(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS)
def test_one_graph_serves_positions_and_lengths(options):
    inputs = drawn()
    lengths = torch.ones(4, dtype=torch.int32, device="cuda")
    position = torch.zeros(4, dtype=torch.int64, device="cuda")

    def softcap(score, b, h, q_idx, kv_idx):
        return 30.0 * torch.tanh(score / 30.0)

    def window(b, h, q_idx, kv_idx):
        distance = position[b] + q_idx - kv_idx
        return (distance >= 0) & (distance < 1000)

    attention = flexgen.compile(softcap, window, options)
    graph, output = captured(lambda: attention(*inputs, kv_lengths=lengths))
    for step in (1, 5, 64, 999, 1000, 1001, 4095, 4096):
        lengths.fill_(step)
        lengths[1] = max(step // 2, 1)
        position.copy_(lengths - 1)
        graph.replay()
        expected = dense_attention(*inputs, softcap, lambda *at: up_to(lengths)(*at) & window(*at)).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("page_size", [16, 64, 112])
@pytest.mark.parametrize("queries", [1, 40])
def test_one_graph_serves_tables_of_pages(page_size, queries):
    first = paged_inputs(page_size, queries, torch.device("cuda"), torch.bfloat16)
    attention = flexgen.compile()
    tensors = (first.flat.query, first.key, first.value)
    graph, output = captured(lambda: attention(*tensors, kv_lengths=first.lengths, page_table=first.table))
    for lengths in ((200, 3, 77), (1, 199, 0), (80, 80, 80)):
        paged = paged_inputs(page_size, queries, torch.device("cuda"), torch.bfloat16, lengths=lengths)
        for kept, now in zip((*tensors, first.lengths, first.table), _tensors(paged), strict=True):
            kept.copy_(now)
        graph.replay()
        expected = dense_attention(*paged.flat, None, up_to(paged.lengths)).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)


def _tensors(paged) -> tuple[torch.Tensor, ...]:
    return (paged.flat.query, paged.key, paged.value, paged.lengths, paged.table)


@torch.no_grad()
@pytest.mark.parametrize(("options", "allocations"), [({"SPLIT_KV": 1}, 1), ({"SPLIT_KV": 8}, 2)])
def test_a_warm_call_allocates_an_output_and_one_scratch_buffer_and_waits_for_nothing(options, allocations):
    inputs, lengths = drawn(), torch.full((4,), 4000, dtype=torch.int32, device="cuda")
    attention = flexgen.compile(options=options)
    kept = [attention(*inputs, kv_lengths=lengths) for _ in range(3)]
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept += [attention(*inputs, kv_lengths=lengths) for _ in range(10)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 10 * allocations
    for output in kept[1:]:
        torch.testing.assert_close(output, kept[0], rtol=0, atol=0)


@torch.no_grad()
def test_streams_do_not_share_partial_rows():
    attention = flexgen.compile(options={"SPLIT_KV": 8})
    inputs = [drawn(seed) for seed in range(4)]
    expected = [attention(*each) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    outputs: list[list[torch.Tensor]] = [[] for _ in inputs]
    for _ in range(50):
        for stream, each, found in zip(streams, inputs, outputs, strict=True):
            with torch.cuda.stream(stream):
                found.append(attention(*each))
    torch.cuda.synchronize()
    for found, wanted in zip(outputs, expected, strict=True):
        for output in found:
            torch.testing.assert_close(output, wanted, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("group", [1, 3, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("queries", [1, 4, 16])
def test_groups_and_queries(group, queries):
    inputs = random_inputs(
        Shape(2, 2 * group, 2, queries, 700), torch.device("cuda"), dtype=torch.bfloat16, head_dim=64
    )
    output = flexgen.compile()(*inputs)
    torch.testing.assert_close(output.double(), dense_attention(*inputs).out, rtol=0, atol=2e-2)

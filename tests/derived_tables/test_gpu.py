"""Derived tables on a GPU: streams, threads and CUDA graphs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flexgen
from tests.derived_tables.test_forward import documents, packed, tables_built
from tests.forward.run import random_inputs, refusal, square

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LENGTH = 2048


def half_inputs(seed: int = 0):
    return random_inputs(square(LENGTH, heads=2), CUDA, dtype=torch.bfloat16, head_dim=64, seed=seed)


def attention_and_expected():
    mask = documents(packed(LENGTH, CUDA, parts=9))
    inputs = half_inputs()
    return flexgen.compile(None, mask), inputs, flexgen.compile(None, mask)(*inputs)


def test_making_an_implicit_table_waits_for_nothing() -> None:
    attention, inputs, expected = attention_and_expected()
    attention(*half_inputs(1))  # compiles
    documents_now = attention.mask_mod.__closure__[0].cell_contents
    documents_now.add_(1)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = attention(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert tables_built(attention) == 2
    torch.testing.assert_close(out, expected)


def test_a_table_made_on_one_stream_serves_another() -> None:
    attention, inputs, expected = attention_and_expected()
    stream = torch.cuda.Stream()
    torch.cuda._sleep(50_000_000)  # so that the table is still to be made when the other stream wants it
    attention(*inputs)
    with torch.cuda.stream(stream):
        out = attention(*inputs)
    stream.synchronize()
    torch.testing.assert_close(out, expected)


def test_threads_share_one_table() -> None:
    attention, inputs, expected = attention_and_expected()

    def call(_: int) -> torch.Tensor:
        with torch.cuda.stream(torch.cuda.Stream()):
            out = attention(*inputs)
            torch.cuda.current_stream().synchronize()
        return out

    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(call, range(16)):
            torch.testing.assert_close(out, expected)
    assert tables_built(attention) == 1


def test_a_graph_is_captured_with_a_table_made_before() -> None:
    attention, inputs, expected = attention_and_expected()
    table = attention.block_table(inputs.query, inputs.key)
    attention(*inputs, block_table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs, block_table=table)
    graph.replay()
    torch.testing.assert_close(out, expected)


def test_a_captured_implicit_table_outlives_its_cache() -> None:
    attention, inputs, expected = attention_and_expected()
    attention(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*inputs)
    document_id = attention.mask_mod.__closure__[0].cell_contents
    for _ in range(6):
        document_id.mul_(3)
        attention(*inputs)
        torch.randint(0, 1 << 30, (1 << 20,), device=CUDA)
    graph.replay()
    torch.testing.assert_close(out, expected)


def test_no_table_is_made_while_a_graph_is_captured() -> None:
    attention, inputs, _ = attention_and_expected()
    attention(*half_inputs())
    attention.mask_mod.__closure__[0].cell_contents.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        refusal(lambda: attention(*inputs), flexgen.UnsupportedProblemError, "graph", "block_table(query, key)")
        refusal(lambda: attention.block_table(*inputs), flexgen.UnsupportedProblemError, "graph")
        torch.zeros(1, device=CUDA)


def test_a_table_of_half_a_million_tokens_is_small() -> None:
    length = 524288
    mask = documents(packed(length, CUDA, parts=16))
    attention = flexgen.compile(None, mask, {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2})
    query, key = (torch.empty(1, 1, length, 64, device=CUDA, dtype=torch.bfloat16) for _ in range(2))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    table = attention.block_table(query, key)
    assert int(table.needed) == 16 * 256 * 256
    assert torch.cuda.max_memory_allocated() - before < 64 << 20

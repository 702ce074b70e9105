"""What only a CUDA device has: graphs over packed sequences whose lengths change, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.varlen.run import Packed, check_packed, in_a_loop, offsets_of, pack

pytestmark = pytest.mark.gpu

LENGTHS = (700, 1, 0, 350, 128, 129)
OTHERS = (0, 0, 1000, 300, 4, 4)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 100)


def inputs(lengths: tuple[int, ...] = LENGTHS, **options) -> Packed:
    given = {"heads": (4, 2), "head_dim": 64, "dtype": torch.bfloat16, "unused": 20} | options
    return pack(lengths, device="cuda", **given)


def step(attention: flexgen.Attention, packed: Packed) -> list[torch.Tensor]:
    out = attention(*packed.tensors, **packed.offsets)
    return [out, *torch.autograd.grad((out.float() * out.float().sin()).sum(), packed.tensors)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mask", [None, causal, window])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_long_sequences_with_the_default_tiles(mask, head_dim):
    default = dict.fromkeys(("BLOCK_M", "BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2"))
    check_packed(inputs(head_dim=head_dim), mask=mask, options=default)


def test_the_copy_engine():
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("the bulk copy engine is on sm_90 and later")
    default = dict.fromkeys(("BLOCK_M", "BLOCK_N"))
    check_packed(inputs(grad=False), mask=causal, options={**default, "fwd_USE_TMA": True})


def test_cuda_graph_follows_the_offsets():
    attention, packed = flexgen.compile(None, causal), inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(attention, packed)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(attention, packed)
    for lengths in (OTHERS, LENGTHS, (1, 1, 1, 1, 1, 1)):
        packed.cu_seqlens_q.copy_(offsets_of(lengths))
        graph.replay()
        torch.cuda.synchronize()
        assert_same(found, step(attention, packed))
        torch.testing.assert_close(found[0].double(), in_a_loop(packed, None, causal).out, rtol=2e-2, atol=2e-2)


def test_nothing_waits_for_the_device():
    attention, packed = flexgen.compile(None, causal), inputs()
    offsets = [offsets_of(lengths, "cuda") for lengths in (OTHERS, LENGTHS)]
    step(attention, packed)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for other in offsets:
            step(attention, Packed(*packed.tensors, other))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nested_tensors():
    values = torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16)
    leaf = torch.nested.nested_tensor_from_jagged(values, offsets_of(LENGTHS, "cuda")).requires_grad_()
    attention, query = flexgen.compile(None, causal), leaf.transpose(1, 2)
    attention(query, query, query).values().float().sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(query, query, query).values().float().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed = values.transpose(0, 1)[None].requires_grad_()
    attention(packed, packed, packed, cu_seqlens_q=offsets_of(LENGTHS, "cuda")).float().sum().backward()
    torch.testing.assert_close(leaf.grad.values().transpose(0, 1)[None], packed.grad, rtol=2e-2, atol=2e-2)

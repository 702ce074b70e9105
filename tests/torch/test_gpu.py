"""What only a CUDA device has: graphs, streams, threads on streams, and several devices."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo

import flexgen
from tests.torch.models import BiasedAttention, causal, draw, softcap

pytestmark = pytest.mark.gpu


def _inputs(device: str = "cuda", length: int = 256) -> list[torch.Tensor]:
    drawn = draw(length, head_dim=64)
    return [tensor.detach().to(device, torch.bfloat16).requires_grad_() for tensor in drawn]


def _step(attention, inputs, also=()):
    out = attention(*inputs)
    return [out, *torch.autograd.grad((out.float() * out.float().sin()).sum(), [*inputs, *also])]


def _assert_near(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def _warm_up(step) -> None:
    """Run a step on a side stream, as torch asks before a capture: it compiles, and derives tables."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def _no_waiting():
    """Make torch raise where the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _captured(step, pool=None):
    """Return a graph of one step and the tensors that the step returned."""
    _warm_up(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool), _no_waiting():
        found = step()
    return graph, found


def _allocated_outside_of(pool) -> int:
    """Return the bytes in use of torch's CUDA memory that do not belong to a graph's pool."""
    segments = torch.cuda.memory_snapshot()
    return sum(one["allocated_size"] for one in segments if tuple(one["segment_pool_id"]) != tuple(pool))


def _redraw(tensors) -> None:
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_(torch.randn_like(tensor))


def _documents(length: int):
    document = (torch.arange(length, device="cuda") // 60).to(torch.int32)

    def document_causal(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    return document_causal


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_cuda_graph_holds_forward_and_backward(mask):
    attention = flexgen.compile(softcap, causal if mask == "causal" else _documents(256))
    inputs = _inputs()
    graph, found = _captured(lambda: _step(attention, inputs))
    _redraw(inputs)
    graph.replay()
    torch.cuda.synchronize()
    _assert_near(found, _step(attention, inputs))


def test_cuda_graph_with_captured_parameter():
    module, inputs = BiasedAttention().cuda(), _inputs(length=32)
    graph, found = _captured(lambda: _step(module, inputs, [module.bias]))
    _redraw([module.bias, *inputs])
    graph.replay()
    torch.cuda.synchronize()
    _assert_near(found, _step(module, inputs, [module.bias]))


def test_cuda_graph_allocates_in_its_own_pool_alone():
    module, inputs = BiasedAttention().cuda(), _inputs(length=32)
    pool = torch.cuda.graph_pool_handle()

    def step():
        return _step(module, inputs, [module.bias])

    _warm_up(step)
    other, _ = _captured(
        lambda: torch.zeros(1, device="cuda")
    )  # torch's own state of random numbers, once for all graphs
    torch.cuda.synchronize()
    outside = _allocated_outside_of(pool)
    graph, found = _captured(step, pool)
    torch.cuda.synchronize()
    assert _allocated_outside_of(pool) == outside
    assert _allocated_outside_of((0, 0)) >= sum(tensor.nbytes for tensor in found)
    in_use = torch.cuda.memory_allocated()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= in_use  # what torch had still to free may be gone
    del other


@pytest.mark.parametrize("mask", ["causal", "documents"])
def test_a_step_that_has_been_compiled_waits_for_nothing(mask):
    attention = flexgen.compile(softcap, causal if mask == "causal" else _documents(256))
    inputs = _inputs()
    expected = _step(attention, inputs)
    with _no_waiting():
        found = _step(attention, inputs)
    _assert_near(found, expected)


def test_another_stream_is_honoured():
    attention, inputs = flexgen.compile(softcap, causal), _inputs(length=2048)
    expected = _step(attention, inputs)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = [(tensor * 2).detach().requires_grad_() for tensor in inputs]
        found = _step(attention, [(tensor / 2).detach().requires_grad_() for tensor in late])
    stream.synchronize()
    _assert_near(found, expected)


def test_eight_threads_on_streams_of_their_own():
    module, start = BiasedAttention().cuda(), threading.Barrier(8)
    shapes = [[tensor[:, :, : 24 + 2 * (at % 4)].detach() for tensor in _inputs(length=32)] for at in range(8)]
    inputs = [[tensor.requires_grad_() for tensor in tensors] for tensors in shapes]
    torch.cuda.synchronize()

    def work(at: int) -> list[torch.Tensor]:
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            found = _step(module, inputs[at], [module.bias])
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(work, range(8)))
    for found, tensors in zip(results, inputs, strict=True):
        _assert_near(found, _step(module, tensors, [module.bias]))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices_in_one_process():
    attention = flexgen.compile(softcap, causal)
    first, second = _step(attention, _inputs("cuda:0")), _step(attention, _inputs("cuda:1"))
    assert second[0].device == torch.device("cuda:1")
    _assert_near([tensor.cpu() for tensor in second], [tensor.cpu() for tensor in first])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_captured_tensor_on_another_device_is_refused():
    module = BiasedAttention().to("cuda:0")
    with pytest.raises(flexgen.UnsupportedProblemError, match="cuda:0"):
        module(*[tensor[:, :, :32] for tensor in _inputs("cuda:1")])


def test_loss_on_max_scores_is_refused_by_a_compiled_call():
    """Only the first check waits for the device; a later one would be an assertion there, which ends the process."""
    torch._dynamo.reset()
    attention, request, inputs = flexgen.compile(softcap, causal), flexgen.AuxRequest(max_scores=True), _inputs()

    def attend(*tensors):
        return attention(*tensors, return_aux=request)

    traced = torch.compile(attend, fullgraph=True, backend="aot_eager")
    output, aux = traced(*inputs)
    with pytest.raises(flexgen.UnsupportedProblemError, match="loss depends on max_scores"):
        (output.float().sum() + aux.max_scores.sum()).backward()
    traced(*inputs)[0].float().sum().backward()
    with _no_waiting():
        traced(*inputs)[0].float().sum().backward()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_with_inductor(mode):
    torch._dynamo.reset()
    module, inputs = BiasedAttention().cuda(), _inputs(length=64)
    inputs = [tensor[:, :, :32].detach().requires_grad_() for tensor in inputs]
    traced = torch.compile(module, fullgraph=True, mode=mode)
    expected = [tensor.clone() for tensor in _step(module, inputs, [module.bias])]
    for _ in range(4):
        _assert_near([tensor.clone() for tensor in _step(traced, inputs, [module.bias])], expected)

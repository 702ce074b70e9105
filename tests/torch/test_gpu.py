"""What only a CUDA device has: graphs, streams, and several devices."""

from __future__ import annotations

import pytest
import torch

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


def test_cuda_graph_holds_forward_and_backward():
    attention, inputs = flexgen.compile(softcap, causal), _inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            _step(attention, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(attention, inputs)
    with torch.no_grad():
        for tensor in inputs:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    torch.cuda.synchronize()
    _assert_near(found, _step(attention, inputs))


def test_cuda_graph_with_captured_parameter():
    module, inputs = BiasedAttention().cuda(), _inputs(length=32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _step(module, inputs, [module.bias])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _step(module, inputs, [module.bias])
    with torch.no_grad():
        module.bias.normal_()
    graph.replay()
    torch.cuda.synchronize()
    _assert_near(found, _step(module, inputs, [module.bias]))


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_two_devices_in_one_process():
    attention = flexgen.compile(softcap, causal)
    first, second = _step(attention, _inputs("cuda:0")), _step(attention, _inputs("cuda:1"))
    assert second[0].device == torch.device("cuda:1")
    _assert_near([tensor.cpu() for tensor in second], [tensor.cpu() for tensor in first])


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_with_inductor(mode):
    torch._dynamo.reset()
    module, inputs = BiasedAttention().cuda(), _inputs(length=64)
    inputs = [tensor[:, :, :32].detach().requires_grad_() for tensor in inputs]
    traced = torch.compile(module, fullgraph=True, mode=mode)
    expected = [tensor.clone() for tensor in _step(module, inputs, [module.bias])]
    for _ in range(4):
        _assert_near([tensor.clone() for tensor in _step(traced, inputs, [module.bias])], expected)

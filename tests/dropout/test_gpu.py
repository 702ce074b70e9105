"""Dropout where only a CUDA device is: graphs that draw anew at each replay, and compiled programs."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.dropout.dense import dense_with_dropout, seeded
from tests.dropout.philox import keep_mask
from tests.torch.models import causal, draw, softcap

pytestmark = pytest.mark.gpu
P = 0.25


def _inputs(length: int = 256) -> list[torch.Tensor]:
    return [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in draw(length, head_dim=64)]


def _capture(step):
    """Return a graph of a step, and what it writes at each replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return graph, found


def _unit_values(length: int) -> list[torch.Tensor]:
    """Return query, key and value of equal scores, whose output says which pairs are kept."""
    eye = torch.eye(length, device="cuda", dtype=torch.bfloat16).expand(1, 2, length, length)
    return [torch.zeros_like(eye).requires_grad_(), eye, eye.clone().requires_grad_()]


def test_replays_of_a_graph_drop_other_pairs_and_follow_the_seed():
    attention, inputs = flexgen.compile(), _unit_values(128)
    graph, output = _capture(lambda: attention(*inputs, dropout_p=P))

    def replay() -> torch.Tensor:
        graph.replay()
        torch.cuda.synchronize()
        return output > 0

    torch.manual_seed(1)
    first, second = replay(), replay()
    torch.manual_seed(1)
    assert torch.equal(replay(), first) and not torch.equal(first, second)
    assert abs(first.double().mean().item() - (1 - P)) < 0.02


def test_forward_and_backward_of_a_graph_drop_the_same_pairs():
    """The gradient of value says which pairs its kernel kept: at each replay those of the forward."""
    attention, (query, key, value) = flexgen.compile(), _unit_values(128)

    def step():
        output = attention(query, key, value, dropout_p=P)
        return output, *torch.autograd.grad(output, [query, value], key)

    graph, (output, grad_query, grad_value) = _capture(step)
    patterns = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        patterns.append(output > 0)
        assert torch.equal(grad_value.mT > 0, patterns[-1])
        assert grad_query.isfinite().all()
    assert not torch.equal(patterns[0], patterns[1]) and not torch.equal(patterns[1], patterns[2])


def test_generator_in_a_graph():
    attention, inputs, generator = flexgen.compile(), _unit_values(128), torch.Generator("cuda").manual_seed(5)
    attention(*inputs, dropout_p=P, generator=generator)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        output = attention(*inputs, dropout_p=P, generator=generator)
    patterns = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        patterns.append(output > 0)
    assert not torch.equal(*patterns)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_tiles_of_half_precision(head_dim: int):
    generator, seed = seeded(torch.device("cuda"), 9)
    tensors = [
        tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in draw(384, head_dim=head_dim, heads=4)
    ]
    out = flexgen.compile(softcap, causal)(*tensors, dropout_p=P, generator=generator)
    expected, _ = dense_with_dropout(*tensors, P, seed, softcap, causal)
    loss = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view_as(out)
    grads = [torch.autograd.grad((one.double() * loss).sum(), tensors) for one in (out, expected)]
    for one, other in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=3e-2, atol=3e-2)


def test_long_sequences_have_the_pattern_of_the_reference():
    generator, seed = seeded(torch.device("cuda"), 6)
    length, keys = 4096, 256
    eye = torch.eye(keys, device="cuda", dtype=torch.bfloat16).expand(2, 4, keys, keys)
    query = torch.zeros(2, 4, length, keys, device="cuda", dtype=torch.bfloat16)
    out = flexgen.compile()(query, eye, eye, dropout_p=P, generator=generator)
    assert torch.equal((out > 0).cpu(), keep_mask(seed.cpu(), P, (2, 4, length, keys)))


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_torch_compile_with_inductor(mode: str):
    torch._dynamo.reset()
    attention, inputs = flexgen.compile(softcap, causal), _inputs()
    traced = torch.compile(lambda *tensors: attention(*tensors, dropout_p=P), fullgraph=True, mode=mode)

    def step(seed: int):
        torch.manual_seed(seed)
        out = traced(*inputs)
        grads = torch.autograd.grad(out.float().sum(), inputs)
        return [out.detach().clone(), *(grad.clone() for grad in grads)]

    for _ in range(3):
        step(0)
    first, again, other = step(1), step(1), step(2)
    assert all(torch.equal(one, two) for one, two in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])

"""What torch.compile must not compile again: other lengths, other batches, fresh closures, changing integers.

The first sizes all differ: torch takes equal ones for the same symbol.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import flexgen
from flexgen.torch_library import recorded
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counter:
    """A backend that counts the forward and the backward graphs it is given."""

    def __init__(self) -> None:
        self.forward = self.backward = 0
        self.backend = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward)

    def _forward(self, graph, inputs):
        self.forward += 1
        return make_boxed_func(graph)

    def _backward(self, graph, inputs):
        self.backward += 1
        return make_boxed_func(graph)


def batch_of(batch: int, length: int) -> list[torch.Tensor]:
    drawn = [torch.cat([tensor * (i + 1) for i in range(batch)]) for tensor in draw(length)]
    return [tensor.detach().requires_grad_() for tensor in drawn]


@pytest.mark.parametrize(
    ("dynamic", "most"),
    [pytest.param(True, 1, id="dynamic"), pytest.param(None, 2, id="automatic", marks=pytest.mark.slow)],
)
def test_lengths_and_batches_share_a_forward_and_a_backward(dynamic, most):
    module, counter = BiasedAttention(), Counter()
    traced = torch.compile(module, fullgraph=True, dynamic=dynamic, backend=counter.backend)
    for batch, length in ((3, 18), (2, 20), (4, 23), (5, 9)):
        inputs = batch_of(batch, length)
        expected = run_with_gradients(module, inputs, [module.bias])
        assert_same(run_with_gradients(traced, inputs, [module.bias]), expected)
    assert (counter.forward, counter.backward) == (most, most)


def test_a_captured_tensor_of_each_length_is_no_new_graph():
    documents = torch.zeros(2, dtype=torch.int64)

    def mask(b, h, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    attention, counter = flexgen.compile(None, mask), Counter()
    traced = torch.compile(lambda *tensors: attention(*tensors), fullgraph=True, dynamic=True, backend=counter.backend)
    for length in (18, 21, 34):
        documents, inputs = torch.arange(length) // 5, draw(length)
        assert_same(run_with_gradients(traced, inputs), run_with_gradients(attention, inputs))
    assert (counter.forward, counter.backward) == (1, 1)


def _drop_in(query, key, value, score_mod, block_mask=None):
    return flexgen.flex_attention(query, key, value, score_mod, block_mask)


def _biased(bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[h]


def _around(inner):
    return lambda score, b, h, q_idx, kv_idx: inner(score, b, h, q_idx, kv_idx) * 2


def _stepped(step, bias):
    return lambda score, b, h, q_idx, kv_idx: score + bias[h] + step * kv_idx


def _with_bias(bias, score, b, h, q_idx, kv_idx):
    return score + bias[h]


FRESH = {
    "closure": lambda bias, number: _biased(bias),
    "closure over a closure": lambda bias, number: _around(_biased(bias)),
    "partial": lambda bias, number: functools.partial(_with_bias, bias),
    "closure over an integer": lambda bias, number: _stepped(number, bias),
}


@pytest.mark.parametrize("name", list(FRESH))
def test_fresh_mods_of_the_same_code_share_a_graph(name):
    """The first two values of an integer compile: torch.compile and flexgen both take the first for a constant."""
    if "integer" in name and not recorded._SHOWS_CELLS:
        pytest.skip("before torch 2.13, torch.compile does not show flexgen what a closure holds: each number compiles")
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(_drop_in, fullgraph=True, backend=counter)
    for number in range(2, 5):
        bias, inputs = torch.randn(2, requires_grad=True), draw()
        mod = FRESH[name](bias, number)
        expected = run_with_gradients(lambda *t, mod=mod: _drop_in(*t, mod), inputs, [bias])
        assert_same(run_with_gradients(lambda *t, mod=mod: traced(*t, mod), inputs, [bias]), expected)
    assert counter.frame_count == (2 if "integer" in name else 1)


def test_fresh_block_masks_share_a_graph():
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(_drop_in, fullgraph=True, backend=counter)
    for size in (4, 5, 8):
        documents, inputs = torch.arange(32) // size, draw(32)

        def mask(b, h, q_idx, kv_idx, documents=documents):
            return causal(b, h, q_idx, kv_idx) & (documents[q_idx] == documents[kv_idx])

        blocks = create_block_mask(mask, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)
        assert_same([traced(*inputs, None, blocks)], [_drop_in(*inputs, None, blocks)])
    assert counter.frame_count == 1


def test_other_code_and_other_tensors_are_seen():
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(_drop_in, fullgraph=True, backend=counter)
    bias, inputs = torch.randn(2), draw()
    for mod in (_biased(bias), _around(_biased(bias)), _biased(bias.double()), _stepped(2, bias)):
        assert_same([traced(*inputs, mod)], [_drop_in(*inputs, mod)])

"""torch.compile: one graph, captured values as its inputs, and no recompilation that torch itself would not do."""

from __future__ import annotations

import functools

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask

import flexgen
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients, softcap


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend: str = "aot_eager", **options: object):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_module_is_one_graph_with_all_gradients(backend):
    module, inputs = BiasedAttention(), draw()
    traced, counter = compiled(module, backend)
    expected = run_with_gradients(module, inputs, [module.bias])
    assert_same(run_with_gradients(traced, inputs, [module.bias]), expected)
    assert counter.frame_count == 1
    calls = [node for node in counter.graphs[0].graph.nodes if "flexgen" in str(node.target)]
    assert len(calls) == 1


def test_parameter_is_an_input_so_that_its_updates_are_seen():
    module, inputs = BiasedAttention(), draw()
    traced, counter = compiled(module)
    traced(*inputs)
    with torch.no_grad():
        module.bias.mul_(2)
    assert_same(run_with_gradients(traced, inputs, [module.bias]), run_with_gradients(module, inputs, [module.bias]))
    module.bias = torch.nn.Parameter(torch.randn(2, 64))
    assert_same(run_with_gradients(traced, inputs, [module.bias]), run_with_gradients(module, inputs, [module.bias]))
    assert counter.frame_count == 1


def test_reassigned_closure_variable_is_seen():
    slopes, shift = torch.randn(2), 9

    def score(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (q_idx - kv_idx + shift)

    attention, inputs = flexgen.compile(score), draw()
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    assert_same([traced(*inputs)], [attention(*inputs)])
    slopes, shift = torch.randn(2), 11
    assert_same([traced(*inputs)], [attention(*inputs)])


def test_changing_integer_becomes_an_argument():
    slope = 12

    def score(score, b, h, q_idx, kv_idx):
        return score + slope * (q_idx - kv_idx)

    attention, inputs = flexgen.compile(score, causal), draw()
    traced, counter = compiled(lambda attention, *tensors: attention(*tensors))
    for step in range(3):
        slope = 12 + step
        assert_same([traced(attention, *inputs)], [attention(*inputs)])
    before = counter.frame_count
    for step in range(3, 6):
        slope = 12 + step
        assert_same([traced(attention, *inputs)], [attention(*inputs)])
    assert counter.frame_count == before


def test_number_of_a_module_is_a_guard():
    module, inputs = BiasedAttention(), draw()
    traced, _ = compiled(module)
    for window in (7, 3, 5):
        module.window = window
        assert_same([traced(*inputs)], [module(*inputs)])


def test_another_function_in_its_place_is_seen():
    module, inputs = BiasedAttention(), draw()
    traced, _ = compiled(module)
    traced(*inputs)
    module.attention = flexgen.compile(softcap, causal)
    assert_same([traced(*inputs)], [module(*inputs)])


def test_lengths_are_symbols():
    attention = flexgen.compile(softcap, causal)
    request = flexgen.AuxRequest(lse=True, max_scores=True)
    traced, counter = compiled(lambda *tensors: attention(*tensors, return_aux=request), dynamic=True)
    for length in (18, 17, 40, 33):
        inputs = draw(length, head_dim=32)
        (out, aux), (expected, expected_aux) = traced(*inputs), attention(*inputs, return_aux=request)
        assert_same([out, aux.lse, aux.max_scores], [expected, expected_aux.lse, expected_aux.max_scores])
        out.sum().backward()
    assert counter.frame_count == 1


def test_layers_share_one_graph():
    layers = [BiasedAttention() for _ in range(3)]
    counter = CompileCounterWithBackend("eager")
    forward = torch.compile(lambda layer, *tensors: layer(*tensors), fullgraph=True, backend=counter)
    inputs = draw()
    for layer in layers:
        with torch.no_grad():
            layer.bias.normal_()
        assert_same([forward(layer, *inputs)], [layer(*inputs)])
    assert counter.frame_count == 1


def test_layout_bshd():
    attention = flexgen.compile(None, causal, {"layout": "bshd"})
    inputs = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in draw()]
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    assert_same(run_with_gradients(traced, inputs), run_with_gradients(attention, inputs))


def test_key_of_batch_one():
    attention = flexgen.compile(softcap, causal)
    query, key, value = draw()
    query = torch.cat([query, query * 0.5, query * 2]).detach().requires_grad_()
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    inputs = [query, key, value]
    assert_same(run_with_gradients(traced, inputs), run_with_gradients(attention, inputs))


def test_partial_as_mod():
    attention = flexgen.compile(functools.partial(_scaled, torch.randn(2), shift=3))
    inputs = draw()
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    assert_same([traced(*inputs)], [attention(*inputs)])


def _scaled(slopes, score, b, h, q_idx, kv_idx, shift=1):
    return score + slopes[h] * shift


class DropIn(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.nn.Parameter(torch.randn(2))
        self.blocks = create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)

    def score(self, score, b, h, q_idx, kv_idx):
        return score + self.slopes[h] * q_idx

    def forward(self, query, key, value):
        return flexgen.flex_attention(query, key, value, self.score, self.blocks, kernel_options={"BLOCK_M": 16})


def test_drop_in_with_a_block_mask():
    module, inputs = DropIn(), draw(64)
    traced, counter = compiled(module)
    also = [module.slopes]
    assert_same(run_with_gradients(traced, inputs, also), run_with_gradients(module, inputs, also))
    calls = [node for node in counter.graphs[0].graph.nodes if "flexgen" in str(node.target)]
    assert '"BLOCK_M": 16' in str(calls[0].args)


def test_block_mask_of_an_attention_is_an_input():
    attention, inputs = flexgen.compile(None, causal), draw(64)
    traced, counter = compiled(lambda blocks, *tensors: attention(*tensors, block_table=blocks))
    for size in (16, 32):
        blocks = create_block_mask(causal, 1, 1, 64, 64, device="cpu", BLOCK_SIZE=size)
        expected = attention(*inputs, block_table=blocks)
        assert_same([traced(blocks, *inputs)], [expected])
    assert counter.frame_count <= 2


def test_derived_table_is_refused_by_name():
    attention, inputs = flexgen.compile(None, causal), draw()
    documents = torch.arange(16) // 4
    attention = flexgen.compile(None, lambda b, h, q_idx, kv_idx: documents[q_idx] == documents[kv_idx])
    table = attention.block_table(*inputs)
    assert table is not None
    traced, _ = compiled(lambda *tensors: attention(*tensors, block_table=table))
    with pytest.raises(Exception, match="being traced"):
        traced(*inputs)
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    assert_same([traced(*inputs)], [attention(*inputs)])


def test_making_an_attention_inside_is_stepped_over_or_explained():
    def function(*tensors):
        return flexgen.compile(softcap, causal)(*tensors)

    inputs = draw()
    assert_same([torch.compile(function, backend="eager")(*inputs)], [function(*inputs)])
    torch._dynamo.reset()
    with pytest.raises(Exception, match="move the call out of the compiled region"):
        torch.compile(function, backend="eager", fullgraph=True)(*inputs)


def test_sinks_are_learned_through_a_graph():
    attention, inputs = flexgen.compile(None, causal), draw()
    sinks = torch.randn(2, requires_grad=True)
    traced, _ = compiled(lambda *tensors: attention(*tensors[:3], sinks=tensors[3]))
    together = [*inputs, sinks]
    expected = run_with_gradients(lambda *tensors: attention(*tensors[:3], sinks=tensors[3]), together)
    assert_same(run_with_gradients(traced, together), expected)


class LocalMods(torch.nn.Module):
    """Defines its mods at each call, over a parameter, a tensor computed on the way, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(2, 64))
        self.shift = 32

    def forward(self, query, key, value):
        slope = query.mean()

        def inner(distance):
            return torch.where(distance > 3, slope * 2, slope)

        def score(score, b, h, q_idx, kv_idx):
            distance = q_idx - kv_idx
            return torch.tanh(score / 3) * 3 + self.bias[h, distance + self.shift].exp() + inner(distance)

        return flexgen.flex_attention(query, key, value, score)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_mods_that_the_traced_code_defines(backend):
    module, inputs = LocalMods(), draw()
    traced, counter = compiled(module, backend)
    for _ in range(2):
        expected = run_with_gradients(module, inputs, [module.bias])
        assert_same(run_with_gradients(traced, inputs, [module.bias]), expected)
        with torch.no_grad():
            module.bias.mul_(-1)
    assert counter.frame_count == 1
    module.shift = 30
    assert_same([traced(*inputs)], [module(*inputs)])


@pytest.mark.parametrize("scale", [2, 0.5])
def test_local_mod_over_a_changing_number_and_no_tensor(scale):
    def function(query, key, value, scale):
        return flexgen.flex_attention(query, key, value, lambda score, b, h, q_idx, kv_idx: score * scale + (b == 0))

    traced, _ = compiled(function)
    for step in range(3):
        arguments = (*draw(), scale + step)
        assert_same([traced(*arguments)], [function(*arguments)])


# Variables that the traced code reads by name, and the mod too: torch.compile shows such a cell in one way alone.


def _before(attention, query, key, value, bias):
    return attention(query * bias.sum(), key, value)


def _after(attention, query, key, value, bias):
    return attention(query, key, value) + bias.sum()


def _around(attention, query, key, value, bias):
    return attention(attention(query * bias.sum(), key, value) + bias[0], key, value)


@pytest.mark.parametrize("options", [{}, {"layout": "bshd"}])
@pytest.mark.parametrize("use", [_before, _after, _around])
def test_variable_is_read_by_the_mod_and_by_the_traced_code(use, options):
    bias = torch.randn(2, requires_grad=True)
    attention = flexgen.compile(lambda score, b, h, q, k: score + bias[h] * (q - k), causal, options)

    def step(*tensors):
        return use(attention, *tensors, bias)

    inputs = [t.detach().transpose(1, 2).requires_grad_() if options else t for t in draw()]
    traced, counter = compiled(step, dynamic=True)
    for _ in range(2):
        assert_same(run_with_gradients(traced, inputs, [bias]), run_with_gradients(step, inputs, [bias]))
        with torch.no_grad():
            bias.mul_(2)
        bias = torch.randn(2, requires_grad=True)
    assert counter.frame_count == 1


def test_variable_is_read_by_a_function_that_is_called_after_the_attention():
    bias = torch.randn(2, requires_grad=True)
    attention = flexgen.compile(lambda score, b, h, q, k: score + bias[h] * (q - k))

    def regularized(out):
        return out + bias.square().sum()

    def step(query, key, value):
        return regularized(attention(regularized(attention(query, key, value)), key, value))

    inputs = draw()
    traced, _ = compiled(step)
    assert_same(run_with_gradients(traced, inputs, [bias]), run_with_gradients(step, inputs, [bias]))


@pytest.mark.parametrize("at_first", [True, False])
def test_variable_is_read_by_the_drop_ins_mod_and_by_the_traced_code(at_first):
    bias = torch.randn(2, requires_grad=True)

    def score(score, b, h, q_idx, kv_idx):
        return score + bias[h] * (q_idx - kv_idx)

    def step(query, key, value):
        query = query * bias.sum() if at_first else query
        return flexgen.flex_attention(query, key, value, score_mod=score) + bias[1]

    inputs = draw()
    traced, _ = compiled(step)
    assert_same(run_with_gradients(traced, inputs, [bias]), run_with_gradients(step, inputs, [bias]))


def test_number_and_list_that_the_traced_code_changes():
    window, slopes = 5, [torch.zeros(2)]
    attention = flexgen.compile(
        lambda score, b, h, q, k: score + slopes[0][h] * (q - k), lambda b, h, q, k: (q - k).abs() < window
    )

    def step(query, key, value, slope):
        slopes[0] = slope.exp()
        return attention(query, key, value) * window

    inputs = [*draw(), torch.randn(2, requires_grad=True)]
    traced, _ = compiled(step)
    for window in (5, 3, 2):  # noqa: B007 (the mod and the step read it)
        assert_same(run_with_gradients(traced, inputs), run_with_gradients(step, inputs))


class Settings:
    """Gives what its dictionary holds as attributes."""

    def __init__(self, **held: object) -> None:
        self.__dict__["held"] = held

    def __getattr__(self, name: str) -> object:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


def test_what_an_object_computes_is_a_guard():
    settings, activation = Settings(slope=2), torch.nn.Sequential(torch.nn.Tanh())
    attention, inputs = flexgen.compile(lambda score, b, h, q, k: activation(score * settings.slope)), draw()
    traced, _ = compiled(lambda *tensors: attention(*tensors))
    assert_same([traced(*inputs)], [attention(*inputs)])
    settings.held["slope"] = 3
    assert_same([traced(*inputs)], [attention(*inputs)])
    activation[0] = torch.nn.Sigmoid()
    found = traced(*inputs)
    assert_same([found], [attention(*inputs)])
    eager = flexgen.compile(lambda score, b, h, q, k: torch.sigmoid(score * 3))
    assert_same([found], [eager(*inputs)])

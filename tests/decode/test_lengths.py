"""kv_lengths: how many keys each batch row has, in decode and in general kernels."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, assert_output, assert_statistics, random_inputs, refusal
from tests.reference import dense_attention, eager_attention

SHAPES = {"decode": Shape(3, 4, 2, 1, 100), "prefill": Shape(3, 4, 2, 40, 100)}


def causal(b, h, q_idx, kv_idx):
    return q_idx + 60 >= kv_idx


def sinks_and_window(b, h, q_idx, kv_idx):
    return causal(b, h, q_idx, kv_idx) & ((q_idx + 60 - kv_idx < 30) | (kv_idx < 4))


def every_third(b, h, q_idx, kv_idx):
    return (kv_idx + q_idx) % 3 == 0


def up_to(lengths, mask):
    def mask_mod(b, h, q_idx, kv_idx):
        exists = kv_idx < lengths[b]
        return exists if mask is None else exists & mask(b, h, q_idx, kv_idx)

    return mask_mod


def check(inputs, lengths, mask, options=None) -> None:
    output, aux = flexgen.compile(None, mask, options)(*inputs, kv_lengths=lengths, return_aux=EVERYTHING)
    live = up_to(lengths, mask)
    dense = dense_attention(*inputs, None, live)
    assert_output(inputs, output, dense, eager_attention(*inputs, None, live))
    assert_statistics(inputs, aux, dense)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("mask", [None, causal, sinks_and_window, every_third])
@pytest.mark.parametrize("options", [{}, {"BLOCK_N": 16}])
def test_keys_past_the_length_do_not_exist(kind, mask, options, device):
    lengths = torch.tensor([100, 0, 37], dtype=torch.int32, device=device)
    check(random_inputs(SHAPES[kind], device), lengths, mask, options)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_lies_past_the_length_is_not_read_as_a_number(kind, device):
    """A cache holds whatever was there before: NaN times a weight of 0 would be NaN."""
    inputs = random_inputs(SHAPES[kind], device)
    lengths = torch.tensor([64, 1, 37], device=device)
    dirty = [tensor.clone() for tensor in inputs]
    for row, length in enumerate(lengths.tolist()):
        dirty[1][row, :, length:] = float("nan")
        dirty[2][row, :, length:] = float("nan")
    attention = flexgen.compile(None, causal)
    torch.testing.assert_close(attention(*dirty, kv_lengths=lengths), attention(*inputs, kv_lengths=lengths))


def test_lengths_of_int64_and_of_any_stride(device):
    lengths = torch.tensor([[5, 9], [70, 9], [100, 9]], device=device)[:, 0]
    check(random_inputs(SHAPES["decode"], device), lengths, causal)


def test_lengths_outside_of_the_cache_are_clamped(device):
    inputs = random_inputs(SHAPES["decode"], device)
    attention = flexgen.compile(None, None, {"SPLIT_KV": 2})
    wild = attention(*inputs, kv_lengths=torch.tensor([2**40, -(2**40), 100], device=device))
    torch.testing.assert_close(wild, attention(*inputs, kv_lengths=torch.tensor([100, 0, 100], device=device)))


def test_a_block_mask_ends_at_the_length(device):
    inputs = random_inputs(Shape(1, 2, 2, 100, 100), device)
    lengths = torch.tensor([45], device=device)
    block_mask = flexgen.create_block_mask(every_third, 1, 1, 100, 100, device=device, BLOCK_SIZE=32)
    output = flexgen.compile(None, every_third)(*inputs, block_table=block_mask, kv_lengths=lengths)
    expected = dense_attention(*inputs, None, up_to(lengths, every_third)).out
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_a_derived_table_ends_at_the_length(device):
    document = torch.arange(1024, device=device) // 100 % 7

    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    inputs = random_inputs(Shape(2, 1, 1, 1024, 1024), device)
    lengths = torch.tensor([1000, 301], device=device)
    output = flexgen.compile(None, same_document)(*inputs, kv_lengths=lengths)
    expected = dense_attention(*inputs, None, up_to(lengths, same_document)).out
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


# Refusals.


def test_lengths_are_checked():
    inputs = random_inputs(SHAPES["decode"], torch.device("cpu"))
    attention = flexgen.compile()

    def call(lengths, **more):
        return lambda: attention(*inputs, kv_lengths=lengths, **more)

    refusal(call([1, 2, 3]), flexgen.ProblemTypeError, "kv_lengths is list", "int32")
    refusal(call(torch.ones(3)), flexgen.ProblemTypeError, "torch.float32")
    refusal(call(torch.ones(2, dtype=torch.int32)), flexgen.UnsupportedProblemError, "(2,)", "(3,)")
    wrong = torch.tensor([1, 101, 3])
    refusal(call(wrong, validate=True), flexgen.UnsupportedProblemError, "kv_lengths[1] is 101", "0 to 100")
    call(torch.tensor([0, 100, 3]), validate=True)()


def test_gradients_of_a_call_with_lengths_are_refused():
    query, key, value = random_inputs(SHAPES["decode"], torch.device("cpu"))
    attention = flexgen.compile()
    lengths = torch.tensor([1, 2, 3])
    call = lambda: attention(query.requires_grad_(), key, value, kv_lengths=lengths)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "kv_lengths", "no_grad")
    with torch.no_grad():
        call()


def test_a_traced_call_with_lengths_is_refused():
    inputs = random_inputs(SHAPES["decode"], torch.device("cpu"))
    attention = flexgen.compile()
    lengths = torch.tensor([1, 2, 3])
    call = torch.vmap(lambda q: attention(q, *list(inputs)[1:], kv_lengths=lengths))
    refusal(lambda: call(inputs.query[None]), flexgen.UnsupportedProblemError, "kv_lengths", "traced")


@pytest.mark.gpu
def test_one_captured_graph_serves_every_length():
    device = torch.device("cuda")
    inputs = random_inputs(Shape(4, 8, 2, 1, 4096), device, dtype=torch.bfloat16, head_dim=64)
    lengths = torch.ones(4, dtype=torch.int32, device=device)
    attention = flexgen.compile(None, lambda b, h, q_idx, kv_idx: kv_idx < 4000)
    with torch.no_grad():
        attention(*inputs, kv_lengths=lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = attention(*inputs, kv_lengths=lengths)
        for step in (1, 5, 64, 1000, 4095, 4096):
            lengths.fill_(step)
            lengths[1] = max(step // 2, 1)
            graph.replay()
            expected = dense_attention(*inputs, None, up_to(lengths, lambda b, h, q_idx, kv_idx: kv_idx < 4000)).out
            torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-2)

"""Calls after the first: nothing of an earlier call may stay in them, and what is unusual takes the usual way."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.runtime import kernel, split_kernel
from tests.addressed import Addressed
from tests.corpus.case import Shape
from tests.decode.test_pages import paged_inputs
from tests.forward.run import Inputs, random_inputs
from tests.reference import dense_attention

CPU = torch.device("cpu")
SHAPE = Shape(2, 4, 2, 1, 60)


@pytest.fixture(autouse=True)
def addressed(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = kernel.executor

    def wrapped(*arguments):
        return Addressed(executor(*arguments))

    monkeypatch.setattr(kernel, "executor", wrapped)
    monkeypatch.setattr(split_kernel, "executor", wrapped)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The calls that take the usual way."""
    taken: list[object] = []
    run = flexgen.Attention.run
    monkeypatch.setattr(flexgen.Attention, "run", lambda *args: taken.append(args) or run(*args))
    return taken


def drawn(seed: int, shape: Shape = SHAPE, **kinds) -> Inputs:
    torch.manual_seed(seed)
    inputs = random_inputs(shape, CPU, **kinds)
    return Inputs(*[torch.randn(tensor.shape).to(tensor.dtype) for tensor in inputs])


def check(attention: flexgen.Attention, inputs, score_mod=None, mask=None, **call) -> None:
    expected = dense_attention(*inputs, score_mod, mask, call.get("scale")).out
    torch.testing.assert_close(attention(*inputs, **call).double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{"SPLIT_KV": 1}, {"SPLIT_KV": 3, "BLOCK_N": 16}, {"BACKEND": "TRITON"}])
def test_only_the_first_call_takes_the_usual_way(options, usual):
    attention = flexgen.compile(options=options)
    for seed in range(4):
        check(attention, drawn(seed))
    assert len(usual) == 1


def test_captured_tensors_and_numbers_are_read_again(usual):
    bias, offset = torch.randn(60), 0

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[kv_idx]

    def causal(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    attention = flexgen.compile(biased, causal)
    for offset in range(3, 9):
        bias = torch.randn(60)
        check(attention, drawn(offset), biased, causal)
    assert len(usual) == 2, "the offset is a constant first, then an argument"


def test_numbers_of_keys_and_scales_are_read_again(usual):
    attention = flexgen.compile(options={"SPLIT_KV": 2, "BLOCK_N": 16})
    for seed in range(4):
        query, key, value = drawn(seed)
        lengths, heads = torch.randint(1, 60, (2,), dtype=torch.int32), torch.rand(2) + 0.5

        def live(b, h, q_idx, kv_idx, lengths=lengths):
            return kv_idx < lengths[b]

        output = attention(query, key, value, kv_lengths=lengths, k_scale=heads, v_scale=0.5 + seed)
        scaled = (query, key * heads[:, None, None], value * (0.5 + seed))
        torch.testing.assert_close(output.double(), dense_attention(*scaled, None, live).out, rtol=0, atol=1e-5)
    assert len(usual) == 1


def test_pages_are_read_again(usual):
    attention = flexgen.compile()
    for lengths in ((200, 3, 77), (1, 199, 0), (80, 80, 80)):
        paged = paged_inputs(16, 1, CPU, lengths=lengths)
        output = attention(paged.flat.query, paged.key, paged.value, kv_lengths=paged.lengths, page_table=paged.table)

        def live(b, h, q_idx, kv_idx, lengths=paged.lengths):
            return kv_idx < lengths[b]

        expected = dense_attention(*paged.flat, None, live).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    assert len(usual) == 1


def test_a_scale_of_keys_that_is_a_number_is_part_of_the_form(usual):
    attention = flexgen.compile()
    query, key, value = drawn(0)
    for number in (2.0, 3.0, 2.0, 3.0):
        output = attention(query, key, value, k_scale=number)
        expected = dense_attention(query, key * number, value).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    assert len(usual) == 2


def test_scales_are_part_of_the_form(usual):
    attention = flexgen.compile()
    for scale in (None, 0.5, None, 0.5, 1, 1.0, 0.25):
        check(attention, drawn(1), scale=scale)
    with pytest.raises(flexgen.ProblemTypeError, match="scale=True is bool"):
        attention(*drawn(1), scale=True)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("v_head_dim", [16, 24])
@pytest.mark.parametrize("queries", [1, 3])
def test_the_output_has_the_form_that_the_first_call_gives(layout, v_head_dim, queries, usual):
    attention = flexgen.compile(options={"layout": layout})
    outputs = []
    for seed in range(3):
        inputs = drawn(seed, Shape(2, 4, 2, queries, 60), v_head_dim=v_head_dim)
        swapped = [tensor.transpose(1, 2) for tensor in inputs]
        outputs.append(attention(*(inputs if layout == "bhsd" else swapped)))
        expected = dense_attention(*inputs).out
        found = outputs[-1] if layout == "bhsd" else outputs[-1].transpose(1, 2)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    assert len({output.stride() for output in outputs}) == len(usual) == 1


def test_heads_inside_of_the_query_stay_inside_of_the_output(usual):
    attention = flexgen.compile()
    for seed in range(3):
        query, key, value = drawn(seed, Shape(2, 4, 2, 3, 60))
        output = attention(query.transpose(1, 2).contiguous().transpose(1, 2), key, value)
        assert output.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(output.double(), dense_attention(query, key, value).out, rtol=0, atol=1e-5)
    assert len(usual) == 1


def test_forms_that_alternate(usual):
    attention = flexgen.compile()
    for seed in range(6):
        check(attention, drawn(seed, Shape(2, 4, 2, 1, 40 + seed % 3)))
    assert len(usual) == 3


@pytest.mark.parametrize("moved", range(3))
def test_addresses_that_are_no_multiples_of_16(moved, usual):
    attention = flexgen.compile()
    for seed in range(3):
        tensors = list(drawn(seed))
        check(attention, tensors)
        memory = torch.empty(tensors[moved].numel() + 1)
        tensors[moved] = memory[1:].view(tensors[moved].shape).copy_(tensors[moved])
        check(attention, tensors)
    assert len(usual) == 4, "the first, and all that are not aligned"


def test_strides_and_dtypes_are_part_of_the_form():
    attention = flexgen.compile()
    query, key, value = drawn(0)
    for _ in range(2):
        check(attention, (query, key, value))
        check(attention, (query, key.transpose(2, 3).contiguous().transpose(2, 3), value))
        check(attention, (query, key[:1], value[:1]))
        half = [tensor.half() for tensor in (query, key, value)]
        torch.testing.assert_close(attention(*half).float(), attention(query, key, value), rtol=0, atol=2e-3)


def test_calls_of_other_kinds_follow_warm_ones():
    attention = flexgen.compile()
    inputs = drawn(0)
    for _ in range(3):
        check(attention, inputs)
    output, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True))
    torch.testing.assert_close(output.double(), dense_attention(*inputs).out, rtol=0, atol=1e-5)
    torch.testing.assert_close(aux.lse.double(), dense_attention(*inputs).lse, rtol=0, atol=1e-5)
    with torch.inference_mode():
        check(attention, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*inputs).dtype == torch.bfloat16
    query = inputs.query.clone().requires_grad_()
    assert attention(query, *list(inputs)[1:]).requires_grad
    assert torch.func.vmap(attention)(*[tensor[None] for tensor in inputs]).shape == (1, *query.shape)
    with pytest.raises(flexgen.UnsupportedProblemError, match="different devices"):
        attention(inputs.query, inputs.key.to("meta"), inputs.value)
    with pytest.raises(flexgen.ProblemTypeError, match="kv_lengths is list"):
        attention(*inputs, kv_lengths=[3, 4])
    with pytest.raises(flexgen.ProblemTypeError, match="dropout_p=False is bool"):
        attention(*inputs, dropout_p=False)
    with pytest.raises(flexgen.ProblemTypeError, match="sparse"):
        attention(inputs.query, inputs.key.to_sparse(), inputs.value)


def test_lists_of_a_derived_table_are_read_again(usual):
    document = torch.arange(1024) // 100 % 7

    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    attention = flexgen.compile(None, same_document)
    for seed in range(3):
        check(attention, drawn(seed, Shape(1, 1, 1, 1024, 1024)), mask=same_document)
    assert len(usual) == 1


def test_torchs_guard_is_not_needed(monkeypatch: pytest.MonkeyPatch, usual):
    monkeypatch.setattr("flexgen.runtime.tensor_guard._torch_guard", lambda tensors: None)
    attention = flexgen.compile()
    for seed in range(4):
        check(attention, drawn(seed, Shape(2, 4, 2, 1, 40 + seed % 2)))
    assert len(usual) == 2


def test_copies_have_launches_of_their_own():
    import copy

    attention = flexgen.compile()
    for _ in range(2):
        check(attention, drawn(0))
    copied = copy.deepcopy(attention)
    assert copied._warm is not attention._warm
    check(copied, drawn(1))

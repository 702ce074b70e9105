"""What decoding brings, beside packed sequences, dropout, DTensors and traces: computed, or refused by name."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.decode.test_pages import Paged, paged_inputs
from tests.dropout.dense import dense_with_dropout, seeded
from tests.forward.run import random_inputs, refusal
from tests.reference import dense_attention
from tests.varlen.run import pack

CPU = torch.device("cpu")
P = 0.3


def causal(b, h, q_idx, kv_idx):
    return q_idx + 60 >= kv_idx


# Dropout draws by positions in the sequence, wherever keys lie.


def dropped(attention: flexgen.Attention, tensors, device, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a call, and the seed of what it dropped."""
    generator, seed = seeded(device, 3)
    return attention(*tensors, dropout_p=P, generator=generator, **call), seed


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("page_size", [16, 64])
def test_dropout_of_pages(queries, page_size, device):
    paged = paged_inputs(page_size, queries, device)
    tensors = (paged.flat.query, paged.key, paged.value)
    sides = {"kv_lengths": paged.lengths, "page_table": paged.table}
    output, seed = dropped(flexgen.compile(None, causal), tensors, device, **sides)

    def live(b, h, q_idx, kv_idx):
        return (kv_idx < paged.lengths[b]) & causal(b, h, q_idx, kv_idx)

    expected, _ = dense_with_dropout(*paged.flat, P, seed, live=live)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 40])
def test_dropout_of_scaled_float8(queries, device):
    query, key, value = random_inputs(Shape(2, 4, 2, queries, 100), device, dtype=torch.bfloat16)
    key, value = key.to(torch.float8_e4m3fn), value.to(torch.float8_e5m2)
    k_scale = torch.tensor([0.5, 2.0], device=device)
    output, seed = dropped(flexgen.compile(), (query, key, value), device, k_scale=k_scale, v_scale=3.0)
    scaled = (key.double() * k_scale[:, None, None], value.double() * 3.0)
    expected, _ = dense_with_dropout(query, *scaled, P, seed)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=6e-2)


def test_dropout_takes_the_general_kernel():
    tensors = random_inputs(Shape(1, 4, 2, 1, 100), CPU)
    plan = flexgen.compile().lower(*tensors, target="sm_90", dropout_p=P).plan
    backend = next(decision for decision in plan.decisions if decision.name == "BACKEND")
    rejected = {str(each.value): each.because for each in backend.rejected}
    assert (backend.value, "dropped" in rejected["TRITON_DECODE"]) == ("TRITON", True)
    splits = flexgen.compile(options={"SPLIT_KV": 2})
    refusal(lambda: splits(*tensors, dropout_p=P), flexgen.OptionError, "SPLIT_KV=2", "dropped")


# Packed sequences.


@pytest.mark.parametrize("scales", ["numbers", "heads"])
def test_packed_sequences_of_scaled_float8(scales, device):
    packed = pack([5, 1, 0, 30], [40, 3, 7, 30], heads=(4, 2), dtype=torch.bfloat16, device=device, grad=False)
    key, value = packed.key.to(torch.float8_e5m2), packed.value.to(torch.float8_e4m3fn)
    heads = torch.tensor([0.5, 2.0], device=device)
    k_scale, v_scale = (0.75, 3.0) if scales == "numbers" else (heads, heads)
    output = flexgen.compile(None, causal)(packed.query, key, value, **packed.offsets, k_scale=k_scale, v_scale=v_scale)
    factor = heads.double()[:, None, None]
    scaled = [key.double() * (0.75 if scales == "numbers" else factor)]
    scaled += [value.double() * (3.0 if scales == "numbers" else factor)]
    for queries, keys in packed.slices():
        expected = dense_attention(packed.query[:, :, queries], *(t[:, :, keys] for t in scaled), None, causal).out
        torch.testing.assert_close(output[:, :, queries].double(), expected, rtol=0, atol=3e-2)


def test_few_packed_queries_take_the_general_kernel():
    packed = pack([1, 1, 2], [40, 3, 7], grad=False)
    refused = flexgen.compile(options={"BACKEND": "TRITON_DECODE"})
    refusal(lambda: refused(*packed.tensors, **packed.offsets), flexgen.OptionError, "TRITON_DECODE", "packed")


@pytest.mark.parametrize("name", ["kv_lengths", "page_table"])
def test_numbers_of_keys_beside_packed_sequences_are_refused(name):
    packed = pack([5, 6], grad=False)
    sides = {"kv_lengths": torch.tensor([11]), "page_table": torch.zeros(1, 1, dtype=torch.int32)}
    call = lambda: flexgen.compile()(*packed.tensors, **packed.offsets, **{name: sides[name]})  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, name, "cu_seqlens_k")


def test_numbers_of_keys_beside_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.randn(3, 2, 16), torch.randn(5, 2, 16)], layout=torch.jagged)
    query = nested.transpose(1, 2)
    call = lambda: flexgen.compile()(query, query, query, kv_lengths=torch.tensor([3, 5]))  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "kv_lengths", "nested tensors")


# Traces. DTensors are refused in tests/torch/test_sharded.py.

SIDES = ("kv_lengths", "page_table", "k_scale", "v_scale")


def sides_of(paged: Paged, name: str) -> dict[str, object]:
    if name == "page_table":
        return {"kv_lengths": paged.lengths, "page_table": paged.table}
    return {name: paged.lengths if name == "kv_lengths" else 2.0}


@pytest.mark.parametrize("name", SIDES)
def test_compiled_calls_are_refused(name):
    paged = paged_inputs(16, 1, CPU)
    keys = (paged.key, paged.value) if name == "page_table" else (paged.flat.key, paged.flat.value)
    attention, sides = flexgen.compile(), sides_of(paged, name)
    traced = torch.compile(lambda query: attention(query, *keys, **sides), backend="eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(Exception, match="passed to a call that is being traced"):
        traced(paged.flat.query)


def float8_inputs() -> list[torch.Tensor]:
    query, key, value = random_inputs(Shape(2, 4, 2, 1, 40), CPU, dtype=torch.bfloat16)
    return [query, key.to(torch.float8_e4m3fn), value.to(torch.float8_e5m2)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_take_float8(backend):
    tensors, attention = float8_inputs(), flexgen.compile()
    traced = torch.compile(lambda *tensors: attention(*tensors), backend=backend, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(traced(*tensors), attention(*tensors), rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_refuse_gradients_of_float8(backend):
    query, key, value = float8_inputs()
    attention = flexgen.compile()
    traced = torch.compile(lambda *tensors: attention(*tensors), backend=backend, fullgraph=True)
    with pytest.raises(Exception, match="gradients are wanted of a call with keys in float8_e4m3fn"):
        traced(query.requires_grad_(), key, value)


# Autotuning.


def test_autotune_is_given_what_the_call_brings(monkeypatch: pytest.MonkeyPatch):
    paged = paged_inputs(16, 1, CPU)
    sides = {"kv_lengths": paged.lengths, "page_table": paged.table, "k_scale": 2.0, "v_scale": torch.ones(2)}
    tensors, subjects = (paged.flat.query, paged.key, paged.value), []
    monkeypatch.setattr("flexgen.attention.refuse_autotune", lambda *tensors: None)
    monkeypatch.setattr("flexgen.attention.autotuned_settings", lambda subject, _: subjects.append(subject) or {})
    tuned = flexgen.compile(options={"autotune": True})
    for _ in range(2):
        torch.testing.assert_close(tuned(*tensors, **sides), flexgen.compile()(*tensors, **sides))
    (subject,) = subjects
    assert subject.given == {**sides, "block_table": None}
    tuned(*tensors, **{**sides, "k_scale": 3.0})
    assert len(subjects) == 2, "a k_scale that is a number is a constant of kernels"

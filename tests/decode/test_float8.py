"""Keys and values in 8 bits beside a half-precision query, and the scales that go with them."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.codegen.render import render
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.interpret import interpret
from flexgen.runtime.load import load_module
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, Inputs, assert_output, assert_statistics, random_inputs, refusal
from tests.reference import dense_attention, eager_attention

SHAPES = {"decode": Shape(2, 6, 2, 1, 100), "prefill": Shape(2, 6, 2, 40, 100)}
STORED = (torch.float8_e4m3fn, torch.float8_e5m2)
CPU = torch.device("cpu")


def softcap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0)


def window(b, h, q_idx, kv_idx):
    return (q_idx + 60 >= kv_idx) & (q_idx + 60 - kv_idx < 40)


def stored_inputs(kind: str, device, key_dtype, value_dtype, dtype=torch.bfloat16) -> Inputs:
    query, key, value = random_inputs(SHAPES[kind], device, dtype=dtype)
    return Inputs(query, key.to(key_dtype), value.to(value_dtype))


def scaled(tensor: torch.Tensor, scale) -> torch.Tensor:
    if isinstance(scale, torch.Tensor):
        return tensor.double() * scale[:, None, None].double()
    return tensor.double() * (1.0 if scale is None else scale)


def check(inputs: Inputs, score_mod, k_scale, v_scale, options=None) -> None:
    attention = flexgen.compile(score_mod, window, options)
    output, aux = attention(*inputs, k_scale=k_scale, v_scale=v_scale, return_aux=EVERYTHING)
    query, key, value = inputs
    exact = (query.double(), scaled(key, k_scale), scaled(value, v_scale))
    dense = dense_attention(*exact, score_mod, window)
    eager = eager_attention(query, *(tensor.float() for tensor in exact[1:]), score_mod, window)
    assert_output(inputs, output, dense, eager)
    assert_statistics(inputs, aux, dense)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("key_dtype", STORED)
@pytest.mark.parametrize("value_dtype", STORED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(kind, key_dtype, value_dtype, dtype, device):
    check(stored_inputs(kind, device, key_dtype, value_dtype, dtype), None, None, None)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("score_mod", [None, softcap])
@pytest.mark.parametrize("scales", ["numbers", "heads", "both", "keys alone"])
def test_scales(kind, score_mod, scales, device):
    heads = torch.tensor([0.5, 2.0], device=device)
    k_scale, v_scale = {
        "numbers": (0.75, 3),
        "heads": (heads, -heads),
        "both": (heads, 0.1),
        "keys alone": (heads, None),
    }[scales]
    check(stored_inputs(kind, device, *STORED), score_mod, k_scale, v_scale, {"BLOCK_N": 16})


def test_the_query_may_be_scaled_instead_of_the_scores(device):
    """PRESCALE_QK rounds the scaled query, which powers of two do not change."""
    k_scale = torch.tensor([0.5, 2.0], device=device)
    check(stored_inputs("decode", device, *STORED), None, k_scale, None, {"PRESCALE_QK": True})


def test_scales_go_with_any_dtype(device):
    heads = torch.tensor([0.5, 2.0], device=device)
    check(random_inputs(SHAPES["decode"], device), None, heads, heads)


def test_a_number_that_changes_emits_nothing_new(device):
    inputs = stored_inputs("decode", device, *STORED)
    attention = flexgen.compile()
    for number in (0.5, 0.25, 0.3, 0.7, 0.9):
        output = attention(*inputs, k_scale=number, v_scale=number)
        expected = dense_attention(inputs.query, scaled(inputs.key, number), scaled(inputs.value, number)).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=2e-2)
    assert len(attention._kernels) <= 3  # two constants, then an argument


def test_strides_and_padded_head_dims(device):
    query, key, value = random_inputs(Shape(1, 4, 2, 1, 50), device, dtype=torch.bfloat16, head_dim=24, v_head_dim=40)
    inputs = Inputs(query, key.to(STORED[0]), value.to(STORED[0]).transpose(2, 3).contiguous().transpose(2, 3))
    check(inputs, None, None, None)


# Chips without an instruction for float8_e4m3fn.

DECODE_BYTES = """import triton
import triton.language as tl


{helper}

@triton.jit
def decode(bits_ptr, value_ptr):
    index = tl.arange(0, 256)
    tl.store(value_ptr + index, from_e4m3(tl.load(bits_ptr + index)))
"""


def test_bits_of_e4m3_become_the_numbers_they_mean():
    bits = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    values = torch.empty(256, dtype=torch.float16)
    helper = "\n".join(line.text for line in render("triton/prelude/from_e4m3.py.jinja"))
    text = DECODE_BYTES.format(helper=helper)
    interpret(load_module(SourceCache(None).keep("e4m3" * 8, text)), "decode", (1, 1, 1), [bits, values])
    torch.testing.assert_close(values.float(), bits.view(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90", "gfx942"])
def test_a_target_without_the_conversion_decodes_bytes(target):
    query, key, value = (tensor.to("meta") for tensor in stored_inputs("decode", CPU, *STORED))
    lowered = flexgen.compile().lower(query, key, value, target=target)
    types = {arg.of: arg.type for arg in lowered.forward.source.args if arg.name.endswith("_ptr")}
    expected = "*u8" if target in ("sm_80", "sm_86") else "*fp8e4nv"
    assert (types["key"], types["value"]) == (expected, "*fp8e5")
    assert ("def from_e4m3(" in lowered.source["forward"]) == (expected == "*u8")
    assert lowered.binary().name == "forward"


# Refusals.


def test_gluon_leaves_them_to_plain_triton():
    query, key, value = (torch.empty(1, 4, 512, 64, device="meta", dtype=torch.bfloat16) for _ in range(3))
    stored = (query, key.to(STORED[0]), value.to(STORED[0]))
    plan = flexgen.compile().lower(*stored, target="sm_90").plan
    backend = next(decision for decision in plan.decisions if decision.name == "BACKEND")
    assert backend.value == "TRITON"
    assert "8 bits" in next(rejected.because for rejected in backend.rejected if rejected.value == "GLUON")


def test_dtypes_that_do_not_go_together_are_refused():
    query, key, value = random_inputs(SHAPES["decode"], CPU)
    stored = (key.to(STORED[0]), value.to(STORED[0]))
    attention = flexgen.compile()
    refusal(lambda: attention(query, *stored), flexgen.ProblemTypeError, "8 bits", "bfloat16")
    refusal(lambda: attention(query.half(), stored[0], value.half()), flexgen.ProblemTypeError, "different dtypes")
    refusal(lambda: attention(query.to(STORED[0]), *stored), flexgen.ProblemTypeError, "not supported")


def test_scales_are_checked():
    inputs = stored_inputs("decode", CPU, *STORED)
    attention = flexgen.compile()

    def call(**scales):
        return lambda: attention(*inputs, **scales)

    refusal(call(k_scale=torch.ones(6)), flexgen.UnsupportedProblemError, "k_scale", "(6,)", "(2,)")
    refusal(call(v_scale=torch.ones(2).half()), flexgen.ProblemTypeError, "v_scale", "float32")
    refusal(call(v_scale="one"), flexgen.ProblemTypeError, "v_scale is str")
    refusal(call(k_scale=float("nan")), flexgen.UnsupportedProblemError, "k_scale=nan")


@pytest.mark.parametrize("scales", [{}, {"k_scale": 2.0}, {"v_scale": torch.ones(2)}])
def test_gradients_are_refused(scales):
    query, key, value = stored_inputs("decode", CPU, *STORED)
    attention = flexgen.compile()
    named = next(iter(scales), "float8_e4m3fn")
    call = lambda: attention(query.requires_grad_(), key, value, **scales)  # noqa: E731
    refusal(call, flexgen.UnsupportedProblemError, "gradients", named)


def test_autocast_leaves_stored_keys_alone():
    inputs = stored_inputs("decode", CPU, *STORED)
    attention = flexgen.compile()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(*inputs)
    torch.testing.assert_close(found, attention(*inputs))

"""What flexgen refuses, with the class of the error and what its text names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flexgen
from flexgen.options import KernelOptions
from tests.corpus.case import Shape
from tests.forward.run import Inputs, check_forward, random_inputs, refusal, square

CPU = torch.device("cpu")


def causal(b, h, q, k):
    return q >= k


def call_with(options, inputs=None):
    return flexgen.compile(mask_mod=causal, options=options)(*(inputs or random_inputs(square(32), CPU)))


# Options.


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("BLOCK_MM", "BLOCK_M"),
        ("block_m", "BLOCK_M"),
        ("num_warp", "num_warps"),
        ("USE_SUBTILE", "USE_SUBTILING"),
        ("PRESCALE", "PRESCALE_QK"),
        ("fwd_BLOK_N", "fwd_BLOCK_N"),
        ("bwd_BLOCK_M11", "bwd_BLOCK_M1"),
        ("Layout", "layout"),
    ],
)
def test_unknown_option_names_the_nearest_and_lists_all(name, nearest):
    error = refusal(lambda: flexgen.compile(options={name: 64}), flexgen.OptionError, name, nearest)
    assert "USE_SUBTILING" in str(error)
    assert "num_stages" in str(error)
    assert error.fix


def test_numbers_of_numpy_are_numbers():
    given = {"BLOCK_M": np.int64(32), "num_warps": np.int32(4), "USE_SUBTILING": np.True_, "kpack": np.int8(2)}
    read = KernelOptions(**given).given()
    assert read == given
    assert [type(value) for value in read.values()] == [int, int, bool, int]


@pytest.mark.parametrize("name", ["BLOCK_M", "num_stages", "USE_SUBTILING", "BACKEND", "kpack"])
@pytest.mark.parametrize("value", [torch.ones(3), np.ones(3), [1], 2.5, "", object()], ids=lambda it: type(it).__name__)
def test_values_of_other_types_are_refused(name, value):
    refusal(lambda: flexgen.compile(options={name: value}), flexgen.OptionError, name)


def test_unknown_option_of_the_drop_in():
    inputs = random_inputs(square(16), CPU)
    call = lambda: flexgen.flex_attention(*inputs, kernel_options={"BLOCK_MM": 64})  # noqa: E731
    refusal(call, flexgen.OptionError, "BLOCK_MM", "BLOCK_M")


@pytest.mark.parametrize("output", ["OUTPUT_LOGSUMEXP", "OUTPUT_MAX", "SM_SCALE", "IS_DIVISIBLE"])
def test_variables_that_flexgen_decides_are_no_options(output):
    refusal(lambda: flexgen.compile(options={output: True}), flexgen.OptionError, output)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BLOCK_N", 48),
        ("BLOCK_M", 0),
        ("BLOCK_M", -16),
        ("BLOCK_M", 8),
        ("BLOCK_N", 64.0),
        ("BLOCK_N", "64"),
        ("fwd_BLOCK_M", 100),
        ("bwd_BLOCK_M1", 24),
        ("num_warps", 3),
        ("num_warps", 0),
        ("num_stages", 0),
        ("num_stages", -1),
        ("num_stages", 2.5),
        ("PRESCALE_QK", "yes"),
        ("USE_SUBTILING", 2),
        ("FLOAT32_PRECISION", "bf16"),
        ("BACKEND", "CUTLASS"),
        ("layout", "sbhd"),
    ],
)
def test_malformed_value_is_named(name, value):
    bare = name.removeprefix("fwd_").removeprefix("bwd_")
    error = refusal(lambda: flexgen.compile(options={name: value}), flexgen.OptionError, bare, repr(value))
    assert error.fix


def test_flash_backend_is_refused_by_name():
    refusal(lambda: flexgen.compile(options={"BACKEND": "FLASH"}), flexgen.OptionError, "FLASH", "AUTO")


def test_options_that_are_no_mapping_are_refused():
    refusal(lambda: flexgen.compile(options=[("BLOCK_M", 64)]), flexgen.OptionError, "list")


@pytest.mark.parametrize(
    ("name", "value", "block_size"), [("BLOCK_M", 64, 96), ("BLOCK_N", 32, 48), ("BLOCK_M", 128, 64)]
)
def test_tile_that_does_not_divide_the_mask_block_is_refused(name, value, block_size):
    inputs = random_inputs(square(192), CPU)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 192, 192, device="cpu", BLOCK_SIZE=block_size)
    call = lambda: flexgen.flex_attention(*inputs, block_mask=block_mask, kernel_options={name: value})  # noqa: E731
    refusal(call, flexgen.OptionError, name, str(value), str(block_size))


def test_default_tiles_divide_any_mask_block():
    inputs = random_inputs(square(96), CPU)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 96, 96, device="cpu", BLOCK_SIZE=(48, 80))
    assert torch.isfinite(flexgen.flex_attention(*inputs, block_mask=block_mask)).all()


def test_option_of_one_backend_contradicts_a_forced_other():
    options = {"BACKEND": "TRITON_DECODE", "FORCE_USE_FLEX_ATTENTION": True}
    refusal(lambda: call_with(options), flexgen.OptionError, "TRITON_DECODE")


def test_option_of_another_vendor_is_refused_or_unused_by_name():
    inputs = random_inputs(square(32), CPU)
    compiled = flexgen.compile(mask_mod=causal, options={"waves_per_eu": 2})
    assert "waves_per_eu" in compiled.lower(*inputs, target="gfx942").explain()
    refusal(lambda: compiled.lower(*inputs, target="sm_90"), flexgen.OptionError, "waves_per_eu", "sm_90")


def test_unknown_target_names_the_known_ones():
    inputs = random_inputs(square(32), CPU)
    refusal(lambda: flexgen.compile().lower(*inputs, target="sm_91x"), flexgen.FlexgenError, "sm_91x", "sm_90")


# Problems.


def tensors(*shapes, dtype=torch.float32):
    return Inputs(*(torch.zeros(shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize(
    ("shapes", "mentions"),
    [
        (((1, 2, 8, 16), (1, 2, 8, 24), (1, 2, 8, 16)), ("16", "24")),
        (((1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 9, 16)), ("8", "9")),
        (((1, 2, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)), ("2", "3")),
        (((1, 4, 8, 16), (1, 2, 8, 16), (1, 4, 8, 16)), ("2", "4")),
        (((3, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)), ("3", "2")),
        (((1, 2, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)), ("1", "2")),
        (((2, 8, 16), (2, 8, 16), (2, 8, 16)), ("3",)),
        (((1, 1, 2, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)), ("5",)),
        (((1, 2, 8, 0), (1, 2, 8, 0), (1, 2, 8, 16)), ("0",)),
        (((1, 2, 8, 16), (1, 0, 8, 16), (1, 0, 8, 16)), ("0",)),
    ],
    ids=[
        "head_dim",
        "key_length",
        "heads",
        "value_heads",
        "batch",
        "query_batch",
        "rank_3",
        "rank_5",
        "no_dim",
        "no_heads",
    ],
)
def test_shapes_that_form_no_attention_are_refused(shapes, mentions):
    error = refusal(lambda: flexgen.compile()(*tensors(*shapes)), flexgen.UnsupportedProblemError, *mentions)
    assert error.fix


def test_heads_of_the_drop_in_need_enable_gqa():
    inputs = random_inputs(Shape(1, 4, 2, 8, 8), CPU)
    refusal(lambda: flexgen.flex_attention(*inputs), flexgen.UnsupportedProblemError, "enable_gqa")
    assert flexgen.flex_attention(*inputs, enable_gqa=True).shape == (1, 4, 8, 16)


NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float16, torch.bfloat16, torch.float16),
    ],
)
def test_mixed_dtypes_are_refused_with_all_three(dtypes):
    inputs = random_inputs(square(16), CPU)
    mixed = Inputs(*(tensor.to(dtype) for tensor, dtype in zip(inputs, dtypes, strict=True)))
    error = refusal(lambda: flexgen.compile()(*mixed), flexgen.UnsupportedProblemError, *(NAMES[d] for d in dtypes))
    assert isinstance(error, TypeError)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_inputs_that_are_no_floats_are_refused(dtype):
    inputs = tensors((1, 1, 8, 16), (1, 1, 8, 16), (1, 1, 8, 16), dtype=dtype)
    error = refusal(
        lambda: flexgen.compile()(*inputs), flexgen.UnsupportedProblemError, str(dtype).removeprefix("torch.")
    )
    assert isinstance(error, TypeError)


def test_inputs_that_are_no_tensors_are_refused():
    query, key, value = random_inputs(square(8), CPU)
    error = refusal(lambda: flexgen.compile()(query.numpy(), key, value), flexgen.UnsupportedProblemError, "ndarray")
    assert isinstance(error, TypeError)


def test_inputs_on_two_devices_are_refused():
    query, key, value = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile()(query, key.to("meta"), value), flexgen.UnsupportedProblemError, "cpu", "meta")


def test_head_dim_past_512_is_refused_or_right():
    inputs = random_inputs(square(8), CPU, head_dim=520)
    try:
        check_forward(inputs)
    except flexgen.FlexgenError as error:
        refused = str(error)
    else:
        return
    assert "520" in refused


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
def test_scales_that_are_no_finite_numbers_are_refused(scale):
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile()(*inputs, scale=scale), flexgen.UnsupportedProblemError, "scale", str(scale))


@pytest.mark.parametrize("scale", ["0.3", torch.zeros(2)])
def test_scales_that_are_no_numbers_are_refused(scale):
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile()(*inputs, scale=scale), flexgen.FlexgenError, "scale")


def test_return_lse_together_with_return_aux_is_refused():
    inputs = random_inputs(square(8), CPU)
    request = flexgen.AuxRequest(lse=True)
    call = lambda: flexgen.flex_attention(*inputs, return_lse=True, return_aux=request)  # noqa: E731
    refusal(call, flexgen.FlexgenError, "return_lse", "return_aux")


def test_unknown_keyword_of_a_call_is_a_type_error():
    inputs = random_inputs(square(8), CPU)
    with pytest.raises(TypeError, match="no_such_keyword"):
        flexgen.compile()(*inputs, no_such_keyword=1)


# Mods.


def located(mod=None, mask=None, *mentions, kind=flexgen.CaptureError, line):
    """Expect a refusal whose place is the line of this file that holds the text `line`."""
    inputs = random_inputs(square(8), CPU)
    error = refusal(lambda: flexgen.compile(mod, mask)(*inputs), kind, *mentions)
    assert error.where is not None
    assert line in error.where.text
    assert error.where.file.endswith("test_options_errors.py")
    assert error.fix
    return error


def test_python_if_on_indices_suggests_where():
    def mask(b, h, q, k):
        return True if q >= k else False  # noqa: SIM210

    located(None, mask, "torch.where", line="True if q >= k")


def test_python_and_on_indices_suggests_the_operator():
    def mask(b, h, q, k):
        return (q >= k) and (k > 2)

    located(None, mask, "&", line="(q >= k) and (k > 2)")


def test_python_or_on_indices_suggests_the_operator():
    def mask(b, h, q, k):
        return (q >= k) or (k > 2)

    located(None, mask, "|", line="(q >= k) or (k > 2)")


def test_python_not_on_indices_suggests_the_operator():
    def mask(b, h, q, k):
        return not (q >= k)

    located(None, mask, "~", line="not (q >= k)")


def test_python_in_on_indices_is_located():
    def mask(b, h, q, k):
        return q in (1, 2)

    located(None, mask, "|", line="q in (1, 2)")


def test_chained_comparison_suggests_the_operator():
    def mask(b, h, q, k):
        return 0 <= q - k < 5

    located(None, mask, "&", line="0 <= q - k < 5")


def test_if_statement_in_a_nested_helper_is_located_in_the_helper():
    def near(distance):
        if distance > 3:
            return distance
        return distance * 2

    def mod(score, b, h, q, k):
        return score + near(q - k)

    located(mod, None, "torch.where", line="if distance > 3")


def test_loop_over_a_traced_value_is_located():
    def mod(score, b, h, q, k):
        for _ in range(q):
            score = score * 2
        return score

    located(mod, line="range(q)")


def test_item_and_float_of_a_traced_value_are_located():
    def mod(score, b, h, q, k):
        return score * float(q)

    located(mod, line="float(q)")


def test_if_on_a_captured_constant_works(device):
    for bidirectional in (True, False):

        def mask(b, h, q, k, bidirectional=bidirectional):
            if bidirectional:
                return k >= 0
            return q >= k

        check_forward(random_inputs(square(20), device), mask_mod=mask)


def test_operation_that_is_not_compiled_is_located():
    def mod(score, b, h, q, k):
        return torch.special.bessel_j0(score)

    located(mod, None, "bessel_j0", kind=flexgen.UnsupportedOpError, line="torch.special.bessel_j0(score)")


def test_all_operations_that_are_not_compiled_are_listed_at_once():
    def mod(score, b, h, q, k):
        score = torch.special.bessel_j0(score)
        return torch.special.bessel_y1(score)

    inputs = random_inputs(square(8), CPU)
    error = refusal(lambda: flexgen.compile(mod)(*inputs), flexgen.UnsupportedOpError, "bessel_j0", "bessel_y1")
    assert len(error.problems) == 2


def test_random_numbers_in_a_mod_are_refused():
    def mod(score, b, h, q, k):
        return score + torch.rand_like(score)

    located(mod, None, "rand", line="torch.rand_like(score)")


def test_exception_of_the_mod_is_located():
    def mod(score, b, h, q, k):
        return score + undefined_table[k]  # noqa: F821

    located(mod, None, "undefined_table", line="undefined_table[k]")


@pytest.mark.parametrize(
    "mask",
    [lambda b, h, q, k: q - k, lambda b, h, q, k: (q >= k).float(), lambda b, h, q, k: 1],
    ids=["int", "float", "1"],
)
def test_mask_mod_that_returns_no_bool_is_refused(mask):
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile(mask_mod=mask)(*inputs), flexgen.CaptureError, "bool")


def test_mod_that_returns_nothing_is_refused():
    def mod(score, b, h, q, k):
        score + 1

    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile(mod)(*inputs), flexgen.CaptureError, "None")


def test_mod_that_returns_a_vector_is_refused():
    rows = torch.zeros(8, 4)
    inputs = random_inputs(square(8), CPU)
    call = lambda: flexgen.compile(lambda score, b, h, q, k: score + rows[q])(*inputs)  # noqa: E731
    refusal(call, flexgen.CaptureError, "4")


@pytest.mark.parametrize("mod", [lambda score, b, h, q: score, lambda: 0], ids=["four", "none"])
def test_score_mod_with_other_arguments_is_refused(mod):
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile(mod)(*inputs), flexgen.CaptureError, "score")


def test_mask_mod_given_as_score_mod_is_refused():
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile(causal)(*inputs), flexgen.CaptureError, "causal", "score_mod", "5 arguments")


def test_mod_that_is_not_callable_is_refused():
    inputs = random_inputs(square(8), CPU)
    refusal(lambda: flexgen.compile(3)(*inputs), flexgen.FlexgenError, "int")


def test_index_with_too_many_dimensions_is_located():
    table = torch.zeros(8)

    def mod(score, b, h, q, k):
        return score + table[q, k]

    located(mod, line="table[q, k]")


def test_message_has_the_four_parts():
    def mask(b, h, q, k):
        return (q >= k) and (k > 2)

    text = str(located(None, mask, line="and"))
    assert "why:" in text
    assert "fix:" in text
    assert "^" in text

"""A covering set of dtypes, shapes, head dims, options, masks and score mods against float64."""

from __future__ import annotations

import re

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES
from tests.forward.run import Inputs, check_forward, random_inputs, square

SQUARE = Shape(2, 4, 2, 48, 48)
OBLONG = Shape(2, 4, 2, 35, 53)


def causal(b, h, q, k):
    return q >= k


def softcapped(score, b, h, q, k):
    return 4.0 * torch.tanh(score / 4.0) + 0.05 * (k - q)


def case_shape(case):
    return OBLONG if case.fits(OBLONG) else SQUARE


@pytest.mark.parametrize("case", list(MASKS), ids=lambda case: case.name)
def test_every_mask_of_the_corpus(device, case):
    shape = case_shape(case)
    check_forward(random_inputs(shape, device), mask_mod=case.build(shape, device))


@pytest.mark.parametrize("case", list(MASKS), ids=lambda case: case.name)
def test_every_mask_of_the_corpus_as_a_block_mask(device, case):
    """The block lists and the analysis of the mask must agree bit by bit on the keys that count."""
    shape = case_shape(case)
    inputs, mask = random_inputs(shape, device), case.build(shape, device)
    lists = flexgen.create_block_mask(mask, shape.B, shape.Hq, shape.Lq, shape.Lk, device=device, BLOCK_SIZE=16)
    options = {"BLOCK_M": 16, "BLOCK_N": 16}
    out = flexgen.flex_attention(*inputs, block_mask=lists, enable_gqa=True, kernel_options=options)
    check = check_forward(inputs, mask_mod=mask, options=options)
    torch.testing.assert_close(out, check, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", list(SCORES), ids=lambda case: case.name)
def test_every_score_mod_of_the_corpus(device, case):
    shape = case_shape(case)
    check_forward(random_inputs(shape, device), case.build(shape, device))


def paired(masks, scores):
    """Return pairs in which every case of the longer corpus occurs once."""
    masks, scores = list(masks), list(scores)
    count = max(len(masks), len(scores))
    return [(masks[i % len(masks)], scores[(i * 7 + 3) % len(scores)]) for i in range(count)]


@pytest.mark.parametrize(("mask", "score"), paired(MASKS, SCORES), ids=lambda case: case.name)
def test_masks_with_score_mods_in_half_precision(device, mask, score):
    shape = OBLONG if mask.fits(OBLONG) and score.fits(OBLONG) else SQUARE
    inputs = random_inputs(shape, device, dtype=torch.bfloat16)
    check_forward(inputs, score.build(shape, device), mask.build(shape, device))


DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0])
def test_dtypes_and_magnitudes(device, dtype, spread):
    check_forward(random_inputs(square(67), device, dtype=dtype, head_dim=32, spread=spread), softcapped, causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(8, 8), (20, 36), (40, 24), (64, 64), (128, 16), (16, 128)])
def test_dtypes_and_head_dims(device, dtype, head_dim, v_head_dim):
    shape = Shape(1, 2, 1, 18, 33)
    check_forward(random_inputs(shape, device, dtype=dtype, head_dim=head_dim, v_head_dim=v_head_dim), softcapped)


def test_float64_in_the_interpreter():
    device = torch.device("cpu")
    inputs = random_inputs(Shape(1, 2, 1, 35, 53), device, dtype=torch.float64, v_head_dim=24)
    check_forward(inputs, softcapped, causal)
    check_forward(inputs, mask_mod=lambda b, h, q, k: (q > 5) & (k <= q), scale=0.3)
    check_forward(inputs, lambda score, b, h, q, k: torch.clamp(score, -0.7, 0.9) * 0.3)


@pytest.mark.gpu
def test_float64_on_a_gpu_is_right_or_refused_with_the_dtype():
    inputs = random_inputs(square(35), torch.device("cuda"), dtype=torch.float64)
    try:
        check_forward(inputs, softcapped, causal)
    except flexgen.UnsupportedProblemError as error:
        refused = str(error)
    else:
        return
    assert "float64" in refused


@pytest.mark.parametrize("tiles", [(16, 16), (16, 64), (64, 16), (32, 32), (128, 16), (16, 128)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(35, 53), (64, 64), (1, 130)])
def test_tiles(device, tiles, q_len, kv_len):
    inputs = random_inputs(Shape(1, 2, 1, q_len, kv_len), device)
    offset = kv_len - q_len
    options = {"BLOCK_M": tiles[0], "BLOCK_N": tiles[1]}
    check_forward(inputs, softcapped, lambda b, h, q, k: q + offset >= k, options=options)


OPTIONS = [
    {"PRESCALE_QK": True},
    {"PRESCALE_QK": False},
    {"USE_SUBTILING": True},
    {"ROWS_GUARANTEED_SAFE": True},
    {"BLOCKS_ARE_CONTIGUOUS": True},
    {"FORCE_USE_FLEX_ATTENTION": True},
    {"FLOAT32_PRECISION": "ieee"},
    {"num_warps": 2},
    {"num_stages": 1},
    {"num_stages": 3, "num_warps": 8},
    {"BACKEND": "AUTO"},
    {"BACKEND": "TRITON"},
    {"fwd_BLOCK_M": 32, "BLOCK_M": 64},
    {"fwd_USE_SUBTILING": True, "fwd_PRESCALE_QK": True, "BLOCK_N": 16},
    {"PRESCALE_QK": True, "USE_SUBTILING": True, "BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(f"{k}={v}" for k, v in options.items()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_keep_the_meaning(device, options, dtype):
    inputs = random_inputs(Shape(1, 2, 1, 35, 53), device, dtype=dtype)
    rounds_query = dtype != torch.float32 and (options.get("PRESCALE_QK") or options.get("fwd_PRESCALE_QK"))
    factor = 200.0 if rounds_query else 1.0  # the scaled query is rounded to its dtype before the product
    check_forward(inputs, softcapped, causal, options=options, statistics_factor=factor)
    check_forward(inputs, None, causal, options=options, statistics_factor=factor)


def test_options_as_a_typed_value(device):
    inputs = random_inputs(square(35), device)
    typed = flexgen.Options.of(BLOCK_M=16, fwd_USE_SUBTILING=True)
    check_forward(inputs, softcapped, causal, options=typed)
    by_dict = flexgen.compile(softcapped, causal, {"BLOCK_M": 16, "fwd_USE_SUBTILING": True})(*inputs)
    assert torch.equal(flexgen.compile(softcapped, causal, typed)(*inputs), by_dict)


@pytest.mark.parametrize("v_head_dim", [1, 16, 24, 33, 48, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", ["USE_SUBTILING", "fwd_USE_SUBTILING"])
def test_subtiling_changes_no_bit_in_the_interpreter(v_head_dim, dtype, option):
    device = torch.device("cpu")
    inputs = random_inputs(Shape(1, 2, 1, 35, 70), device, dtype=dtype, v_head_dim=v_head_dim)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 16}
    check_forward(inputs, softcapped, causal, options={**tiles, option: True})
    on = flexgen.compile(softcapped, causal, {**tiles, option: True})(*inputs)
    off = flexgen.compile(softcapped, causal, {**tiles, option: False})(*inputs)
    assert torch.equal(on, off)


@pytest.mark.gpu
@pytest.mark.parametrize("v_head_dim", [16, 48, 64, 128, 256])
def test_subtiling_keeps_the_meaning_on_a_gpu(v_head_dim):
    device = torch.device("cuda")
    inputs = random_inputs(square(256, heads=2), device, dtype=torch.bfloat16, head_dim=64, v_head_dim=v_head_dim)
    check_forward(inputs, softcapped, causal, options={"USE_SUBTILING": True})


def test_subtiling_shows_in_plan_and_source():
    inputs = random_inputs(square(64), torch.device("cpu"))
    with_it, without = (
        flexgen.compile(softcapped, causal, {"USE_SUBTILING": on}).lower(*inputs, target="sm_90")
        for on in (True, False)
    )
    assert "USE_SUBTILING" in with_it.explain()
    assert "tl.split(" in with_it.source["forward"]
    assert "tl.join(" in with_it.source["forward"]
    assert "tl.split(" not in without.source["forward"]
    assert flexgen.compile(softcapped, causal).lower(*inputs, target="sm_90").source == without.source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bulk_copies_are_right_or_refused_by_name(device, dtype):
    inputs = random_inputs(Shape(1, 2, 1, 70, 90), device, dtype=dtype, head_dim=64)
    try:
        check_forward(inputs, softcapped, causal, options={"USE_TMA": True})
    except flexgen.OptionError as error:
        refused = str(error)
    else:
        return
    assert "USE_TMA" in refused


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("length", "head_dim"), [(1024, 64), (1000, 128), (777, 96)])
def test_lengths_of_real_models(dtype, length, head_dim):
    device = torch.device("cuda")
    inputs = random_inputs(Shape(2, 4, 2, length, length), device, dtype=dtype, head_dim=head_dim)
    check_forward(inputs, softcapped, causal)
    check_forward(inputs, None, lambda b, h, q, k: (q >= k) & (q - k < 200))


@pytest.mark.parametrize("prefix", ["", "fwd_"])
def test_forward_prefix_wins_over_the_bare_name(prefix):
    inputs = random_inputs(square(256), torch.device("cpu"))
    options = {"BLOCK_M": 64, "fwd_BLOCK_M": 32} if prefix else {"BLOCK_M": 64}
    source = flexgen.compile(softcapped, causal, options).lower(*inputs, target="sm_90").source["forward"]
    expected = 32 if prefix else 64
    value = re.search(r"^BLOCK_M\b\D*(\d+)", source, re.MULTILINE)
    assert value is not None
    assert int(value[1]) == expected


def test_results_are_the_same_from_run_to_run(device):
    inputs = random_inputs(Shape(1, 2, 1, 70, 90), device, dtype=torch.bfloat16)
    attention = flexgen.compile(softcapped, causal)
    first = attention(*inputs)
    assert all(torch.equal(attention(*inputs), first) for _ in range(3))


def test_inputs_are_not_written(device):
    inputs = random_inputs(square(40), device)
    copies = [tensor.clone() for tensor in inputs]
    flexgen.compile(softcapped, causal, {"PRESCALE_QK": True})(*inputs)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(inputs, copies, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", list(MASKS), ids=lambda case: case.name)
def test_masks_over_several_tiles_of_the_default_plan(case):
    device, shape = torch.device("cuda"), Shape(2, 4, 2, 300, 300)
    check_forward(random_inputs(shape, device, head_dim=64, dtype=torch.bfloat16), mask_mod=case.build(shape, device))


@pytest.mark.parametrize("name", ["sliding_window", "documents_causal", "neighbourhood_2d", "rows_empty", "strided"])
def test_masks_over_many_small_tiles(device, name):
    shape = Shape(1, 1, 1, 130, 130)
    mask = MASKS[name].build(shape, device)
    check_forward(random_inputs(shape, device), mask_mod=mask, options={"BLOCK_M": 16, "BLOCK_N": 16})


def test_zero_inputs_average_the_values(device):
    inputs = random_inputs(square(33), device)
    zero = Inputs(torch.zeros_like(inputs.query), torch.zeros_like(inputs.key), inputs.value)
    out = check_forward(zero)
    torch.testing.assert_close(out, inputs.value.mean(2, keepdim=True).expand_as(out), rtol=1e-5, atol=1e-5)

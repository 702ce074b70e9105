"""How exact the outputs are: float32 is IEEE, statistics are natural logarithms, magnitudes do not break them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import EVERYTHING, Inputs, check_forward, random_inputs, square
from tests.reference import assert_near, dense_attention, largest_error


def causal(b, h, q, k):
    return q >= k


def test_float32_is_ieee_by_default(device):
    check_forward(random_inputs(square(128), device, head_dim=64, spread=3.0))


@pytest.mark.gpu
def test_tf32_only_on_request():
    device = torch.device("cuda")
    inputs = random_inputs(square(128), device, head_dim=64, spread=3.0)
    exact = dense_attention(*inputs).out
    ieee, tf32 = (flexgen.compile(options={"FLOAT32_PRECISION": name})(*inputs) for name in ("ieee", "tf32"))
    assert torch.equal(ieee, flexgen.compile()(*inputs))
    assert largest_error(ieee, exact) < 5e-5 < largest_error(tf32, exact) < 3e-2


@pytest.mark.gpu
def test_torch_settings_do_not_choose_the_precision(monkeypatch):
    inputs = random_inputs(square(128), torch.device("cuda"), head_dim=64, spread=3.0)
    before = flexgen.compile()(*inputs)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    assert torch.equal(flexgen.compile()(*inputs), before)


@pytest.mark.parametrize("prescale", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_lse_is_a_natural_logarithm_of_scaled_scores(device, prescale, scale):
    inputs = random_inputs(square(16), device)
    attention = flexgen.compile(options={"PRESCALE_QK": prescale})
    _, aux = attention(*inputs, scale=scale, return_aux=EVERYTHING)
    factor = 1 / math.sqrt(16) if scale is None else scale
    scores = inputs.query.double() @ inputs.key.double().transpose(-1, -2) * factor
    assert_near("lse", aux.lse, scores.logsumexp(-1), 1e-5)
    assert_near("max_scores", aux.max_scores, scores.amax(-1), 1e-5)


@pytest.mark.parametrize("scale", [None, 0.3, 0, 0.0, -0.5, 1, 3.0, 1e-4])
@pytest.mark.parametrize("prescale", [False, True])
def test_scales(device, scale, prescale):
    inputs = random_inputs(square(40), device)
    options = {"PRESCALE_QK": prescale}
    check_forward(inputs, mask_mod=causal, scale=scale, options=options)
    check_forward(inputs, lambda score, b, h, q, k: score + 0.1 * k, causal, scale=scale, options=options)


def test_scale_may_be_a_numpy_number(device):
    inputs = random_inputs(square(20), device)
    expected = flexgen.compile()(*inputs, scale=0.25)
    for kind in (np.float32, np.float64, np.float16):
        assert torch.equal(flexgen.compile()(*inputs, scale=kind(0.25)), expected)


def test_scale_changes_from_call_to_call(device):
    inputs = random_inputs(square(20), device)
    attention = flexgen.compile()
    for scale in (0.3, None, -0.5, 0.0, 0.3, 2):
        check_forward(inputs, scale=scale, attention=attention)


def test_statistics_are_those_after_the_score_mod(device):
    inputs = random_inputs(square(24), device)
    _, aux = flexgen.compile(lambda score, b, h, q, k: q * 0 - 3.0)(*inputs, return_aux=EVERYTHING)
    assert_near("max_scores", aux.max_scores, torch.full_like(aux.max_scores, -3.0), 1e-6)
    assert_near("lse", aux.lse, torch.full_like(aux.lse, math.log(24) - 3.0), 1e-5)


@pytest.mark.parametrize("request_", [(True, False), (False, True), (False, False)])
def test_only_requested_statistics_come_back(device, request_):
    lse, max_scores = request_
    inputs = random_inputs(square(20), device)
    out, aux = flexgen.compile()(*inputs, return_aux=flexgen.AuxRequest(lse=lse, max_scores=max_scores))
    assert (aux.lse is not None, aux.max_scores is not None) == request_
    assert torch.equal(out, flexgen.compile()(*inputs))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_narrow_inputs_are_float32(device, dtype):
    inputs = random_inputs(square(20), device, dtype=dtype)
    _, aux = flexgen.compile()(*inputs, return_aux=EVERYTHING)
    assert aux.lse.dtype == aux.max_scores.dtype == torch.float32


def test_one_key_of_large_scores_gives_its_value(device):
    inputs = random_inputs(Shape(1, 1, 1, 1, 1), device, dtype=torch.float16, spread=3.0)
    assert torch.equal(check_forward(inputs), inputs.value)


def test_three_keys_of_many_queries_aligned_at_the_end(device):
    inputs = random_inputs(Shape(1, 1, 1, 256, 3), device, dtype=torch.float16, spread=3.0)
    check_forward(inputs, mask_mod=lambda b, h, q, k: q - 253 >= k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shift", [-1e4, -200.0, 200.0, 1e4])
def test_scores_far_from_zero(device, dtype, shift):
    inputs = random_inputs(square(40), device, dtype=dtype)
    check_forward(inputs, lambda score, b, h, q, k: score + shift + k)


def test_scores_near_the_float32_limits(device):
    inputs = random_inputs(square(24), device)
    limit = torch.finfo(torch.float32)
    check_forward(inputs, lambda score, b, h, q, k: torch.where(k % 2 == 0, score, limit.min))
    check_forward(inputs, lambda score, b, h, q, k: torch.where(k == 3, limit.max / 8, score))


def test_large_inputs_do_not_overflow(device):
    inputs = random_inputs(square(24), device, spread=1.0)
    large = Inputs(inputs.query * 1e4, inputs.key * 1e4, inputs.value)
    out = flexgen.compile()(*large)
    exact = dense_attention(*large).out
    assert torch.isfinite(out).all()
    assert_near("out", out, exact, 0.2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_maximum_falls_and_rises(device, dtype):
    """The largest score lies in the first, the last and a middle tile."""
    inputs = random_inputs(square(96), device, dtype=dtype)
    for peak in (0, 50, 95):
        check_forward(inputs, lambda score, b, h, q, k, peak=peak: score - 2.0 * (k - peak).abs())


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 192), (torch.float32, 256), (torch.bfloat16, 512)])
def test_default_tiles_of_large_heads_fit_the_chip(dtype, head_dim):
    inputs = random_inputs(square(256, heads=2), torch.device("cuda"), dtype=dtype, head_dim=head_dim)
    check_forward(inputs, mask_mod=causal)


@pytest.mark.gpu
def test_block_mask_with_the_largest_head_fits_the_chip():
    device = torch.device("cuda")
    inputs = random_inputs(square(256), device, dtype=torch.bfloat16, head_dim=512)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 256, 256, device=device)
    flexgen.flex_attention(*inputs, block_mask=block_mask)


def test_a_query_row_of_nan_spoils_only_itself(device):
    inputs = random_inputs(square(20), device)
    inputs.query[0, 0, 3] = float("nan")
    out, aux = flexgen.compile(mask_mod=causal)(*inputs, return_aux=EVERYTHING)
    dense = dense_attention(*inputs, None, causal)
    for actual, expected in [(out, dense.out), (aux.lse, dense.lse)]:
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_near("other rows", actual.nan_to_num(), expected.nan_to_num(), 1e-5)

"""Lowering needs shapes and not data: meta and fake tensors do, and the default tiles fit the chip."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import flexgen


def causal(b, h, q, k):
    return q >= k


def source(*tensors, score_mod=None):
    return flexgen.compile(score_mod, causal).lower(*tensors, target="sm_90").source["forward"]


def three(device="cpu", *, dtype=torch.bfloat16, head_dim=64, length=256):
    return tuple(torch.empty(1, 2, length, head_dim, dtype=dtype, device=device) for _ in range(3))


def test_meta_tensors_lower_as_real_ones_do():
    assert source(*three("meta")) == source(*three())


@pytest.mark.filterwarnings("error")
def test_fake_tensors_lower_as_real_ones_do():
    with FakeTensorMode():
        fake = three()
    assert source(*fake) == source(*three())


def test_fake_tensors_lower_inside_their_mode_with_real_captures():
    table = torch.randn(256)
    mod = lambda score, b, h, q, k: score + table[k]  # noqa: E731
    with FakeTensorMode():
        inside = source(*three(), score_mod=mod)
    assert inside == source(*three(), score_mod=mod)


def test_fake_cuda_tensors_lower_on_a_machine_without_cuda():
    with FakeTensorMode():
        fake = three("cuda")
    assert source(*fake) == source(*three())


LARGE = [(torch.bfloat16, 192), (torch.float32, 256), (torch.bfloat16, 512)]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), LARGE)
@pytest.mark.parametrize("with_block_mask", [False, True])
def test_default_tiles_of_large_heads_fit_the_chip_when_assembled(dtype, head_dim, with_block_mask):
    tensors = three(dtype=dtype, head_dim=head_dim)
    table = flexgen.create_block_mask(causal, 1, 1, 256, 256, device="cpu") if with_block_mask else None
    lowered = flexgen.compile(mask_mod=causal).lower(*tensors, target="sm_90", block_table=table)
    assert lowered.binary().shared_bytes <= lowered.plan.shared_bytes <= 232448


def test_forced_tiles_that_fit_no_chip_are_an_error_with_the_bytes():
    options = {"num_stages": 5, "BLOCK_M": 128, "BLOCK_N": 128}
    with pytest.raises(flexgen.NoFeasiblePlanError, match="232448") as raised:
        flexgen.compile(options=options).lower(*three(head_dim=512), target="sm_90")
    assert "num_stages" in str(raised.value)


def test_forced_tiles_are_never_changed():
    options = {"BLOCK_M": 32, "BLOCK_N": 16, "num_warps": 2, "num_stages": 1}
    plan = flexgen.compile(mask_mod=causal, options=options).lower(*three(), target="sm_90").plan
    assert {name: getattr(plan, name) for name in options} == options

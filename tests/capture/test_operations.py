"""Every kind of operation a score_mod may hold is captured with torch's meaning."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.capture.meaning import assert_same_meaning

Mod = Callable[..., object]

POINTWISE: dict[str, Mod] = {
    "identity": lambda s, b, h, q, k: s,
    "constant": lambda s, b, h, q, k: 1.5,
    "python bool": lambda s, b, h, q, k: True,
    "bool": lambda s, b, h, q, k: q >= k,
    "int": lambda s, b, h, q, k: k,
    "true division of ints": lambda s, b, h, q, k: (q + 1) / (k + 1),
    "int over number": lambda s, b, h, q, k: s + q / 2,
    "floor division of negatives": lambda s, b, h, q, k: s + (q - k) // 3,
    "remainder of negatives": lambda s, b, h, q, k: s + (q - k) % 3,
    "float floor division": lambda s, b, h, q, k: s // 0.75 + s % 0.75,
    "rounding modes": lambda s, b, h, q, k: (
        torch.div(q - k, 2, rounding_mode="trunc")
        + torch.div(s, 0.5, rounding_mode="floor")
        + torch.div(s, 0.5, rounding_mode="trunc")
    ),
    "reflected": lambda s, b, h, q, k: 1 - s + 2 / (s.abs() + 1) + 7 // (q + 1) + 7 % (k + 1),
    "alpha": lambda s, b, h, q, k: torch.add(s, q, alpha=2) - torch.sub(s, k, alpha=0.5),
    "powers": lambda s, b, h, q, k: s**2 + s**3 + (s.abs() + 1) ** 0.5 + (s.abs() + 1) ** -0.5 + 2 ** (q - k),
    "more powers": lambda s, b, h, q, k: (s.abs() + 1) ** 1.7 + (s.abs() + 1) ** -2 + 3.0**s + q**2 + s**0,
    "tensor powers": lambda s, b, h, q, k: torch.pow(s.abs() + 0.5, q.float()),
    "exponentials": lambda s, b, h, q, k: torch.exp(s) + torch.exp2(s) + torch.expm1(s) + s.exp(),
    "logarithms": lambda s, b, h, q, k: (s.abs() + 1).log() + torch.log2(q + 1) + torch.log1p(q) + torch.log10(k + 1),
    "trigonometry": lambda s, b, h, q, k: s.sin() + s.cos() + s.tan() + s.tanh() + s.sinh() + s.cosh(),
    "sigmoid erf sqrt": lambda s, b, h, q, k: (
        torch.sigmoid(s) + torch.erf(s) + torch.erfc(s) + q.sqrt() + (q + 1).rsqrt()
    ),
    "rounding": lambda s, b, h, q, k: s.floor() + s.ceil() + s.trunc() + s.round() + s.frac() + q.floor(),
    "sign": lambda s, b, h, q, k: s.sign() + torch.sgn(q - k) + torch.copysign(s, k - q) + s.abs() + (-s).neg(),
    "min max": lambda s, b, h, q, k: torch.minimum(s, s * 2) + torch.max(q, k) + torch.fmax(s, -s) + torch.min(q, k),
    "clamp": lambda s, b, h, q, k: s.clamp(-1, 1) + q.clamp(min=2) + torch.clamp_max(k, 3) + s.clamp(max=0.5),
    "where": lambda s, b, h, q, k: torch.where(q > k, s, -math.inf),
    "where of numbers": lambda s, b, h, q, k: s + torch.where(q > k, 1.0, 0.0) + torch.where(q > k, 1, 2),
    "masked_fill": lambda s, b, h, q, k: s.masked_fill(q < k, torch.finfo(s.dtype).min),
    "nan and inf": lambda s, b, h, q, k: (
        torch.isnan(s / (q - q)) + torch.isinf(s / (q - q)) + torch.isfinite(s) + q.isnan()
    ),
    "logical": lambda s, b, h, q, k: torch.logical_and(q, k) | torch.logical_not(k) | torch.logical_xor(q, b),
    "bits": lambda s, b, h, q, k: (q & k) + (q | k) + (q ^ 3) + ~k + (q << 2) + (k >> 1),
    "bool algebra": lambda s, b, h, q, k: ~(q > k) & (h == 1) | (q != 2) ^ (k <= 3),
    "bool arithmetic": lambda s, b, h, q, k: s * (q >= k) + ((q > 1) + (k > 2)) + ((q > 1) < (k > 2)),
    "casts": lambda s, b, h, q, k: (
        s.int() + q.float() * 0.5 + s.to(torch.bfloat16) + k.bool() + s.half().float() + q.type(torch.int32)
    ),
    "other casts": lambda s, b, h, q, k: (
        s.to(q) + q.type_as(s) + q.to(dtype=torch.float64) + s.double() + q.short() + s.bool()
    ),
    "fused forms": lambda s, b, h, q, k: (
        torch.lerp(s, s * 2, 0.25) + torch.addcmul(s, s, s, value=0.5) + torch.addcdiv(s, s, s.abs() + 1)
    ),
    "reciprocal square": lambda s, b, h, q, k: (s.abs() + 1).reciprocal() + s.square(),
    "hypot": lambda s, b, h, q, k: torch.hypot(s, q.float()) + torch.logaddexp(s, s + 1),
    "like": lambda s, b, h, q, k: (
        torch.full_like(s, 2.0) + torch.zeros_like(q) + s.new_full((), 3) + torch.ones_like(s)
    ),
    "0-d constants": lambda s, b, h, q, k: s * torch.tensor(0.5) + torch.tensor(2, dtype=torch.int32) + torch.zeros(()),
    "comparison with a float": lambda s, b, h, q, k: (q < 2.5) + (s >= 1),
    "in place": lambda s, b, h, q, k: s.mul_(2).add_(q),
    "nan_to_num": lambda s, b, h, q, k: torch.nan_to_num(s / (q - q), 0.0, 1.0, -1.0),
}

ACTIVATIONS = (
    "relu",
    "gelu",
    "silu",
    "softplus",
    "elu",
    "selu",
    "mish",
    "hardswish",
    "hardtanh",
    "relu6",
    "leaky_relu",
)
ACTIVATIONS += ("logsigmoid", "celu", "hardsigmoid", "softsign", "tanhshrink", "softshrink", "hardshrink")


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_operation_means_what_torch_means(name: str) -> None:
    assert_same_meaning(POINTWISE[name])


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_traced_through_its_decomposition(name: str) -> None:
    assert_same_meaning(lambda s, b, h, q, k: getattr(F, name)(s))


def test_gelu_with_tanh_is_traced() -> None:
    assert_same_meaning(lambda s, b, h, q, k: F.gelu(s, approximate="tanh"))


def test_augmented_assignment_rebinds_the_score() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        score *= 2
        score += q_idx
        return score

    assert_same_meaning(mod)


def test_thousands_of_operations_do_not_exhaust_the_stack() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        for i in range(3000):
            score = score + (q_idx + i) * 1e-6
        return score

    assert_same_meaning_quickly(mod)


def assert_same_meaning_quickly(mod: Mod) -> None:
    from flexgen.capture.live import LiveMods
    from flexgen.ir.graph import topological

    (graph,) = LiveMods(mod).current().captured.mods.graphs()
    assert sum(1 for node in topological(graph.root) if node.op == "add") > 3000

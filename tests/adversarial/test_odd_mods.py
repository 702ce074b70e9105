"""Masks and score mods that few people would write, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flexgen
from tests.adversarial.dense import attention, worst_errors

generator = torch.Generator().manual_seed(0)
permutation = torch.randperm(40, generator=generator)
documents = torch.arange(40) // 11
signed = torch.randint(-40, 40, (40,), generator=generator)
small = torch.randint(-128, 127, (40,), generator=generator).to(torch.int8)
lengths = torch.tensor([[7, 40], [0, 22]])
bias = torch.randn(40, generator=generator)

MASKS = {
    "negated nest": lambda b, h, q, k: ~((q > k) ^ (k > 5) | ~(q < 9)),
    "modulus of the head": lambda b, h, q, k: q % (h + 1) == k % (h + 1),
    "negative modulus": lambda b, h, q, k: (q - k) % -8 > -4,
    "negative quotient": lambda b, h, q, k: (q - k) // -8 == 0,
    "shifts": lambda b, h, q, k: (q << 2) >= (k << (h + 1)),
    "clamp of a key": lambda b, h, q, k: torch.clamp(k, 0, 3) == q % 4,
    "float of an index": lambda b, h, q, k: k.float() / 7 > q.float().sqrt(),
    "product of differences": lambda b, h, q, k: (q - k) * (k - 3) >= 0,
    "keys alone": lambda b, h, q, k: k % 7 == 0,
    "batch alone": lambda b, h, q, k: b > 0,
    "no head": lambda b, h, q, k: h < 0,
    "permuted order": lambda b, h, q, k: permutation[q] >= permutation[k],
    "signed bound of a row": lambda b, h, q, k: q - k >= signed[q],
    "lengths": lambda b, h, q, k: (k < lengths[b, h]) & (q < lengths[b, h]),
    "distance of documents": lambda b, h, q, k: (documents[k] - documents[q]).abs() < 2,
    "chosen axis": lambda b, h, q, k: torch.where(q % 2 == 0, k, q) <= torch.where(k % 2 == 0, q, k),
    "comparison of conditions": lambda b, h, q, k: (q >= k) < (k > 3),
    "huge factor": lambda b, h, q, k: q * 2**40 + k > 5 * 2**40,
    "wrapping int8": lambda b, h, q, k: (q * 7).to(torch.int8) >= (k * 7).to(torch.int8),
    "infinite reciprocal": lambda b, h, q, k: 1 / (q - k) > 0.1,
    "divisors": lambda b, h, q, k: k % (q + 1) == 0,
    "blocks of a plane": lambda b, h, q, k: ((k // 8 - q // 8).abs() <= 1) & ((k % 8 - q % 8).abs() <= 1),
}

SCORES = {
    "cube": lambda s, b, h, q, k: s**3,
    "reciprocal": lambda s, b, h, q, k: 1 / (s + 9),
    "chain of choices": lambda s, b, h, q, k: torch.where(s > 0, torch.where(s > 1, s * 2, s * 3), -s),
    "self power": lambda s, b, h, q, k: torch.pow(s.abs() + 0.1, s),
    "remainder": lambda s, b, h, q, k: torch.remainder(s, 0.7),
    "rows without a score": lambda s, b, h, q, k: torch.where(k > q + 20, s, -math.inf),
    "NaN replaced": lambda s, b, h, q, k: torch.where(torch.isnan(q / (k * 0.0)), s, s * 0.5),
    "wrapped indices": lambda s, b, h, q, k: s + bias[q - k],
    "int8 products": lambda s, b, h, q, k: s + small[k] * small[q] * 0.01,
    "double in between": lambda s, b, h, q, k: (s.double() + 1e-9 * k) ** 2,
    "powers of two": lambda s, b, h, q, k: s + 2 ** (k % 62) * 1e-15,
    "bool": lambda s, b, h, q, k: q >= k,
}


def within(errors: list[float], allowed: float = 2e-4) -> bool:
    return all(error <= allowed for error in errors)


@pytest.mark.parametrize("name", MASKS)
def test_odd_mask_is_dense_attention(name: str) -> None:
    mask = MASKS[name]
    assert within(worst_errors(flexgen.compile(None, mask), None, mask))


@pytest.mark.parametrize("name", SCORES)
def test_odd_score_is_dense_attention(name: str) -> None:
    score_mod = SCORES[name]
    assert within(worst_errors(flexgen.compile(score_mod), score_mod, None))


def test_views_of_one_captured_tensor_share_its_gradient() -> None:
    base = torch.randn(40, requires_grad=True)
    query, key, value = torch.randn(3, 1, 1, 20, 16)

    def output(of: Tensor, exact: bool) -> Tensor:
        left, right = of[:20], of[10:30]
        mod = lambda s, b, h, q, k: s + left[q] * right[k] + of.view(2, 20)[0, k]  # noqa: E731
        return attention(query, key, value, mod, None) if exact else flexgen.compile(mod)(query, key, value)

    exact = base.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(output(base, False).square().sum(), base)
    (wanted,) = torch.autograd.grad(output(exact, True).square().sum(), exact)
    assert torch.allclose(found.double(), wanted, atol=2e-4)

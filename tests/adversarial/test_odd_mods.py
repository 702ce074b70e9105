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
bytes_ = torch.randint(0, 255, (40,), generator=generator).to(torch.uint8)
shorts = torch.randint(-3000, 3000, (40,), generator=generator).to(torch.int16)
doubles = torch.randn(40, generator=generator, dtype=torch.float64)
halves = torch.randn(40, 40, generator=generator).half()
flags = torch.rand(40, generator=generator) > 0.5
pairs = torch.rand(2, 2, 40, 40, generator=generator) > 0.6
edges = torch.tensor([0, 3, 9, 22, 31, 36])
five, fraction, yes = torch.tensor(5), torch.tensor(0.7), torch.tensor(True)
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
    "nested choices": lambda b, h, q, k: torch.where(
        torch.where(q > k, q % 3 == 0, k % 2 == 1), torch.where(h > 0, q >= k, k >= q), q - k < 5
    ),
    "quotient and remainder": lambda b, h, q, k: ((q - k) // 3 * 3 + (q - k) % 3 == q - k) & (q >= k),
    "two remainders": lambda b, h, q, k: (k - q) % 7 < (q - k) % 5,
    "truncated quotient": lambda b, h, q, k: torch.div(k - q, 5, rounding_mode="trunc") == 0,
    "remainder toward zero": lambda b, h, q, k: torch.fmod(q - k, 4) == -1,
    "remainder by the head": lambda b, h, q, k: torch.remainder(k, h + 2) == 0,
    "bits": lambda b, h, q, k: ((q ^ k) & 6) == ((q | k) & 4),
    "bits of shifts": lambda b, h, q, k: (((q + 1) << 3) >> 1) & k != 0,
    "complements": lambda b, h, q, k: ~q < -k,
    "dtypes in one comparison": lambda b, h, q, k: (bytes_[q] > shorts[k]) | (doubles[k] < q / 40),
    "wrapping bytes": lambda b, h, q, k: bytes_[q] + bytes_[k] > 100,
    "bytes below zero": lambda b, h, q, k: bytes_[q] - bytes_[k] < 60,
    "shifted shorts": lambda b, h, q, k: shorts[q] >> 2 >= shorts[k] >> 2,
    "flags": lambda b, h, q, k: flags[q] ^ flags[k],
    "flags in order": lambda b, h, q, k: flags[q] < flags[k],
    "sum of flags": lambda b, h, q, k: flags[q].int() + flags[k].int() + yes > 1,
    "no axis": lambda b, h, q, k: (q - k < five) & yes & (q * fraction >= k * 0.5),
    "gather of a gather": lambda b, h, q, k: permutation[permutation[q]] >= permutation[documents[k]],
    "chain of gathers": lambda b, h, q, k: permutation[documents[permutation[documents[q]]]] <= k,
    "next edge": lambda b, h, q, k: (edges[(q // 8).clamp(max=5)] <= k) & (k < edges[(q // 8 + 1).clamp(max=5)]),
    "buckets": lambda b, h, q, k: sum((k >= it).int() for it in edges) == sum((q >= it).int() for it in edges),
    "window of batch and head": lambda b, h, q, k: (q - k).abs() <= lengths[b, h] // 4,
    "window that doubles": lambda b, h, q, k: q - k < 2**h * 3,
    "table of all pairs": lambda b, h, q, k: pairs[b, h, q, k],
    "table of pairs the other way": lambda b, h, q, k: pairs[b, h, k, q] | (q == k),
    "floating condition": lambda b, h, q, k: torch.sin(q * 0.7) * torch.cos(k * 0.3) > 0.1,
    "decay": lambda b, h, q, k: torch.exp(-(q - k).abs() / 5.0) > 0.3,
    "rounded": lambda b, h, q, k: torch.round(q / 2.5) == torch.round(k / 2.5),
    "not a number": lambda b, h, q, k: ~((q / 0.0 - k / 0.0) > 0),
    "majority": lambda b, h, q, k: (q >= k).int() + (q - k < 9).int() + (k % 4 == 0).int() >= 2,
    "clamped difference": lambda b, h, q, k: torch.clamp(q - k, -3, 10) == q - k,
    "minimum and maximum": lambda b, h, q, k: torch.minimum(q, k) * 2 >= torch.maximum(q, k),
    "signs": lambda b, h, q, k: torch.sign(q - k) * torch.sign(k - 20) >= 0,
    "diamond": lambda b, h, q, k: (q - 15).abs() + (k - 15).abs() < 12,
    "disc": lambda b, h, q, k: q * q + k * k < 35 * 35,
    "two exclusive ors": lambda b, h, q, k: (q >= k) ^ (k < 10) ^ (q > 30),
    "wrapping int32": lambda b, h, q, k: q.int() * 100_000_000 + k.int() > 0,
    "products past 32 bits": lambda b, h, q, k: q * 3_000_000_000 >= k * 3_000_000_001 - 9,
    "half precision": lambda b, h, q, k: halves[q, k] > halves[k, q],
    "three bands": lambda b, h, q, k: ((q - k >= 0) & (q - k < 4)) | ((q - k >= 20) & (q - k < 24)) | (k - q > 30),
    "one key a row": lambda b, h, q, k: k == (q * 7) % 40,
    "every third row": lambda b, h, q, k: (q % 3 == 1) & (k < q),
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
    "no score": lambda s, b, h, q, k: (q - k) * 0.01,
    "constant": lambda s, b, h, q, k: torch.zeros_like(s),
    "infinite by the score": lambda s, b, h, q, k: torch.where(s < 0, -math.inf, s),
    "infinite rows": lambda s, b, h, q, k: torch.where(q % 5 == 2, -math.inf, s),
    "keys as numbers": lambda s, b, h, q, k: s + torch.log1p(k.float()) * 0.3 - k / 40,
    "slope of the head": lambda s, b, h, q, k: s - (q - k).abs() * torch.exp2(-(h + 1.0)),
    "quotient by an index": lambda s, b, h, q, k: s / (k % 3 + 1),
    "power of an index": lambda s, b, h, q, k: s * 2.0 ** -(k % 5),
    "doubles": lambda s, b, h, q, k: s + doubles[q] * doubles[k],
    "bytes": lambda s, b, h, q, k: s + bytes_[k] / 255,
    "half of pairs": lambda s, b, h, q, k: s + halves[q, k],
    "no axis": lambda s, b, h, q, k: s * fraction + five,
    "power by a tensor": lambda s, b, h, q, k: (s.abs() + 0.1) ** fraction,
    "condition times score": lambda s, b, h, q, k: s * (q >= k) + (k > 3),
    "an integer": lambda s, b, h, q, k: (q + k) % 4,
    "clamped by tables": lambda s, b, h, q, k: torch.clamp(s, -bias[q].abs(), bias[k].abs()),
    "a hundred more": lambda s, b, h, q, k: s + 100.0,
    "very far below": lambda s, b, h, q, k: s - 1e30,
    "smallest number": lambda s, b, h, q, k: torch.where(q >= k, s, torch.finfo(s.dtype).min),
    "softplus": lambda s, b, h, q, k: torch.nn.functional.softplus(s),
    "gelu": lambda s, b, h, q, k: torch.nn.functional.gelu(s),
    "hard tanh": lambda s, b, h, q, k: torch.nn.functional.hardtanh(s, -2, 2),
    "logarithm": lambda s, b, h, q, k: torch.log(s.abs() + 1e-3),
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

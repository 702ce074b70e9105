"""One Attention called in every form in turn: nothing that was prepared for one call may serve another."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.fuzzing.inputs import LAYOUTS
from tests.adversarial.dense import attention as dense_attention

SHAPES = [
    (1, 2, 2, 1, 40),
    (1, 2, 2, 1, 41),
    (2, 4, 2, 7, 100),
    (2, 4, 1, 64, 64),
    (1, 4, 4, 130, 130),
    (2, 2, 2, 40, 33),
]
HEAD_DIMS = [(16, 16), (8, 24), (32, 32), (5, 5)]
ALLOWED = {torch.float32: 3e-5, torch.float64: 1e-6, torch.bfloat16: 4e-2, torch.float16: 5e-3}
CONTEXTS = (torch.enable_grad, torch.no_grad, torch.inference_mode)


def changed(held: Any, draws: random.Random) -> None:
    """Change one of what the mods read, or nothing."""
    match draws.randrange(12):
        case 0:
            held.window = draws.choice([1, 7, 40, 0, -3])
        case 1:
            dtype = draws.choice([torch.float32, torch.float64, torch.bfloat16])
            held.bias = torch.randn(draws.choice([300, 256]), dtype=dtype)
        case 2:
            held.documents = torch.arange(300) // draws.choice([5, 37, 100])
        case 3:
            held.documents.copy_(torch.arange(300) // draws.choice([5, 37, 100]))
        case 4:
            held.adds = not held.adds


def placed(shape: tuple[int, ...], dtype: torch.dtype, bshd: bool, draws: random.Random) -> Tensor:
    """Return drawn numbers in [B, H, L, D] order, which lie in memory in some way."""
    names = ("contiguous", "contiguous", "heads inside", "transposed", "every second", "part")
    batch, heads, length, head_dim = shape
    own = torch.randn((batch, length, heads, head_dim) if bshd else shape).to(dtype)
    own = LAYOUTS[draws.choice(names)](own)
    return own.transpose(1, 2) if bshd else own


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_calls_of_all_forms_in_turn(seed: int) -> None:
    draws = random.Random(seed)
    torch.manual_seed(seed)
    held = SimpleNamespace(window=7, bias=torch.randn(300), documents=torch.arange(300) // 37, adds=True)

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return score + held.bias[k] * 0.5 if held.adds else score * 0.5

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k).abs() < held.window) | (held.documents[q] == held.documents[k])

    attentions = {layout: flexgen.compile(score_mod, mask_mod, {"layout": layout}) for layout in ("bhsd", "bshd")}
    for number in range(120):
        changed(held, draws)
        batch, heads, kv_heads, queries, keys = draws.choice(SHAPES)
        head_dim, value_dim = draws.choice(HEAD_DIMS)
        dtype, bshd, learns = draws.choice(list(ALLOWED)), draws.random() < 0.5, draws.random() < 0.3
        key_batch = draws.choice([batch, batch, 1])
        shapes = (
            (batch, heads, queries, head_dim),
            *((key_batch, kv_heads, keys, dim) for dim in (head_dim, value_dim)),
        )
        inputs = [placed(shape, dtype, bshd, draws).requires_grad_(learns and draws.random() < 0.8) for shape in shapes]
        scale = draws.choice([None, None, 0.3, 1, 2.0, draws.random()])
        extras: dict[str, Any] = {}
        if draws.random() < 0.25:
            extras["return_aux"] = flexgen.AuxRequest(lse=draws.random() < 0.5, max_scores=draws.random() < 0.5)
        given = [tensor.transpose(1, 2) if bshd else tensor for tensor in inputs]
        with (torch.enable_grad if learns else draws.choice(CONTEXTS))():
            for _ in range(draws.choice([1, 1, 3])):  # a third one may be warm
                found = attentions["bshd" if bshd else "bhsd"](*given, scale, **extras)
        output = found[0] if isinstance(found, tuple) else found
        output = output.transpose(1, 2) if bshd else output
        exact = [it.detach().double().expand(batch, -1, -1, -1).requires_grad_() for it in inputs]
        query = exact[0] * (1.0 if scale is None else scale * math.sqrt(head_dim))
        right = dense_attention(query, exact[1], exact[2], score_mod, mask_mod)
        told = (number, batch, heads, queries, keys, head_dim, value_dim, dtype, bshd, scale)
        assert torch.allclose(output.double(), right, atol=ALLOWED[dtype], rtol=ALLOWED[dtype]), told
        wanted = [at for at, tensor in enumerate(inputs) if tensor.requires_grad]
        if wanted:
            weight = torch.randn(right.shape).to(dtype)
            grads = torch.autograd.grad(output, [inputs[at] for at in wanted], weight)
            rights = torch.autograd.grad(right, [exact[at] for at in wanted], weight.double())
            for at, grad, own in zip(wanted, grads, rights, strict=True):
                own = own.sum_to_size(inputs[at].shape)
                error = float((grad.double() - own).abs().max() / own.abs().max().clamp(min=1))
                assert error <= 4 * ALLOWED[dtype], (told, at, error)

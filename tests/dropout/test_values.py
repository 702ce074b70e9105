"""Output, logsumexp and all gradients with dropout, against float64 with a pattern of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from tests.dropout.dense import dense_with_dropout, seeded
from tests.reference import evaluate_block_mask

AUX = flexgen.AuxRequest(lse=True, max_scores=True)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 4e-2}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window_with_empty_rows(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 20) & (q_idx >= kv_idx) & (q_idx % 7 != 3)


def same_document(b, h, q_idx, kv_idx):
    return q_idx // 13 % 3 == kv_idx // 13 % 3


def softcap(score, b, h, q_idx, kv_idx):
    return torch.tanh(score / 3) * 3


def inputs(
    device: torch.device,
    shape: tuple[int, int, int, int, int] = (2, 4, 2, 45, 70),
    *,
    dtype: torch.dtype = torch.float32,
    head_dims: tuple[int, int] = (16, 16),
) -> list[Tensor]:
    """Return query, key and value that require grad, of batch, heads, key heads and lengths."""
    batch, heads, kv_heads, q_len, kv_len = shape
    generator, (qk, v) = torch.Generator().manual_seed(5), head_dims
    sizes = ((heads, q_len, qk), (kv_heads, kv_len, qk), (kv_heads, kv_len, v))
    drawn = (torch.randn(batch, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return [tensor.to(device, dtype).requires_grad_() for tensor in drawn]


def results(out: Tensor, lse: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return output, logsumexp, and the gradients of a loss of both."""
    loss = (
        out.double() * torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out)
    ).sum()
    loss = loss + torch.where(lse.isfinite(), lse, 0.0).double().sin().sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def check(
    tensors: Sequence[Tensor],
    score_mod: Callable[..., Tensor] | None = None,
    live: Callable[..., Tensor] | Tensor | None = None,
    *,
    p: float = 0.3,
    options: dict[str, Any] | None = None,
    captured: Sequence[Tensor] = (),
    sinks: Tensor | None = None,
    **call: Any,
) -> list[Tensor]:
    """Compare a call with float64; return what it gave."""
    query = tensors[0]
    generator, seed = seeded(query.device, 11)
    leaves = [*tensors, *captured, *([] if sinks is None else [sinks])]
    attention = flexgen.compile(score_mod, live if callable(live) else None, options)
    out, aux = attention(*tensors, return_aux=AUX, dropout_p=p, generator=generator, sinks=sinks, **call)
    found = results(out, aux.lse, leaves)
    expected = results(*dense_with_dropout(*tensors, p, seed, score_mod, live, sinks), leaves)
    tolerance = TOLERANCE[query.dtype]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance * scale_of(other))
    return [*found, aux.max_scores]


def scale_of(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


@pytest.mark.parametrize("score_mod", [None, softcap], ids=["plain", "softcap"])
@pytest.mark.parametrize("mask_mod", [None, causal, window_with_empty_rows, same_document])
def test_masks_and_scores(device: torch.device, score_mod: Any, mask_mod: Any) -> None:
    check(inputs(device), score_mod, mask_mod)


@pytest.mark.parametrize("tile", [(16, 32), (64, 16)], ids=str)
def test_tiles(device: torch.device, tile: tuple[int, int]) -> None:
    names = (("BLOCK_M", "BLOCK_M1", "BLOCK_M2"), ("BLOCK_N", "BLOCK_N1", "BLOCK_N2"))
    options = {name: size for size, group in zip(tile, names, strict=True) for name in group}
    check(inputs(device, (1, 2, 1, 45, 70)), None, causal, options=options)


def test_float64_is_exact_in_the_interpreter() -> None:
    tensors = inputs(torch.device("cpu"), dtype=torch.float64)
    check(tensors, softcap, window_with_empty_rows)


def test_bfloat16(device: torch.device) -> None:
    check(inputs(device, (1, 4, 2, 130, 140), dtype=torch.bfloat16, head_dims=(64, 64)), None, causal)


@pytest.mark.parametrize("queries", [1, 3], ids=str)
def test_packed_heads(device: torch.device, queries: int) -> None:
    check(inputs(device, (2, 6, 2, queries, 70)), softcap)


def test_padded_head_dims(device: torch.device) -> None:
    check(inputs(device, head_dims=(24, 40)), None, causal)


def test_captured_tensors_learn(device: torch.device) -> None:
    bias = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    per_key = torch.randn(70, generator=torch.Generator().manual_seed(2)).to(device).requires_grad_()

    def biased(score, b, h, q_idx, kv_idx):
        return softcap(score, b, h, q_idx, kv_idx) + bias[h, q_idx - kv_idx + 100] + per_key[kv_idx]

    found = check(inputs(device), biased, causal, captured=[bias, per_key])
    torch.use_deterministic_algorithms(True)
    try:
        again = check(inputs(device), biased, causal, captured=[bias, per_key])
        repeated = check(inputs(device), biased, causal, captured=[bias, per_key])
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(again, repeated, strict=True))
    assert torch.equal(found[0], again[0])


def test_sinks_count_among_the_weights(device: torch.device) -> None:
    sinks = torch.linspace(-1, 2, 4, device=device).requires_grad_()
    check(inputs(device), None, window_with_empty_rows, sinks=sinks)


@pytest.mark.parametrize("blocks", [(16, 32), (20, 24)], ids=str)
def test_block_masks(device: torch.device, blocks: tuple[int, int]) -> None:
    tensors = inputs(device)
    table = flexgen.create_block_mask(causal, 1, 1, 45, 70, device="cpu", BLOCK_SIZE=blocks)
    live = evaluate_block_mask(table, (2, 4, 45, 70)).to(device)
    generator, seed = seeded(device, 11)
    attention = flexgen.compile(None, causal)
    out, aux = attention(*tensors, return_aux=AUX, dropout_p=0.3, generator=generator, block_table=table.to(device))
    found = results(out, aux.lse, tensors)
    for one, other in zip(found, results(*dense_with_dropout(*tensors, 0.3, seed, None, live), tensors), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-4, atol=2e-4 * scale_of(other))


def test_derived_block_tables(device: torch.device) -> None:
    document = (torch.arange(300, device=device) // 37 % 3).to(torch.int32)

    def documents(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    tiles = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 64)
    tensors = inputs(device, (1, 2, 1, 300, 300))
    lowered = flexgen.compile(None, documents, tiles).lower(*tensors, dropout_p=0.3, target="sm_90")
    assert lowered.table is not None
    check(tensors, None, documents, options=tiles)


def test_layout_bshd(device: torch.device) -> None:
    tensors = inputs(device)
    generator, seed = seeded(device, 11)
    swapped = [tensor.transpose(1, 2) for tensor in tensors]
    attention = flexgen.compile(None, causal, {"layout": "bshd"})
    out, aux = attention(*swapped, return_aux=AUX, dropout_p=0.3, generator=generator)
    found = results(out.transpose(1, 2), aux.lse, tensors)
    for one, other in zip(found, results(*dense_with_dropout(*tensors, 0.3, seed, None, causal), tensors), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=2e-4, atol=2e-4 * scale_of(other))


def test_statistics_are_those_without_dropout(device: torch.device) -> None:
    tensors = inputs(device)
    attention = flexgen.compile(softcap, window_with_empty_rows, {"BACKEND": "TRITON"})
    out, aux = attention(*tensors, return_aux=AUX, dropout_p=0.6)
    plain, plain_aux = attention(*tensors, return_aux=AUX)
    assert torch.equal(aux.lse, plain_aux.lse) and torch.equal(aux.max_scores, plain_aux.max_scores)
    assert not torch.equal(out, plain)
    assert not out[:, :, 3::7].any()  # rows without a live key


def test_everything_dropped_gives_zeros(device: torch.device) -> None:
    tensors = inputs(device)
    attention = flexgen.compile(None, causal)
    out, aux = attention(*tensors, return_aux=AUX, dropout_p=1)
    grads = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert not out.any() and not any(grad.any() for grad in grads)
    expected = attention(*tensors, return_aux=AUX)[1].lse
    torch.testing.assert_close(aux.lse, expected)
    of_lse, of_expected = (torch.autograd.grad(lse.sum(), tensors[:2]) for lse in (aux.lse, expected))
    torch.testing.assert_close(of_lse, of_expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [1e-12, 0.5, 1 - 2**-40], ids=str)
def test_probabilities_near_the_ends(p: float) -> None:
    tensors = inputs(torch.device("cpu"), (1, 2, 1, 20, 33), dtype=torch.float64)
    check(tensors, None, causal, p=p)


def test_a_new_probability_compiles_nothing(device: torch.device) -> None:
    attention, tensors = flexgen.compile(None, causal), inputs(device)
    outs = [attention(*tensors, dropout_p=p) for p in (0.1, 0.2, 0.7)]
    for out in outs:
        out.sum().backward()
    assert len(attention._kernels) == 1 and len(attention._training._kernels) == 1


def test_no_keys_and_no_queries(device: torch.device) -> None:
    for lengths in ((0, 5), (5, 0)):
        out = flexgen.compile()(*inputs(device, (1, 2, 2, *lengths)), dropout_p=0.5)
        assert out.shape == (1, 2, lengths[0], 16) and not out.any()

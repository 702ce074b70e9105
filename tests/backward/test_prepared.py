"""Backward calls after the first hand plain addresses to the launcher: nothing of the first call may stay in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import flexgen
from flexgen.runtime import kernel
from tests.addressed import Addressed

LENGTH, TILES = 70, dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "fwd_BLOCK_M", "fwd_BLOCK_N"), 32)


@pytest.fixture(autouse=True)
def addressed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    executor = kernel.executor
    monkeypatch.setattr(kernel, "executor", lambda *arguments: Addressed(executor(*arguments)))
    Addressed.bound_launches = 0
    yield
    assert Addressed.bound_launches > 0


def causal(b, h, q, k):
    return q >= k


def drawn(seed: int, *, heads_inside: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, LENGTH, 4, 16) if heads_inside else (2, 4, LENGTH, 16)
    made = [torch.randn(shape, generator=generator) for _ in range(4)]
    return [(tensor.transpose(1, 2) if heads_inside else tensor) for tensor in made]


def gradients(attention: Any, seed: int, captured: Sequence[torch.Tensor] = (), **call: Any) -> list[torch.Tensor]:
    """Return the gradients of a loss that depends on the output and on the logsumexp."""
    *inputs, weight = drawn(seed)
    for tensor in inputs:
        tensor.requires_grad_()
    out, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True), **call)
    loss = (out * weight).sum() + aux.lse[torch.isfinite(aux.lse)].sum()
    return list(torch.autograd.grad(loss, [*inputs, *captured]))


def check(make: Callable[[], tuple[Any, Sequence[torch.Tensor], dict[str, Any]]], change: Callable[..., None]) -> None:
    """Compare the gradients of repeated calls, with other values each time, with those of first calls."""
    attention, captured, call = make()
    for seed in range(3):
        change(seed, captured)
        found = gradients(attention, seed, captured, **call)
        fresh, same, fresh_call = make()
        change(seed, same)
        for one, other in zip(found, gradients(fresh, seed, same, **fresh_call), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def unchanged(seed: int, captured: Sequence[torch.Tensor]) -> None:
    pass


def refilled(seed: int, captured: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in captured:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed)))


def test_key_ranges() -> None:
    check(lambda: (flexgen.compile(None, causal, TILES), (), {}), unchanged)


@pytest.fixture(params=[False, True], ids=["usual", "deterministic"])
def deterministic(request) -> Iterator[None]:
    torch.use_deterministic_algorithms(request.param)
    yield
    torch.use_deterministic_algorithms(False)


def test_captured_tensors(deterministic: None) -> None:
    def make():
        bias, table = torch.zeros(4, requires_grad=True), torch.zeros(LENGTH, requires_grad=True)

        def mod(score, b, h, q, k):
            return score * torch.tanh(bias[h]) + table[k]

        return flexgen.compile(mod, causal, TILES), (bias, table), {}

    check(make, refilled)


def test_captured_numbers() -> None:
    class Softcap:
        cap = 1.5

        def __call__(self, score, b, h, q, k):
            return torch.tanh(score / self.cap) * self.cap

    mod = Softcap()
    attention = flexgen.compile(mod, causal, TILES)
    for cap in (1.5, 2.5, 3.5, 4.5):
        mod.cap = cap
        fixed = Softcap()
        fixed.cap = cap
        for one, other in zip(
            gradients(attention, 1), gradients(flexgen.compile(fixed, causal, TILES), 1), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def documents_of(document: torch.Tensor) -> Any:
    def mask(b, h, q, k):
        return (document[q] == document[k]) & (q >= k)

    return mask


def test_a_derived_table_is_that_of_the_call() -> None:
    def make():
        document = torch.zeros(LENGTH, dtype=torch.int32)
        return flexgen.compile(None, documents_of(document), TILES), (), {"document": document}

    attention, _, call = make()
    for seed in range(4):
        document = call["document"].copy_(torch.arange(LENGTH) // (10 + 7 * seed))
        fresh = flexgen.compile(None, documents_of(document.clone()), TILES)
        for one, other in zip(gradients(attention, seed), gradients(fresh, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_a_given_table_is_that_of_the_call() -> None:
    document = torch.zeros(LENGTH, dtype=torch.int32)
    attention = flexgen.compile(None, documents_of(document), TILES)
    for seed in range(3):
        document.copy_(torch.arange(LENGTH) // (10 + 7 * seed))
        query, key, *_ = drawn(seed)
        found = gradients(attention, seed, block_table=attention.block_table(query, key))
        fresh = flexgen.compile(None, documents_of(document.clone()), TILES)
        for one, other in zip(found, gradients(fresh, seed), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_columns", [True, False])
def test_a_block_mask_that_changes_in_place(by_columns: bool) -> None:
    lists = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=32)
    made = BlockMask.from_kv_blocks(
        lists.kv_num_blocks, lists.kv_indices, lists.full_kv_num_blocks, lists.full_kv_indices, 32, causal,
        (LENGTH, LENGTH), compute_q_blocks=by_columns,
    )  # fmt: skip
    attention = flexgen.compile(None, causal, {**TILES, "FORCE_USE_FLEX_ATTENTION": True})
    for seed in range(3):
        if not by_columns and seed == 2:
            made.full_kv_num_blocks.zero_()
        fresh = flexgen.compile(None, causal, {**TILES, "FORCE_USE_FLEX_ATTENTION": True})
        found = gradients(attention, seed, block_table=made)
        for one, other in zip(found, gradients(fresh, seed, block_table=made), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_packed_sequences_and_dropout() -> None:
    attention = flexgen.compile(None, causal, TILES)
    for seed, bounds in enumerate(([0, 30, 70], [0, 8, 70], [0, 69, 70])):
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        *inputs, weight = (tensor[:1].contiguous() for tensor in drawn(seed))
        results = []
        for each in (attention, flexgen.compile(None, causal, TILES)):
            for tensor in inputs:
                tensor.requires_grad_()
            torch.manual_seed(seed)
            out = each(*inputs, cu_seqlens_q=cu_seqlens, dropout_p=0.1 * (seed + 1))
            results.append(torch.autograd.grad((out * weight).sum(), inputs))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_other_strides_and_wants_are_other_forms() -> None:
    attention = flexgen.compile(None, causal, TILES)
    expected = gradients(attention, 0)
    for wanted in ([0], [1, 2], [0, 1, 2]):
        for heads_inside in (False, True, False):
            *inputs, weight = drawn(0)
            inputs = [
                tensor.transpose(1, 2).contiguous().transpose(1, 2) if heads_inside else tensor for tensor in inputs
            ]
            for place in wanted:
                inputs[place].requires_grad_()
            out, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True))
            loss = (out * weight).sum() + aux.lse.sum()
            found = torch.autograd.grad(loss, [inputs[place] for place in wanted])
            for place, one in zip(wanted, found, strict=True):
                torch.testing.assert_close(one, expected[place], rtol=1e-5, atol=1e-5)

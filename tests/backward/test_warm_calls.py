"""Training steps after the first: nothing of an earlier one may stay in them; what is unusual takes the usual way."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen import training
from flexgen.prepared_backward import PreparedBackward
from flexgen.runtime import kernel
from tests.addressed import Addressed
from tests.reference import dense_attention

SHAPE = (2, 4, 40, 16)


@pytest.fixture(autouse=True)
def addressed(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = kernel.executor
    monkeypatch.setattr(kernel, "executor", lambda *arguments: Addressed(executor(*arguments)))


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many forwards and backwards took the usual way."""
    counts = {"forward": 0, "backward": 0}

    def counted(kind, function):
        def call(*args, **kwargs):
            counts[kind] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(flexgen.Attention, "run", counted("forward", flexgen.Attention.run))
    monkeypatch.setattr(PreparedBackward, "run", counted("backward", PreparedBackward.run))
    return counts


def drawn(seed: int, shape=SHAPE, needs=(True, True, True)) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).requires_grad_(need) for need in needs]


def check(attention, inputs, captured=(), score_mod=None, mask=None) -> None:
    """Compare output and gradients, of a random direction, with dense attention."""
    output = attention(*inputs)
    grad = torch.randn_like(output)
    leaves = [tensor for tensor in (*inputs, *captured) if tensor.requires_grad]
    found = torch.autograd.grad(output, leaves, grad)
    expected = dense_attention(*inputs, score_mod, mask).out
    wanted = torch.autograd.grad(expected, leaves, grad.to(expected.dtype))
    torch.testing.assert_close(output.double(), expected.double(), rtol=0, atol=1e-5)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def test_only_the_first_step_takes_the_usual_way(usual):
    attention = flexgen.compile(None, causal)
    for seed in range(4):
        check(attention, drawn(seed), mask=causal)
    assert usual == {"forward": 1, "backward": 1}


def test_captured_tensors_and_numbers_are_read_again(usual):
    slopes, offset = torch.rand(4).requires_grad_(), 0

    def biased(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def shifted(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx + offset

    attention = flexgen.compile(biased, shifted)
    for offset in range(3, 9):
        slopes = torch.rand(4).requires_grad_()
        check(attention, drawn(offset), [slopes], biased, shifted)
    assert usual == {"forward": 2, "backward": 2}, "the offset is a constant first, then an argument"


def test_gradients_of_captured_tensors_start_at_zero_each_time(usual):
    table = torch.rand(80).requires_grad_()

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 40]

    attention = flexgen.compile(relative)
    for seed in range(3):
        check(attention, drawn(seed), [table], relative)
    assert usual == {"forward": 1, "backward": 1}


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True), (False, False, True)])
def test_what_is_wanted_is_part_of_the_form(needs, usual):
    attention = flexgen.compile(None, causal)
    for seed in range(3):
        check(attention, drawn(seed), mask=causal)
        check(attention, drawn(seed, needs=needs), mask=causal)
    assert usual["backward"] == 6, "forms that alternate"


def test_layouts_of_the_gradient_are_part_of_the_form(usual):
    attention = flexgen.compile()
    inputs = drawn(0)
    for _ in range(2):
        output = attention(*inputs)
        plain, moved = torch.randn(SHAPE), torch.randn(2, 40, 4, 16).transpose(1, 2)
        for grad in (plain, moved, plain[:1].expand(SHAPE), torch.randn(SHAPE[0] * 2560 + 1)[1:].view(SHAPE)):
            found = torch.autograd.grad(output, inputs, grad, retain_graph=True)
            wanted = torch.autograd.grad(dense_attention(*inputs).out, inputs, grad.double())
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)


def test_gradients_through_the_logsumexp_take_the_usual_way(usual):
    attention = flexgen.compile(None, causal)
    for seed in range(2):
        check(attention, drawn(seed), mask=causal)
        inputs = drawn(seed)
        output, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True))
        found = torch.autograd.grad(output.sum() + aux.lse.sum(), inputs)
        dense = dense_attention(*inputs, None, causal)
        wanted = torch.autograd.grad(dense.out.sum() + dense.lse.sum(), inputs)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)


def test_heads_inside_stay_inside_of_gradients(usual):
    attention = flexgen.compile()
    for seed in range(3):
        base = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in drawn(seed)]
        check(attention, [tensor.transpose(1, 2) for tensor in base])
        output = attention(*[tensor.transpose(1, 2) for tensor in base])
        for grad in torch.autograd.grad(output.sum(), base):
            assert grad.is_contiguous()
    assert usual["forward"] == 1


def test_derived_tables_follow_what_the_mask_captured(usual):
    """The lists come with each call: of the present documents, whether they changed in place or are others."""
    document = torch.arange(600, dtype=torch.int32) // 100

    def same(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    attention = flexgen.compile(None, same, {"BLOCK_M": 64, "BLOCK_N": 64})
    shape = (1, 1, 600, 16)
    for step in range(4):
        with torch.no_grad():
            inputs = drawn(step, shape)
            expected = dense_attention(*inputs, None, same).out
            torch.testing.assert_close(attention(*inputs).double(), expected, rtol=0, atol=1e-5)
        check(attention, drawn(step, shape), mask=same)
        if step % 2:
            document = (torch.arange(600, dtype=torch.int32) + 37 * step) // 90
        else:
            document.copy_(torch.arange(600, dtype=torch.int32) // (70 + step))
    assert attention._prepared[next(iter(attention._prepared))].request is not None, "a table is derived"
    assert usual == {"forward": 2, "backward": 1}, "the first with gradients, and the first without"


def test_deterministic_sums_take_the_usual_way(usual):
    table = torch.rand(80).requires_grad_()

    def relative(score, b, h, q_idx, kv_idx):
        return score + table[q_idx - kv_idx + 40]

    attention = flexgen.compile(relative)
    check(attention, drawn(0), [table], relative)
    torch.use_deterministic_algorithms(True)
    try:
        for seed in range(2):
            check(attention, drawn(seed), [table], relative)
    finally:
        torch.use_deterministic_algorithms(False)
    assert usual["backward"] == 3


def test_saved_tensor_hooks_and_checkpoints_are_honoured():
    attention = flexgen.compile(None, causal)
    for seed in range(3):
        inputs = drawn(seed)
        output = torch.utils.checkpoint.checkpoint(attention, *inputs, use_reentrant=False)
        found = torch.autograd.grad(output.sum(), inputs)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            hooked = torch.autograd.grad(attention(*inputs).sum(), inputs)
        wanted = torch.autograd.grad(dense_attention(*inputs, None, causal).out.sum(), inputs)
        for one, two, other in zip(found, hooked, wanted, strict=True):
            torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=1e-4)
            torch.testing.assert_close(two, one)


def test_a_form_is_kept_in_bounds(monkeypatch):
    monkeypatch.setattr(training, "MAX_FORMS", 2)
    attention = flexgen.compile()
    output = attention(*(inputs := drawn(0)))
    for names in ((0,), (1,), (2,), (0, 1)):
        torch.autograd.grad(output.sum(), [inputs[name] for name in names], retain_graph=True)

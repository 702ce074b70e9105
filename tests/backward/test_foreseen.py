"""The kernels that are compiled ahead, while the forward is, are those that the gradients then take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexgen
from flexgen.aux_outputs import AuxRequest
from flexgen.training import Training

LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a sum, whose gradient repeats one number": lambda output: output.sum(),
    "a product": lambda output: (output * torch.ones_like(output)).sum(),
    "heads beside columns, as models have them": lambda output: (
        (found := output.transpose(1, 2).reshape(1, 64, 32)) @ found.mT
    ).sum(),
}


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


@pytest.fixture(autouse=True)
def foreseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is foreseen on a GPU, foreseen on the CPU; nothing is started."""

    def foresee(self: flexgen.Attention, prepared: Any, call: Any, trained: AuxRequest) -> None:
        self._training.compile_ahead(prepared.basis, call.launch, trained.lse)

    monkeypatch.setattr(flexgen.Attention, "_foresee_gradients", foresee)
    monkeypatch.setattr("flexgen.training.AHEAD.start", lambda jobs: None)


def kernels(training: Training) -> int:
    return len(training._kernels)


def inputs(requires_grad: tuple[bool, bool, bool] = (True, True, True)) -> list[torch.Tensor]:
    return [torch.randn(1, 2, 64, 16).requires_grad_(needed) for needed in requires_grad]


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_the_form_of_the_gradient(loss: str):
    attention = flexgen.compile(None, causal)
    output = attention(*inputs())
    assert kernels(attention._training) == 1
    LOSSES[loss](output).backward()
    assert kernels(attention._training) == 1


def test_gradients_of_some_inputs():
    attention = flexgen.compile(None, causal)
    attention(*inputs((False, True, False))).sum().backward()
    assert kernels(attention._training) == 1


def test_gradients_of_captured_tensors():
    bias = torch.randn(2, requires_grad=True)
    attention = flexgen.compile(lambda score, b, h, q_idx, kv_idx: score + bias[h], causal)
    attention(*inputs()).sum().backward()
    assert kernels(attention._training) == 1 and bias.grad is not None


def test_kernels_that_walk_derived_tables():
    document = torch.arange(64) // 16
    attention = flexgen.compile(None, lambda b, h, q_idx, kv_idx: document[q_idx] == document[kv_idx])
    attention(*inputs()).sum().backward()
    assert kernels(attention._training) == 1


def test_a_loss_that_reads_the_logsumexp_where_it_is_asked_for():
    attention = flexgen.compile(None, causal)
    output, aux = attention(*inputs(), return_aux=AuxRequest(lse=True))
    (output.sum() + aux.lse.sum()).backward()
    assert kernels(attention._training) == 1


def test_a_wrong_guess_costs_kernels_and_nothing_else():
    attention = flexgen.compile(None, causal)
    tensors = inputs()
    output, _ = attention(*tensors, return_aux=AuxRequest(lse=True))
    output.sum().backward()
    assert kernels(attention._training) == 2
    plain = [tensor.detach().requires_grad_() for tensor in tensors]
    torch.nn.functional.scaled_dot_product_attention(*plain, is_causal=True).sum().backward()
    for ours, theirs in zip(tensors, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4)

"""A captured number that changes at every call does not make every call a new form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexgen
from flexgen import attention as attention_module
from flexgen.ir.graph import input_node, make
from flexgen.lowering.host_value import all_hold
from tests.reference import dense_attention


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every launch that is prepared."""
    made: list[object] = []

    class Counted(attention_module.Prepared):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            made.append(self)
            super().__init__(*arguments, **named)

    monkeypatch.setattr(attention_module, "Prepared", Counted)
    return made


class Offset:
    """Queries that stand `offset` behind the first key."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __call__(self, b, h, q, k):
        return q + self.offset >= k


def draw() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, length, 16, generator=generator) for length in (5, 40, 40)]


def test_calls_with_other_numbers_are_of_one_form(prepared: list[object]) -> None:
    mask = Offset(3)
    attention, inputs = flexgen.compile(None, mask), draw()
    for offset in range(3, 30):
        mask.offset = offset
        torch.testing.assert_close(attention(*inputs), dense_attention(*inputs, mask_mod=Offset(offset)).out.float())
    assert len(prepared) <= 2  # the first number was a constant


def test_a_number_that_breaks_a_proof_is_another_form(prepared: list[object]) -> None:
    """With a negative offset the first rows have no live key: a kernel that relies on one would give NaN."""
    mask = Offset(3)
    attention, inputs = flexgen.compile(None, mask), draw()
    for offset in (3, 4, -2, 5, -3, -1, 6):
        mask.offset = offset
        torch.testing.assert_close(attention(*inputs), dense_attention(*inputs, mask_mod=Offset(offset)).out.float())
    assert len(prepared) <= 3


def test_conditions_that_the_host_cannot_evaluate_do_not_hold() -> None:
    q_len, zero = input_node("Q_LEN"), make("const", attr=0, dtype=torch.int64)
    known = make("ge", q_len, zero, dtype=torch.bool)
    divided = make("ge", make("floordiv", q_len, zero, dtype=torch.int64), zero, dtype=torch.bool)
    assert all_hold([known], {"Q_LEN": 4})
    assert not all_hold([known], {})
    assert not all_hold([divided], {"Q_LEN": 4})
    assert not all_hold([known, make("ge", zero, q_len, dtype=torch.bool)], {"Q_LEN": 4})

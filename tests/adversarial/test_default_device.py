"""A default device of torch is for the tensors that a program makes; flexgen computes where the call's tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import flexgen

QUERY, KEY, VALUE = torch.randn(3, 1, 2, 70, 16)
DOCUMENT = torch.arange(70) // 13
BIAS = torch.randn(70)
LENGTHS, OFFSETS, SCALES = torch.tensor([33]), torch.tensor([0, 30, 30, 70]), torch.ones(2)


def documents(b, h, q_idx, kv_idx):
    return DOCUMENT[q_idx] == DOCUMENT[kv_idx]


def early(b, h, q_idx, kv_idx):
    return kv_idx.float() <= 40.5


def biased(score, b, h, q_idx, kv_idx):
    return score + BIAS[kv_idx] * torch.where(q_idx > kv_idx, 1.0, 0.5)


def trained(attention: flexgen.Attention) -> list[torch.Tensor]:
    inputs = [tensor.clone().requires_grad_() for tensor in (QUERY, KEY, VALUE)]
    output = attention(*inputs)
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), inputs)]


def with_block_mask() -> torch.Tensor:
    mask = flexgen.create_block_mask(documents, 1, 1, 70, 70, device="cpu", BLOCK_SIZE=16)
    return flexgen.flex_attention(QUERY, KEY, VALUE, block_mask=mask)


def with_table() -> torch.Tensor:
    attention = flexgen.compile(None, documents)
    return attention(QUERY, KEY, VALUE, block_table=attention.block_table(QUERY, KEY), validate=True)


def decoded() -> torch.Tensor:
    return flexgen.compile()(QUERY[:, :, :1], KEY, VALUE, kv_lengths=LENGTHS, v_scale=SCALES, validate=True)


CALLS: dict[str, Callable[[], Any]] = {
    "a bias": lambda: trained(flexgen.compile(biased)),
    "a bound from a float": lambda: trained(flexgen.compile(None, early)),
    "a derived table": lambda: trained(flexgen.compile(None, documents)),
    "a table asked for": with_table,
    "a block mask": with_block_mask,
    "decoding": decoded,
    "packed sequences": lambda: flexgen.compile()(QUERY, KEY, VALUE, cu_seqlens_q=OFFSETS, validate=True),
    "dropout of everything": lambda: flexgen.compile()(QUERY, KEY, VALUE, dropout_p=1.0),
    "sinks": lambda: flexgen.compile()(QUERY, KEY, VALUE, sinks=SCALES),
    "a mask": lambda: flexgen.create_mask(documents, 1, 1, 70, 70, device="cpu"),
}


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("name", CALLS)
def test_calls_do_not_depend_on_the_default_device(name: str) -> None:
    with default_device("meta"):  # first, so that nothing is at hand
        found = CALLS[name]()
    torch.testing.assert_close(found, CALLS[name](), rtol=0, atol=0)

"""Calls that are wrong: each must be refused with flexgen's own error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

import flexgen
from flexgen.errors import FlexgenError, InternalError, UnsupportedProblemError

QUERY = torch.randn(1, 1, 20, 16)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e300, -3e38, 10**400, "1", 1j, torch.tensor(0.5), True])
def test_scale_that_is_no_finite_number_is_refused(scale: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(QUERY, QUERY, QUERY, scale=scale)


@pytest.mark.parametrize(
    "keywords",
    [
        {"kernel_options": {"BLOCK_MM": 64}},
        {"kernel_options": [1]},
        {"kernel_options": {"BLOCK_M": [64]}},
        {"kernel_options": {"BLOCK_M": 64, 3: 4}},
        {"block_mask": "causal"},
        {"block_mask": torch.ones(20, 20)},
    ],
)
def test_drop_in_refuses_malformed_keywords(keywords: dict[str, Any]) -> None:
    with pytest.raises(FlexgenError):
        flexgen.flex_attention(QUERY, QUERY, QUERY, **keywords)


@pytest.mark.parametrize("query", [None, QUERY.numpy(), QUERY[0], QUERY.to_sparse()])
def test_query_that_is_no_dense_tensor_is_refused(query: Any) -> None:
    with pytest.raises(FlexgenError):
        flexgen.compile()(query, QUERY, QUERY)


class Wrapper(torch.Tensor):
    """A tensor without data, which computes with another one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapper, lambda it: it.inner, (args, kwargs or {}))
        return func(*args, **kwargs)


WRAPPED: dict[str, Any] = {
    "kv_lengths": torch.tensor([3]),
    "k_scale": torch.ones(1),
    "cu_seqlens_q": torch.tensor([0, 20]),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapper_of_a_tensor_that_kernels_read_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedProblemError, match=f"{name} is of Wrapper"):
        flexgen.compile()(QUERY, QUERY, QUERY, **{name: Wrapper(WRAPPED[name])})


def test_captured_wrapper_is_refused_also_where_a_tensor_was_captured() -> None:
    table = plain = torch.randn(20)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[q] * table[k])
    for _ in range(3):
        right = attention(QUERY, QUERY, QUERY)
    table = Wrapper(plain)
    with pytest.raises(UnsupportedProblemError, match="captured tensor is of Wrapper"):
        attention(QUERY, QUERY, QUERY)
    # where the query is a wrapper too, its class says how to compute
    torch.testing.assert_close(attention(Wrapper(QUERY), QUERY, QUERY), right)


def test_wrapped_query_is_computed_by_its_class() -> None:
    attention = flexgen.compile()
    torch.testing.assert_close(attention(QUERY, QUERY, Wrapper(QUERY)), attention(QUERY, QUERY, QUERY))


def test_constant_below_the_normal_numbers_runs() -> None:
    output = flexgen.compile(lambda s, b, h, q, k: s.clamp(min=1e-40))(QUERY, QUERY, QUERY)
    right = (QUERY @ QUERY.mT / 4).clamp(min=1e-40).softmax(-1) @ QUERY
    assert torch.allclose(output, right, atol=1e-5)


@pytest.mark.parametrize("scale", [2.3e38, -2.3e38, 1.2e-38, 1e-45])
def test_largest_and_smallest_scales_give_no_nan(scale: float) -> None:
    small = QUERY * 1e-3  # so that scores are finite
    assert not flexgen.compile()(small * 1e-35, small, QUERY, scale=scale).isnan().any()
    assert not flexgen.compile(lambda s, b, h, q, k: s / 3e35)(small, small, QUERY, scale=scale).isnan().any()


MASKS = {
    "a mod that is a text": lambda: flexgen.create_block_mask("causal", 1, 1, 4, 4, device="cpu"),
    "a negative length": lambda: flexgen.create_block_mask(causal, 1, 1, -4, 4, device="cpu"),
    "half a length": lambda: flexgen.create_block_mask(causal, 1, 1, 4.5, 4, device="cpu"),
    "a batch that is a text": lambda: flexgen.create_block_mask(causal, "1", 1, 4, 4, device="cpu"),
    "blocks of nothing": lambda: flexgen.create_block_mask(causal, 1, 1, 4, 4, device="cpu", BLOCK_SIZE=0),
    "blocks that are a text": lambda: flexgen.create_block_mask(causal, 1, 1, 4, 4, device="cpu", BLOCK_SIZE="a"),
    "a device there is not": lambda: flexgen.create_block_mask(causal, 1, 1, 4, 4, device="abacus"),
    "a device that is a list": lambda: flexgen.create_block_mask(causal, 1, 1, 4, 4, device=["cpu"]),
    "a mask of a number": lambda: flexgen.create_mask(3, 1, 1, 4, 4, device="cpu"),
    "a conjunction of a number": lambda: flexgen.and_masks(3),
    "a table of numbers": lambda: flexgen.compile(None, causal).block_table(1, 2),
    "room for less than nothing": lambda: flexgen.compile(None, causal).block_table(QUERY, QUERY, max_blocks=-1),
    "an unknown target": lambda: flexgen.compile().lower(QUERY, QUERY, QUERY, target="sm_12"),
    "a target that is a number": lambda: flexgen.compile().lower(QUERY, QUERY, QUERY, target=90),
}


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


@pytest.mark.parametrize("name", MASKS)
def test_public_functions_refuse_what_they_cannot_take(name: str) -> None:
    with pytest.raises(FlexgenError):
        MASKS[name]()


INT = torch.int32
CALLS: dict[str, dict[str, Any]] = {
    "aux that is a text": {"return_aux": "lse"},
    "aux that is a truth": {"return_aux": True},
    "a table that is a number": {"block_table": 3},
    "lengths in a list": {"kv_lengths": [3]},
    "floating lengths": {"kv_lengths": torch.tensor([3.0])},
    "lengths of two": {"kv_lengths": torch.tensor([3, 4], dtype=INT)},
    "lengths past the end": {"kv_lengths": torch.tensor([30], dtype=INT), "validate": True},
    "pages without lengths": {"page_table": torch.zeros(1, 1, dtype=INT)},
    "offsets past the end": {"cu_seqlens_q": torch.tensor([0, 30], dtype=INT), "validate": True},
    "offsets that decrease": {"cu_seqlens_q": torch.tensor([0, 12, 5, 20], dtype=INT), "validate": True},
    "offsets from elsewhere": {"cu_seqlens_q": torch.tensor([3, 20], dtype=INT), "validate": True},
    "no offsets": {"cu_seqlens_q": torch.tensor([], dtype=INT)},
    "offsets of keys alone": {"cu_seqlens_k": torch.tensor([0, 20], dtype=INT)},
    "sinks of five heads": {"sinks": torch.zeros(5)},
    "sinks in a list": {"sinks": [1.0]},
    "a probability above 1": {"dropout_p": 1.5},
    "no probability": {"dropout_p": float("nan")},
    "a probability that is a text": {"dropout_p": "0.1"},
    "a generator that is a number": {"dropout_p": 0.1, "generator": 3},
    "a scale of keys that is none": {"k_scale": float("nan")},
    "an infinite scale of values": {"v_scale": float("inf")},
    "scales whose product is too large": {"k_scale": 1e38, "scale": 1e10},
    "a scale of values that is a text": {"v_scale": "a"},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_refuse_what_they_cannot_take(name: str) -> None:
    with pytest.raises(FlexgenError) as refusal:
        flexgen.compile()(QUERY, QUERY, QUERY, **CALLS[name])
    assert not isinstance(refusal.value, InternalError)


TENSORS: dict[str, tuple[Any, Any, Any]] = {
    "a key without heads": (QUERY, QUERY[0], QUERY),
    "values of other keys": (QUERY, QUERY, QUERY[:, :, :5]),
    "other head dims": (QUERY, QUERY[..., :8], QUERY),
    "integers": (QUERY.int(), QUERY.int(), QUERY.int()),
    "complex numbers": (QUERY + 0j, QUERY + 0j, QUERY + 0j),
    "two dtypes": (QUERY, QUERY.half(), QUERY),
    "three batches": (QUERY, torch.zeros(3, 1, 20, 16), torch.zeros(3, 1, 20, 16)),
    "heads that cannot be shared": (torch.zeros(1, 3, 20, 16), torch.zeros(1, 2, 20, 16), torch.zeros(1, 2, 20, 16)),
    "no head dim": (QUERY[..., :0], QUERY[..., :0], QUERY),
    "no head dim of values": (QUERY, QUERY, QUERY[..., :0]),
    "a head dim of a thousand": (torch.zeros(1, 1, 4, 1000),) * 3,
    "two devices": (QUERY, QUERY.to("meta"), QUERY),
    "quantised values": (QUERY, QUERY, torch.quantize_per_tensor(QUERY, 0.1, 0, torch.quint8)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_form_no_attention_are_refused(name: str) -> None:
    with pytest.raises(FlexgenError) as refusal:
        flexgen.compile()(*TENSORS[name])
    assert not isinstance(refusal.value, InternalError)


OPTIONS: dict[str, Any] = {
    "a text": "BLOCK_M",
    "a name that is none": {None: 1},
    "a list": {"BLOCK_M": [64]},
    "not a number": {"BLOCK_M": float("nan")},
    "a huge number": {"BLOCK_M": 2**70},
    "a negative number": {"num_warps": -4},
    "a truth for a number": {"num_stages": True},
    "another layout": {"layout": "hbsd"},
    "another backend": {"BACKEND": "CUDNN"},
    "lower case": {"block_m": 64},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(flexgen.OptionError):
        flexgen.compile(None, None, OPTIONS[name])


RETURNED: dict[str, Any] = {
    "nothing": lambda b, h, q, k: None,
    "a pair": lambda b, h, q, k: (q > k,),
    "three of them": lambda b, h, q, k: torch.ones(3) > 0,
    "numbers": lambda b, h, q, k: q * 1.0,
    "a generator": lambda b, h, q, k: (yield q > k),
    "an error": lambda b, h, q, k: {}["x"],
    "an endless recursion": lambda b, h, q, k: endless(q),
    "two arguments": lambda b, h: b > h,
    "an item": lambda b, h, q, k: q.item() > 0,
    "an array": lambda b, h, q, k: q.numpy() > 0,
    "a random number": lambda b, h, q, k: torch.rand(()) > 0.5,
    "what is printed": lambda b, h, q, k: f"{q}" == "3",
}


def endless(value: Any) -> Any:
    return endless(value + 1)


@pytest.mark.parametrize("name", RETURNED)
def test_masks_that_return_no_condition_are_refused(name: str) -> None:
    with pytest.raises(flexgen.CaptureError):
        flexgen.compile(None, RETURNED[name])(QUERY, QUERY, QUERY)

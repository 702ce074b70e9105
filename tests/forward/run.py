"""Run flexgen's forward on one problem and hold its outputs against float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from tests.corpus.case import Shape
from tests.reference import (
    Dense,
    assert_near,
    dense_attention,
    eager_attention,
    output_tolerance,
    statistics_tolerance,
)

Mod = Callable[..., Tensor]
EVERYTHING = flexgen.AuxRequest(lse=True, max_scores=True)


@dataclass(frozen=True, slots=True)
class Inputs:
    """query [B, Hq, Lq, Dqk], key [B, Hkv, Lk, Dqk] and value [B, Hkv, Lk, Dv]."""

    query: Tensor
    key: Tensor
    value: Tensor

    def __iter__(self):
        return iter((self.query, self.key, self.value))


def random_inputs(
    shape: Shape,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    head_dim: int = 16,
    v_head_dim: int | None = None,
    seed: int = 0,
    spread: float = 1.0,
) -> Inputs:
    """Return inputs from N(0, spread), the same values on every device."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * spread).to(device, dtype)

    v_head_dim = head_dim if v_head_dim is None else v_head_dim
    return Inputs(
        draw(shape.B, shape.Hq, shape.Lq, head_dim),
        draw(shape.B, shape.Hkv, shape.Lk, head_dim),
        draw(shape.B, shape.Hkv, shape.Lk, v_head_dim),
    )


def square(length: int, *, batch: int = 1, heads: int = 1) -> Shape:
    return Shape(batch, heads, heads, length, length)


def assert_output(inputs: Inputs, out: Tensor, dense: Dense, eager: Tensor) -> None:
    """Check shape, dtype and values of an output against float64 and the error of eager mode in its dtype."""
    assert out.dtype == inputs.query.dtype
    assert_near("out", out, dense.out, output_tolerance(out.dtype, dense.out, eager))


def assert_statistics(inputs: Inputs, aux: Any, dense: Dense, factor: float = 1.0) -> None:
    """Check lse and max_scores, natural logarithm, -inf for rows without a finite score."""
    dtype = inputs.query.dtype
    assert_near("lse", aux.lse, dense.lse, factor * statistics_tolerance(dtype, dense.lse))
    assert_near("max_scores", aux.max_scores, dense.max_scores, factor * statistics_tolerance(dtype, dense.max_scores))


def check_forward(
    inputs: Inputs,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    scale: float | None = None,
    options: Mapping[str, Any] | None = None,
    attention: flexgen.Attention | None = None,
    statistics_factor: float = 1.0,
) -> Tensor:
    """Run compile(...)(...) with every output, check all of them, and return the output.

    `attention` runs an already compiled one; `statistics_factor` loosens lse and max_scores for options that trade
    their accuracy away.
    """
    attention = attention or flexgen.compile(score_mod, mask_mod, options)
    out, aux = attention(*inputs, scale=scale, return_aux=EVERYTHING)
    dense = dense_attention(*inputs, score_mod, mask_mod, scale)
    assert_output(inputs, out, dense, eager_attention(*inputs, score_mod, mask_mod, scale))
    assert_statistics(inputs, aux, dense, statistics_factor)
    return out


def check_block_mask(
    inputs: Inputs,
    block_mask: Any,
    score_mod: Mod | None = None,
    *,
    kernel_options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run the drop-in with a BlockMask, check it against the meaning of torch's compiled kernels, return the output."""
    out, aux = flexgen.flex_attention(
        *inputs,
        score_mod=score_mod,
        block_mask=block_mask,
        enable_gqa=True,
        kernel_options=kernel_options,
        return_aux=EVERYTHING,
    )
    dense = dense_attention(*inputs, score_mod, block_mask=block_mask)
    assert_output(inputs, out, dense, eager_attention(*inputs, score_mod, block_mask=block_mask))
    assert_statistics(inputs, aux, dense)
    return out


def refusal(call: Callable[[], object], kind: type[Exception], *mentions: str) -> flexgen.FlexgenError:
    """Expect `call` to raise a flexgen error of `kind` whose text names each of `mentions`; return the error."""
    with pytest.raises(kind) as raised:
        call()
    error = raised.value
    assert isinstance(error, flexgen.FlexgenError)
    text = str(error)
    missing = [mention for mention in mentions if mention not in text]
    assert not missing, f"the message names none of {missing}:\n{text}"
    return error

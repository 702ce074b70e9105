"""Run flexgen on packed sequences and hold every output and gradient against a loop over the sequences in float64."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexgen
from tests.backward.run import Found, Learned, fixed, gradients, leaf, loss_of, narrowest
from tests.forward.run import EVERYTHING, Mod
from tests.reference import (
    Dense,
    assert_near,
    dense_attention,
    eager_attention,
    largest_error,
    magnitude,
    output_tolerance,
    statistics_tolerance,
)

SMALL_TILES = {"BLOCK_M": 16, "BLOCK_N": 16, "bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16}
SMALL_TILES |= {"bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16}


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed query [1, Hq, Tq, D], key and value [1, Hkv, Tk, D], and the offsets of their sequences."""

    query: Tensor
    key: Tensor
    value: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def offsets(self) -> dict[str, Tensor]:
        keys = {} if self.cu_seqlens_k is None else {"cu_seqlens_k": self.cu_seqlens_k}
        return {"cu_seqlens_q": self.cu_seqlens_q, **keys}

    def slices(self) -> list[tuple[slice, slice]]:
        """Return the queries and the keys of each sequence."""
        keys = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        ends = zip(self.cu_seqlens_q.tolist(), keys.tolist(), strict=True)
        return [(slice(q, q_end), slice(k, k_end)) for (q, k), (q_end, k_end) in itertools.pairwise(ends)]


def offsets_of(lengths: Sequence[int], device: Any = "cpu", dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, dtype)


def pack(
    q_lengths: Sequence[int],
    kv_lengths: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (2, 2),
    head_dim: int = 16,
    v_head_dim: int | None = None,
    unused: int = 0,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    device: Any = "cpu",
    grad: bool = True,
    seed: int = 0,
) -> Packed:
    """Return random packed tensors, the same values on every device.

    Args:
        kv_lengths: lengths of the keys, where they are not the queries'.
        heads: query heads and key heads.
        unused: tokens behind the last sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int, lengths: Sequence[int], size: int) -> Tensor:
        made = torch.randn(1, count, sum(lengths) + unused, size, generator=generator).to(device, dtype)
        return leaf(made) if grad else made

    of_keys = q_lengths if kv_lengths is None else kv_lengths
    return Packed(
        draw(heads[0], q_lengths, head_dim),
        draw(heads[1], of_keys, head_dim),
        draw(heads[1], of_keys, head_dim if v_head_dim is None else v_head_dim),
        offsets_of(q_lengths, device, index_dtype),
        None if kv_lengths is None else offsets_of(kv_lengths, device, index_dtype),
    )


def of_sequence(mod: Mod | None, number: int, leading: int) -> Mod | None:
    """Return a mod as it is for one sequence: b, which is 0 in a batch of its own, is the sequence's number."""
    if mod is None:
        return None
    return lambda *args: mod(*args[:leading], args[leading] + number, *args[leading + 1 :])


def in_a_loop(packed: Packed, score: Mod | None, mask: Mod | None, scale: float | None = None) -> Dense:
    """Return attention in float64 of one sequence after the other; 0 and -inf behind the last one."""
    rows = packed.query.shape[:3]
    out = torch.zeros(*rows, packed.value.shape[3], dtype=torch.float64, device=packed.query.device)
    lse, most = (torch.full(rows, -torch.inf, dtype=torch.float64, device=out.device) for _ in range(2))
    for number, (q, kv) in enumerate(packed.slices()):
        tensors = (packed.query[:, :, q], packed.key[:, :, kv], packed.value[:, :, kv])
        dense = dense_attention(*tensors, of_sequence(score, number, 1), of_sequence(mask, number, 0), scale)
        out[:, :, q], lse[:, :, q], most[:, :, q] = dense.out, dense.lse, dense.max_scores
    return Dense(out, lse, most)


def eagerly(packed: Packed, score: Mod | None, mask: Mod | None, scale: float | None, *, rounded: bool) -> Tensor:
    """Return what eager mode computes in the tensors' dtype, sequence after sequence."""
    out = packed.query.new_zeros(*packed.query.shape[:3], packed.value.shape[3])
    for number, (q, kv) in enumerate(packed.slices()):
        tensors = (packed.query[:, :, q], packed.key[:, :, kv], packed.value[:, :, kv])
        mods = (of_sequence(score, number, 1), of_sequence(mask, number, 0), scale)
        out[:, :, q] = eager_attention(*tensors, *mods, rounded_products=rounded)
    return out


def check_packed(
    packed: Packed,
    score: Learned | Found | Mod | None = None,
    mask: Mod | None = None,
    *,
    scale: float | None = None,
    options: Mapping[str, Any] | None = None,
    layout: str = "bhsd",
) -> flexgen.Attention:
    """Check every output, and every gradient that the tensors ask for; return what computed them."""
    score = score if isinstance(score, Learned | Found) else fixed(score)
    attention = flexgen.compile(score.mod, mask, {**SMALL_TILES, **(options or {}), "layout": layout})
    given = [tensor if layout == "bhsd" else tensor.transpose(1, 2) for tensor in packed.tensors]
    out, aux = attention(*given, scale=scale, return_aux=EVERYTHING, **packed.offsets)
    out = out if layout == "bhsd" else out.transpose(1, 2)
    dtype = packed.query.dtype
    assert out.dtype == dtype
    exact = in_a_loop(packed, score.mod, mask, scale)
    eager = eagerly(packed, score.mod, mask, scale, rounded=False)
    assert_near("out", out, exact.out, output_tolerance(dtype, exact.out, eager))
    assert_near("lse", aux.lse, exact.lse, statistics_tolerance(dtype, exact.lse))
    assert_near("max_scores", aux.max_scores, exact.max_scores, statistics_tolerance(dtype, exact.max_scores))
    if packed.query.requires_grad or score.tensors:
        _check_gradients(packed, score, mask, scale, loss_of(out, aux.lse, dtype))
    return attention


def _check_gradients(
    packed: Packed, score: Learned | Found, mask: Mod | None, scale: float | None, loss: Tensor
) -> None:
    wanted = [*(tensor for tensor in packed.tensors if tensor.requires_grad), *score.tensors]
    names = ["query", "key", "value"][: len(wanted) - len(score.tensors)]
    names += [f"captured {number}" for number in range(len(score.tensors))]
    dtype = packed.query.dtype
    doubled = _cast(packed, torch.float64)
    precise = score.exact()
    dense = in_a_loop(doubled, precise.mod, mask, scale)
    leaves = [*_leaves(doubled), *precise.tensors]
    depends = sum(0.0 * leaf.double().sum() for leaf in leaves)  # also where no sequence has a live key
    exact = gradients(loss_of(dense.out, dense.lse, dtype) + depends, leaves)
    for number, (name, grad, expected) in enumerate(zip(names, gradients(loss, wanted), exact, strict=True)):
        kind = wanted[number].dtype
        assert grad.dtype == kind, f"gradient of {name} has dtype {grad.dtype}, not {kind}"
        bound = _bound(expected, narrowest(kind, dtype))
        if largest_error(grad, expected) > bound and dtype.itemsize < 4:
            narrow = _cast(packed, dtype)
            eager = loss_of(eagerly(narrow, score.mod, mask, scale, rounded=True), None, dtype)
            of_eager = gradients(eager, [*_leaves(narrow), *score.tensors])[number]
            bound = max(bound, 2.0 * (largest_error(of_eager, expected) + _bound(expected, dtype)))
        assert_near(f"gradient of {name}", grad, expected, bound)


def _bound(exact: Tensor, dtype: torch.dtype) -> float:
    factor = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, torch.finfo(dtype).eps)
    return factor * magnitude(exact)


def _cast(packed: Packed, dtype: torch.dtype) -> Packed:
    tensors = [t.detach().to(dtype, copy=True).requires_grad_(t.requires_grad) for t in packed.tensors]
    return Packed(*tensors, packed.cu_seqlens_q, packed.cu_seqlens_k)


def _leaves(packed: Packed) -> list[Tensor]:
    return [tensor for tensor in packed.tensors if tensor.requires_grad]

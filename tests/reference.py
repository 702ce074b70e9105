"""Dense attention from the user's own callables, evaluated as torch's eager mode does: what kernels are judged by."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode

Mod = Callable[..., Tensor]
MINUS_INFINITY = -float("inf")


@dataclass(frozen=True, slots=True)
class Dense:
    """The outputs of dense attention: out [B, Hq, Lq, Dv], lse and max_scores [B, Hq, Lq] (natural logarithm)."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


class _IndexByTensor(TorchFunctionMode):
    """Make `table[h]` a gather: under vmap a 0-d index tensor has no Python value to index with."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__getitem__:
            table, index = args
            indices = index if isinstance(index, tuple) else (index,)
            if all(isinstance(item, (Tensor, int)) for item in indices):
                return torch.ops.aten.index(table, [torch.as_tensor(item, device=table.device) for item in indices])
        return func(*args, **(kwargs or {}))


def _over_all_positions(mod: Mod, leading: int) -> Mod:
    """Map a mod of 0-d tensors over (b, h, q_idx, kv_idx); `leading` arguments before them go along."""
    before = (0,) * leading
    for axis in (3, 2, 1, 0):
        positions = tuple(0 if axis == position else None for position in range(4))
        mod = torch.vmap(mod, in_dims=before + positions)
    return mod


def evaluate_mask(mask_mod: Mod, sizes: tuple[int, int, int, int], device: torch.device | str = "cpu") -> Tensor:
    """Return bool[B, H, Lq, Lk]: the mask at every position."""
    positions = [torch.arange(size, device=device) for size in sizes]
    if 0 in sizes:
        return torch.zeros(sizes, dtype=torch.bool, device=device)
    with _IndexByTensor():
        mask = _over_all_positions(mask_mod, 0)(*positions)
    assert mask.dtype == torch.bool, f"a mask_mod must return bool, not {mask.dtype}"
    return mask


def evaluate_score(score_mod: Mod, scores: Tensor) -> Tensor:
    """Return the modified scores in the dtype of `scores` [B, H, Lq, Lk]; bool and int results are promoted."""
    if scores.numel() == 0:
        return scores
    positions = [torch.arange(size, device=scores.device) for size in scores.shape]
    with _IndexByTensor():
        return _over_all_positions(score_mod, 1)(scores, *positions).to(scores.dtype)


def listed_blocks(num_blocks: Tensor, indices: Tensor, lengths: tuple[int, int], sizes: tuple[int, int]) -> Tensor:
    """Return bool[Bm, Hm, Lq, Lk]: the positions inside the blocks that a block list names."""
    rows, columns = -(-lengths[0] // sizes[0]), -(-lengths[1] // sizes[1])
    listed = torch.zeros(*indices.shape[:2], rows, columns, dtype=torch.bool)
    for batch, head, row in torch.cartesian_prod(*(torch.arange(size) for size in listed.shape[:3])).tolist():
        for entry in range(int(num_blocks[batch, head, row])):
            listed[batch, head, row, int(indices[batch, head, row, entry])] = True
    dense = listed.repeat_interleave(sizes[0], dim=2).repeat_interleave(sizes[1], dim=3)
    return dense[:, :, : lengths[0], : lengths[1]].to(indices.device)


def evaluate_block_mask(block_mask: BlockMask, sizes: tuple[int, int, int, int]) -> Tensor:
    """Return bool[B, H, Lq, Lk] as torch's compiled kernels read a BlockMask.

    Only listed blocks are visited; mask_mod is applied in partial blocks and not in full ones.
    """
    lengths, block = sizes[2:], block_mask.BLOCK_SIZE
    partial = listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, lengths, block)
    live = partial & evaluate_mask(block_mask.mask_mod, sizes, partial.device)
    if block_mask.full_kv_num_blocks is not None:
        live = live | listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, lengths, block)
    return live


def _grouped(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat a key or value [B|1, Hkv, Lk, D] for the query heads of each group and expand its batch."""
    group = query.shape[1] // tensor.shape[1]
    return tensor.repeat_interleave(group, dim=1).expand(query.shape[0], -1, -1, -1)


def _product_in_dtype(query: Tensor, key: Tensor) -> Tensor:
    return (query @ _grouped(key, query).transpose(-2, -1)).float()


def _product(query: Tensor, key: Tensor) -> Tensor:
    return _product_in_dtype(query.float(), key.float())


def _modified_scores(
    products: Tensor, head_dim: int, score_mod: Mod | None, live: Tensor | None, scale: float | None
) -> Tensor:
    scores = products * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    scores = scores if score_mod is None else evaluate_score(score_mod, scores)
    return scores if live is None else torch.where(live, scores, MINUS_INFINITY)


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (weights, lse, max); a row without a finite score has weights 0 and -inf, and passes no gradient."""
    if scores.shape[-1] == 0:
        nothing = scores.new_full(scores.shape[:-1], MINUS_INFINITY)
        return scores, nothing, nothing
    row_max = scores.amax(-1)
    empty = row_max == MINUS_INFINITY
    safe = torch.where(empty[..., None], 0.0, scores)
    exponentials = torch.exp(safe - safe.amax(-1, keepdim=True))
    weights = torch.where(empty[..., None], 0.0, exponentials / exponentials.sum(-1, keepdim=True))
    return weights, torch.where(empty, MINUS_INFINITY, safe.logsumexp(-1)), row_max


def _live_positions(query: Tensor, key: Tensor, mask_mod: Mod | None, block_mask: BlockMask | None) -> Tensor | None:
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if block_mask is not None:
        assert mask_mod is None, "a BlockMask brings its own mask_mod"
        return evaluate_block_mask(block_mask, sizes)
    return None if mask_mod is None else evaluate_mask(mask_mod, sizes, query.device)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
    *,
    block_mask: BlockMask | None = None,
) -> Dense:
    """Return attention in float64, differentiable in the tensors and in what the mods captured.

    Args:
        query, key, value: [B, Hq, Lq, Dqk], [B|1, Hkv, Lk, Dqk], [B|1, Hkv, Lk, Dv], any dtypes.
        score_mod, mask_mod: the user's callables of 0-d tensors.
        scale: factor of the scores; 1/sqrt(Dqk) if None.
        block_mask: instead of mask_mod, with the meaning it has in torch's compiled kernels.
    """
    live = _live_positions(query, key, mask_mod, block_mask)
    products = query.double() @ _grouped(key.double(), query).transpose(-2, -1)
    scores = _modified_scores(products, query.shape[-1], score_mod, live, scale)
    weights, lse, row_max = _softmax(scores)
    return Dense(weights @ _grouped(value.double(), query), lse, row_max)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    mask_mod: Mod | None = None,
    scale: float | None = None,
    *,
    block_mask: BlockMask | None = None,
    rounded_products: bool = False,
) -> Tensor:
    """Return the output as eager mode computes it in the query's dtype: float32 scores, rounded weights.

    With `rounded_products`, products of queries and keys are rounded to the dtype too, as torch's flex_attention does,
    and so are the gradients of the scores.
    """
    live = _live_positions(query, key, mask_mod, block_mask)
    products = _product_in_dtype if rounded_products else _product
    scores = _modified_scores(products(query, key), query.shape[-1], score_mod, live, scale)
    weights = _softmax(scores)[0].to(query.dtype)
    return weights @ _grouped(value.to(query.dtype), query)


# How far from float64 a kernel may be.


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Return max |actual - expected|; positions where both are the same infinity count as 0, NaN as infinite."""
    gap = _gaps(actual, expected)
    return float(gap.max()) if gap.numel() else 0.0


def _gaps(actual: Tensor, expected: Tensor) -> Tensor:
    actual, expected = actual.detach().double(), expected.detach().double()
    return torch.where(actual == expected, 0.0, (actual - expected).abs()).nan_to_num(nan=math.inf)


def magnitude(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor, at least 1."""
    finite = tensor.detach()[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def statistics_tolerance(dtype: torch.dtype, exact: Tensor) -> float:
    """Return how far lse and max_scores may be: they are float32 also when the inputs are narrower."""
    return {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 5e-5) * magnitude(exact)


def output_tolerance(dtype: torch.dtype, exact: Tensor, eager: Tensor) -> float:
    """Return how far an output may be: a bound for its dtype, or twice the error of eager if that is more.

    float32 has a fixed bound; narrower dtypes may add one rounding of the result to twice eager's error.
    """
    if dtype == torch.float64:
        return 1e-10 * magnitude(exact)
    twice = 2.0 * largest_error(eager, exact)
    return max(1e-5 * magnitude(exact), twice) if dtype == torch.float32 else twice + _rounding(dtype, exact)


def _rounding(dtype: torch.dtype, exact: Tensor) -> float:
    return torch.finfo(dtype).eps * magnitude(exact)


def assert_near(name: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Fail with the position and both values when `actual` is further than `tolerance` from `expected`."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    gap = _gaps(actual, expected)
    if gap.numel() == 0 or gap.max() <= tolerance:
        return
    place = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    raise AssertionError(
        f"{name}: error {float(gap.max()):.3g} exceeds {tolerance:.3g} at {place}: "
        f"got {float(actual[place]):.7g}, expected {float(expected[place]):.7g}"
    )

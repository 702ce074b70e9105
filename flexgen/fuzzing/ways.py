"""Other ways to compute the same attention: in parts, permuted, with other tiles, tiers and layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flexgen
from flexgen.attention import Attention
from flexgen.fuzzing.mod_meaning import Mod
from flexgen.lowering.index_map import PACKED_QUERIES
from flexgen.options import Options

Outputs = tuple[Tensor, Tensor, Tensor]  # output, logsumexp, max_scores in [B, H, L, D] order
EVERYTHING = flexgen.AuxRequest(lse=True, max_scores=True)


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an attention.

    Attributes:
        query, key, value: in the attention's layout.
        cu_seqlens: cu_seqlens_q and cu_seqlens_k of packed sequences.
        sides: kv_lengths, page_table, k_scale and v_scale, where they are given.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float | None = None
    block_table: Any = None
    cu_seqlens: tuple[Tensor, Tensor | None] | None = None
    sides: Mapping[str, Any] = field(default_factory=dict)

    def run(self, attention: Attention) -> Outputs:
        """Make the call."""
        queries, keys = self.cu_seqlens or (None, None)
        output, aux = attention(
            *(self.query, self.key, self.value, self.scale, EVERYTHING),
            block_table=self.block_table,
            cu_seqlens_q=queries,
            cu_seqlens_k=keys,
            validate=self.block_table is not None,
            **self.sides,
        )
        return in_order(output, attention), aux.lse, aux.max_scores


def in_order(tensor: Tensor, attention: Attention) -> Tensor:
    """Return a tensor of an attention's layout in [B, H, L, D] order."""
    return tensor if attention.options.layout == "bhsd" else tensor.transpose(1, 2)


def _recompiled(
    attention: Attention, wrap: Callable[[Mod], Mod] = lambda mod: mod, masks: Callable[[Mod], Mod] | None = None
) -> Attention:
    """Return an attention with both mods wrapped, or each in its own way, in [B, H, L, D] order."""
    score_mod, mask_mod = attention.score_mod, attention.mask_mod
    score_mod = None if score_mod is None else wrap(score_mod)
    mask_mod = None if mask_mod is None else (masks or wrap)(mask_mod)
    return Attention(score_mod, mask_mod, dataclasses.replace(attention.options, layout="bhsd"))


def _ordered(attention: Attention, call: Call) -> Call:
    """Return a call with tensors in [B, H, L, D] order and without a table, which belongs to the mask it is made of."""
    query, key, value = (in_order(tensor, attention) for tensor in (call.query, call.key, call.value))
    return dataclasses.replace(call, query=query, key=key, value=value, block_table=None)


def split_batch(attention: Attention, call: Call) -> Outputs:
    """Compute each batch entry by itself."""
    call = _ordered(attention, call)

    def one(b: int) -> Outputs:
        own = _recompiled(attention, lambda mod: lambda *args: mod(*args[:-4], args[-4] + b, *args[-3:]))
        query, key, value = (t[b : b + 1] if t.shape[0] > 1 else t for t in (call.query, call.key, call.value))
        return dataclasses.replace(call, query=query, key=key, value=value).run(own)

    batch = call.query.shape[0]
    return _concatenated([one(b) for b in range(batch)], 0) if batch else call.run(_recompiled(attention))


def split_queries(attention: Attention, call: Call) -> Outputs:
    """Compute the first third of the queries, and the rest."""
    call = _ordered(attention, call)
    length = call.query.shape[2]
    parts = []
    for start, stop in ((0, length // 3), (length // 3, length)):

        def moved(mod: Mod, start: int = start) -> Mod:
            return lambda *args: mod(*args[:-2], args[-2] + start, args[-1])

        part = dataclasses.replace(call, query=call.query[:, :, start:stop])
        parts.append(part.run(_recompiled(attention, moved)))
    return _concatenated(parts, 2)


def split_keys(attention: Attention, call: Call) -> Outputs:
    """Compute attention to the first third of the keys, to the rest, and merge them by their logsumexps."""
    call = _ordered(attention, call)
    middle = call.key.shape[2] // 3
    parts = []
    for is_first in (True, False):

        def own(b: Tensor, h: Tensor, q: Tensor, k: Tensor, is_first: bool = is_first) -> Tensor:
            within = k < middle if is_first else k >= middle
            return within if attention.mask_mod is None else attention.mask_mod(b, h, q, k) & within

        options = dataclasses.replace(attention.options, layout="bhsd")
        parts.append(call.run(Attention(attention.score_mod, own, options)))
    (first, first_lse, first_max), (second, second_lse, second_max) = parts
    empty = torch.isneginf(first_lse) & torch.isneginf(second_lse)
    lse = torch.logaddexp(first_lse.masked_fill(empty, 0.0), second_lse.masked_fill(empty, 0.0))
    merged = torch.zeros((), dtype=lse.dtype, device=lse.device)
    for part, part_lse in ((first, first_lse), (second, second_lse)):
        weight = torch.where(empty, 0.0, (part_lse - lse).exp())[..., None]
        merged = merged + torch.where(weight == 0, 0.0, part) * weight
    return merged.to(first.dtype), lse.masked_fill(empty, -torch.inf), torch.maximum(first_max, second_max)


def permute_heads(attention: Attention, call: Call) -> Outputs:
    """Compute the heads in reverse order."""
    call = _ordered(attention, call)
    last = call.query.shape[1] - 1
    own = _recompiled(attention, lambda mod: lambda *args: mod(*args[:-3], last - args[-3], *args[-2:]))
    query, key, value = (_reversed_heads(tensor) for tensor in (call.query, call.key, call.value))
    output, lse, max_scores = dataclasses.replace(call, query=query, key=key, value=value).run(own)
    return output.flip(1), lse.flip(1), max_scores.flip(1)


def _reversed_heads(tensor: Tensor) -> Tensor:
    if tensor.element_size() > 1:
        return tensor.flip(1)
    return tensor.view(torch.uint8).flip(1).view(tensor.dtype)  # torch does not flip float8


def shift_rows(attention: Attention, call: Call) -> Outputs:
    """Add a number to all scores of a row, which no softmax sees."""
    call = _ordered(attention, call)
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    rows = torch.linspace(-2, 2, call.query.shape[2] + 1, device=call.query.device, dtype=dtype)

    def shifted(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if attention.score_mod is None else attention.score_mod(score, b, h, q, k)
        return score + rows[q]

    options = dataclasses.replace(attention.options, layout="bhsd")
    output, lse, max_scores = call.run(Attention(shifted, attention.mask_mod, options))
    return output, lse - rows[:-1], max_scores - rows[:-1]


def other_layout(attention: Attention, call: Call) -> Outputs:
    """Compute with the other order of heads and lengths."""
    call = _ordered(attention, call)
    options = dataclasses.replace(attention.options, layout="bshd")
    own = Attention(attention.score_mod, attention.mask_mod, options)
    query, key, value = (tensor.transpose(1, 2) for tensor in (call.query, call.key, call.value))
    return dataclasses.replace(call, query=query, key=key, value=value).run(own)


def other_tiles(attention: Attention, call: Call) -> Outputs:
    """Compute with the smallest tiles."""
    tiles = {"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16, "bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16}
    tiles |= {"bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16}
    own = Attention(attention.score_mod, attention.mask_mod, attention.options.over(tiles))
    return dataclasses.replace(call, block_table=None).run(own)


def dense_loop(attention: Attention, call: Call) -> Outputs:
    """Compute with a mask that cannot be understood, so that every key is visited."""

    def opaque(mod: Mod) -> Mod:
        return lambda b, h, q, k: mod(b, h, q, k) & (torch.sin(q + 0.5 * k) < 2)

    return _ordered(attention, call).run(_recompiled(attention, masks=opaque))


def split_over_programs(attention: Attention, call: Call) -> Outputs:
    """Compute few queries with three programs for the keys of each, whose results a second kernel merges."""
    call = _ordered(attention, call)
    options = Options().over({"SPLIT_KV": 3} if 0 < call.query.shape[2] <= PACKED_QUERIES else {})
    return call.run(Attention(attention.score_mod, attention.mask_mod, options))


def mask_as_score(attention: Attention, call: Call) -> Outputs:
    """Compute with a score_mod that does what the mask does."""
    score_mod, mask_mod = attention.score_mod, attention.mask_mod

    def masked(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        score = score if score_mod is None else score_mod(score, b, h, q, k)
        return score if mask_mod is None else torch.where(mask_mod(b, h, q, k), score, -torch.inf)

    options = dataclasses.replace(attention.options, layout="bhsd")
    return _ordered(attention, call).run(Attention(masked, None, options))


def block_mask(attention: Attention, call: Call) -> Outputs:
    """Compute with the mask's blocks as torch lists them."""
    call = _ordered(attention, call)
    if attention.mask_mod is None:
        return call.run(_recompiled(attention))
    batch, heads, q_len, _ = call.query.shape
    sizes = (batch, heads, q_len, call.key.shape[2])
    blocks = flexgen.create_block_mask(attention.mask_mod, *sizes, call.query.device, (32, 16))
    own = _recompiled(attention)
    own = Attention(own.score_mod, own.mask_mod, own.options.over({"fwd_BLOCK_M": 16, "fwd_BLOCK_N": 16}))
    return dataclasses.replace(call, block_table=blocks).run(own)


def derived_table(attention: Attention, call: Call) -> Outputs:
    """Compute with a block table that was made before."""
    table = attention.block_table(call.query, call.key, call.value)
    return dataclasses.replace(call, block_table=table).run(attention)


def packed(attention: Attention, call: Call) -> Outputs:
    """Compute the batch's entries as sequences that are packed along the length."""
    call = _ordered(attention, call)
    batch, q_len, kv_len = call.query.shape[0], call.query.shape[2], call.key.shape[2]

    def along_length(tensor: Tensor) -> Tensor:
        whole = tensor.expand(batch, *tensor.shape[1:]).transpose(0, 1)
        return whole.reshape(1, tensor.shape[1], batch * tensor.shape[2], tensor.shape[3])

    query, key, value = (along_length(tensor) for tensor in (call.query, call.key, call.value))
    ends = [torch.arange(batch + 1, device=query.device, dtype=torch.int32) * length for length in (q_len, kv_len)]
    own = dataclasses.replace(call, query=query, key=key, value=value, cu_seqlens=(ends[0], ends[1]))
    output, lse, max_scores = own.run(_recompiled(attention))
    heads = call.query.shape[1]
    return (
        output.reshape(heads, batch, q_len, output.shape[3]).transpose(0, 1),
        lse.reshape(heads, batch, q_len).transpose(0, 1),
        max_scores.reshape(heads, batch, q_len).transpose(0, 1),
    )


def in_pages(attention: Attention, call: Call) -> Outputs:
    """Compute with keys and values in pages that lie in no order, among what must not be read."""
    ordered, size = _ordered(attention, call), 16
    batch, (_, heads, kv_len, _) = ordered.query.shape[0], ordered.key.shape
    if not kv_len or not batch:
        return ordered.run(_recompiled(attention))
    count = -(-kv_len // size)
    order = torch.randperm(batch * count + 3, generator=torch.Generator().manual_seed(1))[: batch * count]
    table = order.view(batch, count).to(ordered.query.device, torch.int32)

    def paged(tensor: Tensor) -> Tensor:
        whole = tensor.expand(batch, *tensor.shape[1:]).double()
        padded = torch.nn.functional.pad(whole, (0, 0, 0, count * size - kv_len), value=torch.nan)
        pages = whole.new_full((batch * count + 3, heads, size, tensor.shape[3]), torch.nan)
        pages[table.long()] = padded.view(batch, heads, count, size, tensor.shape[3]).transpose(1, 2)
        return pages.to(tensor.dtype)

    lengths = ordered.sides.get("kv_lengths")
    lengths = torch.full((batch,), kv_len, dtype=torch.int32, device=table.device) if lengths is None else lengths
    sides = {**ordered.sides, "kv_lengths": lengths, "page_table": table}
    key, value = paged(ordered.key), paged(ordered.value)
    return dataclasses.replace(ordered, key=key, value=value, sides=sides).run(_recompiled(attention))


def scaled_cache(attention: Attention, call: Call) -> Outputs:
    """Compute with keys of half and values of twice the size, and scales that undo it; float8 cannot halve exactly."""
    ordered = _ordered(attention, call)
    key, value, factor = ordered.key, ordered.value, 1.0
    if key.element_size() > 1:
        key, value, factor = key * 0.5, value * 2.0, 2.0
    # A tensor of scales is float32, and what it is multiplied with then too.
    is_double = key.dtype == torch.float64
    k_scale = factor if is_double else torch.full((key.shape[1],), factor, device=key.device)
    sides = {**ordered.sides, "k_scale": k_scale, "v_scale": 1 / factor}
    return dataclasses.replace(ordered, key=key, value=value, sides=sides).run(_recompiled(attention))


def once_warm(attention: Attention, call: Call) -> Outputs:
    """Compute as usual inference does, once its form has been seen."""
    _, lse, max_scores = call.run(attention)
    tensors = (call.query, call.key, call.value, call.scale)
    with torch.no_grad():
        outputs = [attention(*tensors, block_table=call.block_table, **call.sides) for _ in range(3)]
    return in_order(outputs[-1], attention), lse, max_scores


def _concatenated(parts: list[Outputs], axis: int) -> Outputs:
    output, lse, max_scores = (torch.cat(tensors, dim=axis) for tensors in zip(*parts, strict=True))
    return output, lse, max_scores


OF_LISTED_BLOCKS = "with a block mask"  # torch evaluates the mask
# By the name that a found case is written with: "computed " + name.
WAYS: dict[str, Callable[[Attention, Call], Outputs]] = {
    "batch entry by batch entry": split_batch,
    "in two parts of queries": split_queries,
    "in two parts of keys": split_keys,
    "with heads in reverse": permute_heads,
    "with a number added to each row": shift_rows,
    "in the other layout": other_layout,
    "with the smallest tiles": other_tiles,
    "in a dense loop": dense_loop,
    "with the mask in the score_mod": mask_as_score,
    "split over programs": split_over_programs,
    OF_LISTED_BLOCKS: block_mask,
    "with a table made before": derived_table,
    "as packed sequences": packed,
    "in pages": in_pages,
    "with scales of keys and values": scaled_cache,
    "when it is warm": once_warm,
}
WITHOUT_GRADIENTS = ("in pages", "with scales of keys and values", "when it is warm")
OF_A_CACHE = (  # with kv_lengths
    *WITHOUT_GRADIENTS,
    *("with heads in reverse", "with the smallest tiles", "in a dense loop", "with the mask in the score_mod"),
    *("in two parts of queries", "in two parts of keys", "with a number added to each row", "in the other layout"),
    "split over programs",
)
OF_PACKED = ("with heads in reverse", "with the smallest tiles", "in a dense loop", "with the mask in the score_mod")

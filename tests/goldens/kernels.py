"""The whole plain Triton kernels behind tests/golden/kernels: one concept each, as a user would ask for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

import flexgen
from flexgen.lowered import Lowered
from tests.goldens.changing import lower_after_change

Mod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of query, key and value, of which none is real memory."""

    B: int = 2
    Hq: int = 4
    Hkv: int = 4
    Lq: int = 1024
    Lk: int = 1024
    D: int = 64
    Dv: int | None = None
    dtype: torch.dtype = torch.bfloat16
    stored: torch.dtype | None = None  # of key and value, where it is another
    page_size: int = 0

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def stored(head_dim: int) -> torch.Tensor:
            rows = (self.B * self.max_pages, self.page_size) if self.page_size else (self.B, self.Lk)
            return torch.empty(rows[0], self.Hkv, rows[1], head_dim, dtype=self.stored or self.dtype, device="meta")

        query = torch.empty(self.B, self.Hq, self.Lq, self.D, dtype=self.dtype, device="meta")
        return query, stored(self.D), stored(self.D if self.Dv is None else self.Dv)

    @property
    def max_pages(self) -> int:
        return self.Lk // self.page_size


SIZES = Sizes()


@dataclass(frozen=True, slots=True)
class KernelCase:
    """A kernel of one concept.

    Attributes:
        build: returns (score_mod, mask_mod); or a generator that yields them and then changes what they capture.
        make_table: makes the block mask of mask_mod, where the call brings one.
        sequences: how many are packed along the length; None where each is an entry of the batch.
        brings: makes the other arguments of the call, for its sizes.
    """

    build: Callable[[], Any]
    sizes: Sizes
    options: Mapping[str, Any]
    aux: flexgen.AuxRequest | None
    make_table: Callable[[Mod], Any] | None
    dropout_p: float = 0.0
    sequences: int | None = None
    brings: Callable[[Sizes], Mapping[str, Any]] = lambda sizes: {}

    @property
    def name(self) -> str:
        return self.build.__name__

    def lower(self, target: str) -> Lowered:
        return lower_after_change(
            self.build,
            lambda mods: flexgen.compile(*mods, {"BACKEND": "TRITON", **self.options}),
            lambda attention: self._lower(attention, target),
        )

    def _lower(self, attention: flexgen.Attention, target: str) -> Lowered:
        table = self.make_table(attention.mask_mod) if self.make_table and attention.mask_mod else None
        given = {"return_aux": self.aux, "target": target, "block_table": table, "dropout_p": self.dropout_p}
        given |= self.brings(self.sizes)
        return attention.lower(*self.sizes.tensors(), **given, **offsets(self.sequences))


def offsets(sequences: int | None) -> dict[str, torch.Tensor]:
    """Return the offsets of packed sequences as a call takes them, without memory."""
    if sequences is None:
        return {}
    listed = torch.empty(sequences + 1, dtype=torch.int32, device="meta")
    return {"cu_seqlens_q": listed, "cu_seqlens_k": listed.clone()}


def kernel(
    sizes: Sizes = SIZES,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    aux: flexgen.AuxRequest | None = None,
    make_table: Callable[[Mod], Any] | None = None,
    dropout_p: float = 0.0,
    sequences: int | None = None,
    brings: Callable[[Sizes], Mapping[str, Any]] = lambda sizes: {},
) -> Callable[[Callable[[], Any]], KernelCase]:
    """Turn a builder of (score_mod, mask_mod) into the case named after it."""
    return lambda build: KernelCase(build, sizes, options, aux, make_table, dropout_p, sequences, brings)


def key_counts(sizes: Sizes) -> Mapping[str, Any]:
    return {"kv_lengths": torch.empty(sizes.B, dtype=torch.int32, device="meta")}


def pages(sizes: Sizes) -> Mapping[str, Any]:
    table = torch.empty(sizes.B, sizes.max_pages, dtype=torch.int32, device="meta")
    return {**key_counts(sizes), "page_table": table}


def scales(sizes: Sizes) -> Mapping[str, Any]:
    one = torch.empty(sizes.Hkv, dtype=torch.float32, device="meta")
    return {"k_scale": one, "v_scale": one}


def blocks(q_block_size: int, kv_block_size: int, sizes: Sizes = SIZES) -> Callable[[Mod], Any]:
    """Return a maker of block masks that list full blocks apart."""
    size = (q_block_size, kv_block_size)
    return lambda mask: flexgen.create_block_mask(mask, 1, 1, sizes.Lq, sizes.Lk, device="cpu", BLOCK_SIZE=size)


def causal_mask(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


# Which keys a tile visits.


@kernel()
def no_mask():
    return None, None


@kernel()
def causal():
    return None, causal_mask


@kernel()
def sliding_window():
    window = 256

    def sliding_window_mask(b, h, q_idx, kv_idx):
        causal = q_idx >= kv_idx
        in_window = q_idx - kv_idx <= window
        return causal & in_window

    return None, sliding_window_mask


@kernel()
def sinks_and_window():
    sinks, window = 4, 256

    def sink_mask(b, h, q_idx, kv_idx):
        distance = q_idx - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < sinks))

    return None, sink_mask


@kernel()
def bounds_reduced_over_rows():
    document_of = torch.zeros(1024, dtype=torch.int32)
    offsets = torch.zeros(9, dtype=torch.int32)

    def document_mask(b, h, q_idx, kv_idx):
        document = document_of[q_idx]
        return (offsets[document] <= kv_idx) & (kv_idx < offsets[document + 1])

    return None, document_mask


@kernel()
def run_time_window():
    window = 256

    def sliding_window_mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= window)

    yield None, sliding_window_mask
    window = 512


# Block tables.


@kernel(make_table=blocks(128, 128))
def block_table():
    return None, causal_mask


@kernel(make_table=blocks(48, 96))
def block_table_of_odd_sizes():
    return None, causal_mask


@kernel()
def derived_block_table():
    document_id = torch.zeros(1024, dtype=torch.int32)

    def document_mask(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return None, document_mask


@kernel()
def evaluated_block_table():
    tree_id = torch.zeros(1024, dtype=torch.int32)
    is_ancestor = torch.zeros(1024, 1024, dtype=torch.bool)

    def tree_mask(b, h, q_idx, kv_idx):
        same_tree = tree_id[q_idx] == tree_id[kv_idx]
        return same_tree & is_ancestor[q_idx, kv_idx]

    return None, tree_mask


# Score mods.


@kernel()
def captured_bias():
    bias = torch.zeros(4, 1024, 1024)

    def add_bias(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx]

    return add_bias, None


@kernel()
def softcap():
    cap = 20.0

    def softcap_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    return softcap_mod, causal_mask


# Shapes, dtypes and outputs.


@kernel(Sizes(Hq=16, Hkv=2, Lq=1, Lk=4096))
def packed_heads_of_a_decode():
    return None, None


@kernel(Sizes(Lq=1000, Lk=1000, D=80))
def uneven_lengths_and_padded_head_dim():
    return None, causal_mask


@kernel(Sizes(dtype=torch.float32))
def float32():
    return None, causal_mask


@kernel(aux=flexgen.AuxRequest(lse=True, max_scores=True))
def logsumexp_and_maximum():
    def first_rows_are_empty(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx >= 100)

    return None, first_rows_are_empty


@kernel(Sizes(B=1, Hq=4, Hkv=2, Lq=4096, Lk=5000), sequences=16, aux=flexgen.AuxRequest(lse=True))
def packed_sequences():
    prefix_length = torch.zeros(16, dtype=torch.int32)

    def causal_after_a_prefix(b, h, q_idx, kv_idx):
        return q_idx + prefix_length[b] >= kv_idx

    return None, causal_after_a_prefix


# Dropout.


@kernel(dropout_p=0.1)
def dropout():
    return None, causal_mask


@kernel(Sizes(Hq=16, Hkv=2, Lq=1, Lk=4096), dropout_p=0.1)
def dropout_of_packed_heads():
    return None, None


# Options.


@kernel(options={"USE_TMA": True})
def bulk_copies():
    return None, causal_mask


@kernel(options={"USE_SUBTILING": True})
def subtiling():
    return None, causal_mask


# Decoding.

DECODE = {"BACKEND": "TRITON_DECODE"}


@kernel(Sizes(B=8, Hq=32, Hkv=8, Lq=1, Lk=32768, D=128), options=DECODE)
def decode():
    return None, None


@kernel(Sizes(B=8, Hq=32, Hkv=8, Lq=1, Lk=32768, D=128), options=DECODE, brings=key_counts)
def decode_of_a_softcapped_window():
    cap, window = 30.0, 4096
    position = torch.zeros(8, dtype=torch.int32)

    def softcap_mod(score, b, h, q_idx, kv_idx):
        return cap * torch.tanh(score / cap)

    def window_mask(b, h, q_idx, kv_idx):
        distance = position[b] + q_idx - kv_idx
        return (distance >= 0) & (distance < window)

    return softcap_mod, window_mask


@kernel(Sizes(Hq=6, Hkv=2, Lq=4, Lk=4096), options=DECODE, aux=flexgen.AuxRequest(lse=True, max_scores=True))
def decode_of_sinks_and_window():
    sinks, window, position = 4, 256, torch.zeros(2, dtype=torch.int32)

    def sink_mask(b, h, q_idx, kv_idx):
        distance = position[b] + q_idx - kv_idx
        return (distance >= 0) & ((distance < window) | (kv_idx < sinks))

    return None, sink_mask


@kernel(Sizes(B=8, Hq=32, Hkv=8, Lq=1, Lk=32768, D=128, page_size=64), options=DECODE, brings=pages)
def decode_of_pages():
    return None, None


@kernel(
    Sizes(B=8, Hq=16, Hkv=8, Lq=1, Lk=8192, D=128, stored=torch.float8_e4m3fn, page_size=16),
    options=DECODE,
    brings=lambda sizes: {**pages(sizes), **scales(sizes)},
)
def decode_of_small_pages_in_float8():
    return None, None


@kernel(Sizes(stored=torch.float8_e5m2), brings=scales)
def prefill_of_float8():
    return None, causal_mask


@kernel(Sizes(page_size=128), brings=pages)
def prefill_of_pages():
    return None, causal_mask


@kernel(brings=key_counts)
def prefill_up_to_kv_lengths():
    return None, causal_mask


CASES: tuple[KernelCase, ...] = tuple(value for value in list(vars().values()) if isinstance(value, KernelCase))

"""The problems that check the Gluon kernels on a GPU, and their answers in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import flexgen
from benchmarks.cases import alibi, causal, documents, prefix, softcap, window

Mod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One problem to check: sizes, mods by name, and options."""

    name: str
    head_dim: int
    mods: str = "none"
    value_dim: int = 0
    batch: int = 1
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (1024, 1024)
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    aux: bool = False
    layout: str = "bhsd"
    shared_batch: bool = False
    blocks: tuple[int, int] | None = None  # of a block mask, which the call then brings
    scale: float | None = None
    wanted: tuple[str, ...] = ("query", "key", "value")  # whose gradients are checked, where the backward is
    backward: bool = False

    @property
    def wanted_in_order(self) -> tuple[str, ...]:
        return tuple(name for name in ("query", "key", "value") if name in self.wanted)

    def of_backward(self) -> Check:
        """Return the same problem as a check of the backward kernels."""
        return replace(self, name=f"backward: {self.name}", backward=True)


def checks() -> list[Check]:
    found = []
    for head_dim in (64, 128, 256):
        for mods in ("none", "causal", "window 1024", "window 100"):
            found.append(Check(f"{mods} D={head_dim}", head_dim, mods, lengths=(2048, 2048), heads=(8, 8), batch=2))
        for rows in (64, 128):
            forced = {"BLOCK_M": rows}
            found.append(Check(f"causal rows={rows} D={head_dim}", head_dim, "causal", options=forced, aux=True))
            found.append(
                Check(f"tails rows={rows} D={head_dim}", head_dim, "causal", lengths=(1000, 777), options=forced)
            )
            found.append(
                Check(f"no mask tails rows={rows} D={head_dim}", head_dim, lengths=(333, 1501), options=forced)
            )
            found.append(Check(f"softcap rows={rows} D={head_dim}", head_dim, "softcap", options=forced))
        found.append(Check(f"fully masked rows D={head_dim}", head_dim, "future", lengths=(1000, 1000), aux=True))
        found.append(Check(f"fp16 D={head_dim}", head_dim, "causal", dtype="float16", aux=True))
        found.append(Check(f"many turns D={head_dim}", head_dim, "window 300", lengths=(4096, 4096), heads=(16, 16)))
    for head_dim, value_dim in ((32, 32), (40, 40), (80, 80), (96, 96), (192, 128), (64, 256)):
        found.append(Check(f"D={head_dim},{value_dim}", head_dim, "causal", value_dim, lengths=(700, 900), aux=True))
    for mods in ("alibi", "bias", "key table", "prefix", "sinks", "parity", "constant", "head bias", "two windows"):
        found.append(Check(mods, 64, mods, lengths=(1111, 1111), aux=True))
        found.append(Check(f"{mods} D=128", 128, mods, lengths=(1024, 1300), batch=2))
    for mods in ("documents", "document starts", "sinks in documents"):
        found.append(Check(mods, 64, mods, lengths=(1111, 1111), aux=True))
        found.append(Check(f"{mods} D=128", 128, mods, heads=(4, 2), lengths=(1024, 1024), batch=2))
        found.append(Check(f"{mods} D=256", 256, mods, lengths=(1500, 1500)))
        found.append(Check(f"{mods} rows=64", 128, mods, lengths=(1024, 1024), options={"BLOCK_M": 64}))
    for blocks in ((128, 128), (64, 192), (256, 128)):
        for mods in ("causal", "future", "documents"):
            name = f"block mask {blocks[0]}x{blocks[1]} {mods}"
            found.append(Check(name, 128, mods, lengths=(1024, 1000), aux=True, blocks=blocks))
            found.append(Check(f"{name} D=64", 64, mods, lengths=(700, 1024), batch=2, blocks=blocks))
    found.append(Check("softcap tails", 128, "softcap", lengths=(1000, 1300), aux=True))
    found.append(Check("GQA", 128, "causal", heads=(8, 2), batch=2, aux=True))
    found.append(Check("GQA window", 64, "window 100", heads=(6, 2), batch=2))
    found.append(Check("shared batch", 128, "causal", batch=3, shared_batch=True))
    found.append(Check("heads inside", 128, "causal", batch=2, layout="bshd"))
    found.append(Check("few keys", 128, "none", lengths=(512, 70)))
    found.append(Check("short queries", 64, "causal", lengths=(40, 2000)))
    return found


def mods_of(check: Check, device: str) -> tuple[Mod | None, Mod | None]:
    """Return score_mod and mask_mod; captured tensors are the same in each process."""
    generator = torch.Generator().manual_seed(7)
    q_len, kv_len = check.lengths
    heads = check.heads[0]

    def captured(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    match check.mods.split():
        case ["none"]:
            return None, None
        case ["causal"]:
            return None, causal
        case ["window", size]:
            return None, window(int(size))
        case ["prefix"]:
            return None, prefix(200)
        case ["softcap"]:
            return softcap(30.0), causal
        case ["alibi"]:
            return alibi(captured(heads).abs()), causal
        case ["future"]:
            return None, lambda b, h, q_idx, kv_idx: kv_idx >= q_idx + 100
        case ["documents"]:
            return None, documents(torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150)
        case ["document", "starts"]:
            first = torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150 * 150
            return None, lambda b, h, q_idx, kv_idx: (kv_idx >= first[q_idx]) & (kv_idx <= q_idx)
        case ["sinks", "in", "documents"]:
            first = torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150 * 150
            return None, lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx >= first[q_idx]) | (kv_idx < 5))
        case ["sinks"]:
            return None, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx <= 90))
        case ["two", "windows"]:
            return None, two_windows
        case ["parity"]:
            return (
                None,
                lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 200) & ((q_idx ^ kv_idx) % 2 == 0),
            )
        case ["constant"]:
            return (lambda score, b, h, q_idx, kv_idx: torch.zeros_like(score)), causal
    if check.mods == "bias":
        bias = captured(heads, q_len, kv_len)
        return (lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]), causal
    if check.mods == "head bias":
        gain = captured(heads)
        return (lambda score, b, h, q_idx, kv_idx: score * gain[h] + torch.sigmoid(score)), None
    table = captured(kv_len)
    return (lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]), None


def two_windows(b, h, q_idx, kv_idx):
    return (abs(q_idx - kv_idx) < 40) | (abs(q_idx - kv_idx - 500) < 40)


def tensors_of(check: Check, device: str) -> list[torch.Tensor]:
    dtype = getattr(torch, check.dtype)
    (q_heads, kv_heads), (q_len, kv_len) = check.heads, check.lengths
    key_batch = 1 if check.shared_batch else check.batch
    shapes = [
        (check.batch, q_heads, q_len, check.head_dim),
        (key_batch, kv_heads, kv_len, check.head_dim),
        (key_batch, kv_heads, kv_len, check.value_dim or check.head_dim),
    ]
    if check.layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    if device == "meta":
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    torch.manual_seed(len(check.name))
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def attention_of(check: Check, device: str) -> flexgen.Attention:
    return flexgen.compile(*mods_of(check, device), {"BACKEND": "GLUON", "layout": check.layout, **check.options})


def table_of(check: Check, device: str) -> Any:
    """Return the block mask that a call brings, if any."""
    if check.blocks is None:
        return None
    mask_mod = mods_of(check, device)[1]
    return flexgen.create_block_mask(mask_mod, None, None, *check.lengths, device=device, BLOCK_SIZE=check.blocks)


def aux_of(check: Check) -> flexgen.AuxRequest | None:
    return flexgen.AuxRequest(lse=True, max_scores=True) if check.aux else None


def reference(check: Check, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return output, logsumexp and maximum in float32, [B, H, L, ...]."""
    query, key, value = (in_bhsd(t, check).float() for t in tensors)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    score_mod, mask_mod = mods_of(check, "cuda")
    score = query @ key.mT / query.shape[3] ** 0.5
    b, h, q, k = torch.meshgrid(
        *(torch.arange(n, device="cuda") for n in score.shape),
        indexing="ij",
    )
    if score_mod is not None:
        score = score_mod(score, b, h, q, k)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(b, h, q, k), float("-inf"))
    empty = (score == float("-inf")).all(-1, keepdim=True)
    output = torch.softmax(score, -1).masked_fill(empty, 0.0) @ value
    return output, torch.logsumexp(score, -1), score.amax(-1)


def in_bhsd(tensor: torch.Tensor, check: Check) -> torch.Tensor:
    """Return a tensor in [B, H, L, D] order."""
    return tensor.transpose(1, 2) if check.layout == "bshd" else tensor

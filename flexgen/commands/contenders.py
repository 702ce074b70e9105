"""What `flexgen bench` times: the subject's attention, and what else computes the same on this machine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flexgen.attention import Attention
from flexgen.commands.subject import Subject
from flexgen.ir.graph import Mods, input_node, make
from flexgen.runtime.describe import to_bhsd
from flexgen.runtime.timed_call import Attend

Direction = Literal["forward", "backward", "decode"]
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward", "decode")
FLEXGEN, FLEX, CUDNN, EAGER = "flexgen", "flex", "cudnn", "eager"
MOST_SCORE_BYTES = 8 << 30  # of float32 scores and their gradients, beyond which eager attention is left out


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that computes the subject's attention from query, key and value [B, H, L, D]; or why it cannot."""

    name: str
    attend: Attend | None
    refusal: str = ""


def decoding(subject: Subject) -> Subject:
    """Return the subject with one query, the last one of the sequence: mods see its index."""
    own, last = subject.attention, subject.shape.Lk - 1
    score, mask = own.score_mod, own.mask_mod

    def last_score(score_: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score(score_, b, h, q_idx + last, kv_idx)  # type: ignore[misc]

    def last_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask(b, h, q_idx + last, kv_idx)  # type: ignore[misc]

    attention = Attention(last_score if score else None, last_mask if mask else None, own.options)
    return replace(subject, attention=attention, shape=subject.shape._replace(Lq=1))


def peers(subject: Subject, mods: Mods, device: torch.device) -> Iterator[Peer]:
    """Yield flexgen, torch.compile(flex_attention), cuDNN and eager attention.

    Args:
        mods: of the subject, captured: they say what cuDNN can do.
    """
    yield Peer(FLEXGEN, _flexgen(subject))
    yield _flex(subject, device)
    yield _cudnn(subject, mods)
    yield _eager(subject, device)


def _flexgen(subject: Subject) -> Attend:
    attention, layout = subject.attention, subject.attention.options.layout

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = attention(to_bhsd(query, layout), to_bhsd(key, layout), to_bhsd(value, layout))
        return to_bhsd(found, layout)

    return attend


def _flex(subject: Subject, device: torch.device) -> Peer:
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # an earlier direction's shapes would make this one dynamic
    compiled = torch.compile(flex_attention, dynamic=False)
    return Peer(FLEX, _through_flex(subject, compiled, device))


def _eager(subject: Subject, device: torch.device) -> Peer:
    from torch.nn.attention.flex_attention import flex_attention

    shape = subject.shape
    needed = 3 * 4 * shape.B * shape.Hq * shape.Lq * shape.Lk
    if needed > MOST_SCORE_BYTES:
        return Peer(EAGER, None, f"its scores would take {needed / (1 << 30):.0f} GiB")
    return Peer(EAGER, _through_flex(subject, flex_attention, device))


def _through_flex(subject: Subject, flex: Any, device: torch.device) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask

    shape, own = subject.shape, subject.attention
    made: list[Any] = []  # at the first call, so that what cannot be made is told like what cannot run

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not made:
            sizes = (shape.B, shape.Hq, shape.Lq, shape.Lk)
            made.append(create_block_mask(own.mask_mod, *sizes, device) if own.mask_mod else None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that eager attention is slow is what is measured
            grouped = shape.Hq != shape.Hkv
            found = flex(query, key, value, score_mod=own.score_mod, block_mask=made[0], enable_gqa=grouped)
        assert isinstance(found, Tensor)
        return found

    return attend


def _cudnn(subject: Subject, mods: Mods) -> Peer:
    shape, causal = subject.shape, is_causal(mods)
    if mods.score is not None or (mods.mask is not None and not causal):
        return Peer(CUDNN, None, "it has no score_mod, and no mask but the causal one")
    if subject.dtype.itemsize != 2:
        return Peer(CUDNN, None, f"it takes half precision, not {subject.dtype}")
    if causal and shape.Lq != shape.Lk:
        return Peer(CUDNN, None, "its causal mask is for equal lengths")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=causal, enable_gqa=shape.Hq != shape.Hkv
            )

    return Peer(CUDNN, attend)


def is_causal(mods: Mods) -> bool:
    """Whether the mask is `q_idx >= kv_idx`, however it is written."""
    q_idx, kv_idx = input_node("q_idx"), input_node("kv_idx")
    forms = (make("ge", q_idx, kv_idx, dtype=torch.bool), make("le", kv_idx, q_idx, dtype=torch.bool))
    return mods.mask is not None and mods.mask.root in forms

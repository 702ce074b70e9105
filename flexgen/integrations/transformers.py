"""transformers' models with `attn_implementation="flexgen"`, through its public attention and mask interfaces."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface

from flexgen.api import compile
from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest
from flexgen.block_mask import create_block_mask
from flexgen.errors import UnsupportedProblemError
from flexgen.patch import warn_of_interpreter
from flexgen.sinks import add_sinks
from flexgen.torch_library.refuse import refuse
from flexgen.torch_library.traced import call_traced

MaskFunction = Callable[..., torch.Tensor]


def register(name: str = "flexgen") -> None:
    """Add flexgen to transformers' attention implementations.

    After it, `from_pretrained(..., attn_implementation="flexgen")` and `model.set_attn_implementation("flexgen")` work
    for every model that goes through transformers' attention interface. Calling it again does nothing new.

    Args:
        name: what the implementation is called.
    """
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


class LazyBlockMask(BlockMask):
    """What transformers passes from its mask interface to each layer: a mask_mod, whose lists are made if asked for.

    flexgen reads the mask_mod alone, and finds out by itself which blocks are live. It is a BlockMask so that models,
    which look whether a mask is already made, take it for one, and so that torch's own flex_attention could take it.

    Args:
        mask_mod: of indices that count from the first query and key of the call.
        codes: what identifies the mask_mod's code; the values that it holds may differ.
        sizes: batch, queries and keys.
        device: where lists are made.
    """

    def __init__(
        self, mask_mod: MaskFunction, codes: tuple[object, ...], sizes: tuple[int, int, int], device: Any
    ) -> None:
        self.mask_mod = mask_mod
        self.codes = codes
        self.seq_lengths = (sizes[1], sizes[2])
        self._batch = sizes[0]
        self._device = device

    @property
    def shape(self) -> tuple[int, ...]:
        """Batch, 1 for all heads, queries and keys."""
        return (self._batch, 1, *self.seq_lengths)

    def to(self, device: torch.device | str) -> LazyBlockMask:
        """Return the same mask with lists on another device; its mask_mod reads what it read."""
        return LazyBlockMask(self.mask_mod, self.codes, (self._batch, *self.seq_lengths), device)

    def __getattr__(self, name: str) -> Any:
        """Make the lists, when one of them is asked for."""
        if name.startswith("__") or name == "_batch":
            raise AttributeError(name)
        made = create_block_mask(self.mask_mod, self._batch, None, *self.seq_lengths, device=self._device)
        self.__dict__.update({key: value for key, value in vars(made).items() if key not in self.__dict__})
        if name not in self.__dict__:
            raise AttributeError(name)
        return self.__dict__[name]


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str = "cpu",
    **_: Any,
) -> LazyBlockMask:
    """Return the mask of one kind of layer; what transformers' mask interface calls.

    Args:
        batch_size, q_length, kv_length: extents of the call.
        q_offset, kv_offset: the positions of the first query and of the first key.
        mask_function: of positions; causal, sliding, chunked, packed, or what a model puts together.
        attention_mask: [batch, positions], bool: which positions are no padding.
        device: of the model's inputs.
    """
    assert mask_function is not None
    padding = None
    if attention_mask is not None and (torch.compiler.is_compiling() or not bool(attention_mask.all())):
        missing = kv_length + kv_offset - attention_mask.shape[-1]
        padding = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
    mask_mod = _mask_mod(mask_function, q_offset, kv_offset, padding)
    codes = () if torch.compiler.is_compiling() else _codes(mask_mod)
    return LazyBlockMask(mask_mod, codes, (batch_size, q_length, kv_length), device)


def _mask_mod(
    mask_function: MaskFunction, q_offset: int | torch.Tensor, kv_offset: int, padding: torch.Tensor | None
) -> MaskFunction:
    """Return a mask of indices from a mask of positions."""

    def positions(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        return mask_function(b, h, q_idx + q_offset, kv_idx + kv_offset)

    def unpadded(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        assert padding is not None
        return positions(b, h, q_idx, kv_idx) & padding[b, kv_idx + kv_offset]

    return positions if padding is None else unpadded


def _codes(function: object) -> tuple[object, ...]:
    """Return the code of a function and of those that it closes over."""
    if not isinstance(function, types.FunctionType):
        return (type(function),)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    nested: list[object] = [it for value in held for it in (value if isinstance(value, tuple | list) else (value,))]
    return (function.__code__, *(_codes(value) for value in nested if callable(value)))


@dataclass(frozen=True, slots=True)
class _Mods:
    """An attention for calls of one form, and how to say what its mods are to read at the next call.

    So a mask function that a model makes anew for each forward is not captured again while its code is the same.
    """

    attention: Attention
    read: Callable[[MaskFunction | None, torch.Tensor | None], None]


def _made(softcap: float | None, *, biased: bool, masked: bool) -> _Mods:
    # What changes lives in closure cells: they are read at each call, also of functions that are flexgen's own.
    mask_function: Any = None
    bias: Any = None

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return _scored(score, (b, h, q_idx, kv_idx), softcap, bias)

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return mask_function(b, h, q_idx, kv_idx)

    def read(next_mask: MaskFunction | None, next_bias: torch.Tensor | None) -> None:
        nonlocal mask_function, bias
        mask_function, bias = next_mask, next_bias

    return _Mods(compile(score if biased or softcap is not None else None, mask if masked else None), read)


def _scored(score: Any, indices: tuple[Any, Any, Any, Any], softcap: float | None, bias: torch.Tensor | None) -> Any:
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        b, h, q_idx, kv_idx = indices
        score = score + bias[b if bias.shape[0] > 1 else 0, h if bias.shape[1] > 1 else 0, q_idx, kv_idx]
    return score


class _Kept(threading.local):
    """The mods of each form of call, for each thread its own, since calls write to them."""

    def __init__(self) -> None:
        self.mods: dict[tuple[object, ...], _Mods] = {}


_kept = _Kept()


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute one layer's attention; what transformers' attention interface calls.

    Args:
        module: the layer; its `is_causal` says what no mask means, as for transformers' "sdpa".
        query: [B, Hq, Lq, D]; key and value [B, Hkv, Lk, D].
        attention_mask: what `attention_mask` above returned; or torch's BlockMask, a tensor [B or 1, Hq or 1, Lq, Lk],
            bool or added to scores, or None.
        dropout: of the softmax weights.
        scaling: of the products; 1/sqrt(D) by default.
        is_causal: wins over the module's.
        softcap: caps scores at softcap * tanh(score / softcap).
        s_aux: [Hq], a sink for each head.
        position_bias: [B or 1, Hq or 1, Lq, Lk], added to scores; may require grad.

    Returns:
        [B, Lq, Hq, D], and None for the weights, which are never made.

    Raises:
        UnsupportedProblemError: attention_mask is none of those.
    """
    warn_of_interpreter(query, key)
    mask_mod, codes, bias = _read_mask(module, query, key, attention_mask, is_causal)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    blocks = attention_mask if _is_listed(attention_mask) else None
    if torch.compiler.is_dynamo_compiling():
        output = _traced(query, key, value, mask_mod, blocks, scaling, softcap, bias, s_aux, dropout)
    else:
        form = (codes, softcap, None if bias is None else (bias.shape[0] > 1, bias.shape[1] > 1))
        mods = _kept.mods.get(form)
        if mods is None:
            mods = _kept.mods[form] = _made(softcap, biased=bias is not None, masked=mask_mod is not None)
        mods.read(mask_mod, bias)
        output = mods.attention(
            query, key, value, scaling, block_table=blocks, sinks=s_aux, dropout_p=dropout if module.training else 0.0
        )
        mods.read(None, None)  # so that nothing outlives the model's forward
    return output.transpose(1, 2).contiguous(), None


def _is_listed(attention_mask: Any) -> bool:
    return isinstance(attention_mask, BlockMask) and not isinstance(attention_mask, LazyBlockMask)


def _read_mask(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, attention_mask: Any, is_causal: bool | None
) -> tuple[MaskFunction | None, tuple[object, ...], torch.Tensor | None]:
    """Return a mask_mod, what identifies its code, and what is added to scores; None for what there is not."""
    if isinstance(attention_mask, LazyBlockMask):
        return attention_mask.mask_mod, attention_mask.codes, None
    if isinstance(attention_mask, BlockMask):
        return attention_mask.mask_mod, ("blocks", getattr(attention_mask.mask_mod, "__code__", None)), None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return (_causal, ("causal",), None) if causal and query.shape[2] > 1 else (None, (), None)
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 4:
        refuse(
            "attention_mask is no mask of four dimensions",
            why="a layer gets what the model made of the user's mask, through transformers' mask interface",
            fix="pass the model a mask of two dimensions, [batch, positions], or a whole one of four",
        )
    whole = attention_mask[:, :, :, : key.shape[2]]
    if whole.dtype != torch.bool:
        return None, (), whole
    sizes = (whole.shape[0] > 1, whole.shape[1] > 1)
    return _table_mask(whole, sizes), ("table", sizes), None


def _causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _table_mask(table: torch.Tensor, sizes: tuple[bool, bool]) -> MaskFunction:
    by_batch, by_head = sizes

    def table_mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return table[b if by_batch else 0, h if by_head else 0, q_idx, kv_idx]

    return table_mask


def _traced(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask_mod: Any,
    blocks: Any,
    scaling: float | None,
    softcap: float | None,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout: float,
) -> Any:
    """Call the operator inside a region that torch.compile traces."""
    if dropout > 0:
        refuse(
            "dropout was asked for in a model that torch.compile traces",
            why="the traced call of this interface does not draw random numbers yet",
            fix="set the configuration's attention_dropout to 0, or do not compile the model",
        )

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return _scored(score, (b, h, q_idx, kv_idx), softcap, bias)

    score = None if softcap is None and bias is None else score_mod
    output, aux = call_traced(score, mask_mod, (), (query, key, value), scaling, AuxRequest(lse=True), blocks)
    return output if sinks is None else add_sinks(output, aux.lse, sinks, 1)[0]


__all__ = ["LazyBlockMask", "UnsupportedProblemError", "attention_forward", "attention_mask", "register"]

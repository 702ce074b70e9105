"""The public functions: `compile`, and `flex_attention` with torch's signature."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxOutput, AuxRequest
from flexgen.errors import OptionError, ProblemTypeError, UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.index_map import PACKED_QUERIES
from flexgen.options import Options
from flexgen.runtime.block_table import refuse_slice_without_mask_mod
from flexgen.runtime.describe import check_tensors
from flexgen.torch_library.traced import call_traced

__all__ = ["Attention", "AuxOutput", "AuxRequest", "Lowered", "compile", "flex_attention"]


def compile(
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
) -> Attention:
    """Compile attention with the given mods.

    Args:
        score_mod: score_mod(score, b, h, q_idx, kv_idx) -> score; None leaves scores as they are. `score` is
            float32, the scaled product; the indices are int64 scalars.
        mask_mod: mask_mod(b, h, q_idx, kv_idx) -> bool, True where the key is attended to; None attends everywhere.
        options: kernel options by Inductor's names, each also with the prefix fwd_ or bwd_, and layout.

    Returns:
        An Attention: call it with query, key and value. Kernels are compiled on first use for each configuration.

    Raises:
        OptionError: an unknown option, or a value that is not allowed.
    """
    return Attention(score_mod, mask_mod, Options.of(options))


# torch.compile steps over the call, or says this where it may not; the attributes are what torch.compiler.disable sets,
# which would load all of torch.compile.
compile._torchdynamo_disable = True  # type: ignore[attr-defined]
compile._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "flexgen.compile makes an Attention that keeps its kernels: move the call out of the compiled region"
)


def flex_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable[..., Any] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Any:
    """Compute attention with torch's signature and the meaning of torch's compiled flex_attention.

    Args:
        query, key, value: as for an Attention, in [B, H, L, D] order; nested tensors too, without a block_mask.
        score_mod: as in `compile`.
        block_mask: torch's BlockMask: only listed blocks are visited, its mask_mod applied on partial ones.
        scale: multiplies the products; 1/sqrt(Dqk) by default.
        enable_gqa: allow more query heads than key heads.
        return_lse: also return the logsumexp; superseded by return_aux.
        kernel_options: as `options` of `compile`; BACKEND="FLASH" is taken for "AUTO", with one warning, and so is
            "TRITON_DECODE" for calls that torch's decode kernels serve and flexgen's do not.
        return_aux: auxiliary outputs to return.
    """
    if not all(isinstance(tensor, torch.Tensor) for tensor in (query, key, value)):
        check_tensors(query, key, value, "bhsd")
    if not enable_gqa and query.dim() == 4 and key.dim() == 4 and query.shape[1] != key.shape[1]:
        raise UnsupportedProblemError(
            f"query has {query.shape[1]} heads and key {key.shape[1]}, and enable_gqa is False",
            fix="pass enable_gqa=True to share key heads between query heads",
        )
    if return_lse and return_aux is not None:
        raise OptionError(
            "return_lse=True and return_aux were both given",
            why="each says which auxiliary outputs to return, and in which form",
            fix="drop return_lse and pass return_aux=flexgen.AuxRequest(lse=True)",
        )
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        raise ProblemTypeError(
            f"block_mask is {type(block_mask).__name__}, not a BlockMask", fix="make one with flexgen.create_block_mask"
        )
    if block_mask is not None:
        refuse_slice_without_mask_mod(block_mask)
    if isinstance(kernel_options, dict) and "BACKEND" in kernel_options:
        kernel_options = _with_backend_of_flexgen(kernel_options, query, block_mask)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    request = AuxRequest(lse=True) if return_lse and return_aux is None else return_aux
    if torch.compiler.is_dynamo_compiling():
        options = tuple(sorted((kernel_options or {}).items()))
        result = call_traced(score_mod, mask_mod, options, (query, key, value), scale, request, block_mask)
    else:
        attention = _attention(score_mod, mask_mod, Options.of(kernel_options))
        result = attention(query, key, value, scale, request, block_table=block_mask)
    return (result[0], result[1].lse) if return_lse and return_aux is None else result


_told: set[str] = set()

_TORCHS_DECODE_LENGTH = 128  # from that many queries on, torch's decode kernels refuse too
_TORCHS_BACKENDS = {
    "FLASH": "is torch's CuTe backend, which flexgen does not contain",
    "TRITON_DECODE": f"serves up to {PACKED_QUERIES} queries without a block mask in flexgen",
}


def _with_backend_of_flexgen(options: dict[str, Any], query: torch.Tensor, block_mask: Any) -> dict[str, Any]:
    """Return kernel options with AUTO for a backend that torch has for a call and flexgen has not."""
    backend = options["BACKEND"]
    if options.get("FORCE_USE_FLEX_ATTENTION"):
        raise OptionError(
            f"BACKEND={backend!r} and FORCE_USE_FLEX_ATTENTION were both given",
            why="each says which kernel to use, and torch takes only one of them",
            fix="drop FORCE_USE_FLEX_ATTENTION; BACKEND='TRITON' is the general kernel",
        )
    if backend == "TRITON_DECODE" and query.dim() == 4:
        length = query.shape[2]
        replaced = length < _TORCHS_DECODE_LENGTH and (block_mask is not None or length > PACKED_QUERIES)
    else:
        replaced = backend == "FLASH"
    if not replaced:
        return options
    _warn_of_backend(backend)
    return {**options, "BACKEND": "AUTO"}


def _warn_of_backend(backend: str) -> None:
    if backend not in _told:
        _told.add(backend)
        warnings.warn(
            f'BACKEND="{backend}" {_TORCHS_BACKENDS[backend]}; BACKEND="AUTO" is used', UserWarning, stacklevel=4
        )


# torch.compile runs it while it traces.
_warn_of_backend._dynamo_marked_constant = True  # type: ignore[attr-defined]


_attentions: dict[tuple[Any, ...], Attention] = {}
_latest: dict[tuple[Any, ...], Attention] = {}  # by the code of the mods
_MAX_ATTENTIONS = 256


def _attention(score_mod: Any, mask_mod: Any, options: Options) -> Attention:
    """Return the Attention of these callables, made once; the oldest are dropped when there are many."""
    key = (id(score_mod), id(mask_mod), options)  # callables may be unhashable, or equal without being the same
    found = _attentions.get(key)
    if found is None or found.score_mod is not score_mod or found.mask_mod is not mask_mod:
        # A decode step may bring fresh closures of the code of the step before, as torch's PagedAttention makes them.
        of_code = (_code(score_mod), _code(mask_mod), options)
        like = _latest.get(of_code)
        found = compile(score_mod, mask_mod, options) if like is None else like.of_the_same_code(score_mod, mask_mod)
        for kept, at in ((_attentions, key), (_latest, of_code)):
            if len(kept) >= _MAX_ATTENTIONS:
                kept.pop(next(iter(kept)))
            kept[at] = found
    return found


def _code(mod: Any) -> Any:
    """Return what fresh mods of the same code have in common."""
    return getattr(mod, "__code__", type(mod))

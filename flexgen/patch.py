"""`patch_torch`: code that calls torch's flex_attention and create_block_mask runs flexgen instead."""

from __future__ import annotations

import inspect
import math
import threading
import types
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import flex_attention as torch_flex

from flexgen.api import flex_attention
from flexgen.block_mask import create_block_mask
from flexgen.errors import UnsupportedProblemError

# The interpreter's time for a million (query, key) pairs of one head; head dims 64 and 128 in float32 took 0.06 to 0.12
# on one core of a server, triton 3.7, 2026-12.
SECONDS_PER_MILLION_PAIRS = 0.1

_lock = threading.RLock()
_saved: dict[str, _Saved] = {}
_open = 0  # patches that have not been undone
_told: set[str] = set()


class patch_torch:
    """Make torch's `flex_attention` and `create_block_mask` run flexgen, for the whole process, until undone.

    What takes effect is a call: `flexgen.patch_torch()`. Its result undoes it with `undo()`, or at the end of a `with`
    block, also when that is left by an exception. Patches may be nested, in any order and from several threads: torch's
    own functions are back when the last one is undone.

    The function objects stay what they are, and their code is exchanged. So every name for them is reached, whenever it
    was imported: `from ... import flex_attention`, aliases, defaults, partials, and `torch.compile(flex_attention)`.
    Regions that torch.compile has compiled before are compiled again, and again when the patch is undone. Not reached
    are programs that hold torch's operator itself: exported ones, and calls of
    `torch.ops.higher_order.flex_attention`.

    BlockMask, AuxRequest and the combinators of masks stay torch's, which flexgen takes. `create_block_mask` ignores
    `_compile`, as it needs none.

    On the CPU, where kernels are interpreted, the first call warns with an estimate of the time.

    Raises:
        UnsupportedProblemError: something else has replaced one of the two functions by an object without code.
    """

    def __init__(self) -> None:
        global _open
        self._undone = False
        with _lock:
            if _open == 0:
                _exchange()
            _open += 1

    def undo(self) -> None:
        """Take the patch back; once is enough, and more does nothing."""
        global _open
        with _lock:
            if self._undone:
                return
            self._undone = True
            _open -= 1
            if _open == 0:
                _restore()

    def __enter__(self) -> patch_torch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a function of torch was."""

    function: types.FunctionType
    code: types.CodeType
    defaults: tuple[Any, ...] | None
    keyword_defaults: dict[str, Any] | None


def _exchange() -> None:
    found = {name: getattr(torch_flex, name) for name in _REDIRECTIONS}
    for name, function in found.items():
        if not isinstance(function, types.FunctionType) or function.__closure__:
            raise UnsupportedProblemError(
                f"torch.nn.attention.flex_attention.{name} is {function!r}",
                why="something has replaced torch's function, and only a plain function's code can be exchanged",
                fix="call flexgen.patch_torch() before that",
            )
    for name, function in found.items():
        redirection = _REDIRECTIONS[name]
        _saved[name] = _Saved(function, function.__code__, function.__defaults__, function.__kwdefaults__)
        signature = inspect.signature(function)
        _set(function, redirection.__code__, redirection.__defaults__, redirection.__kwdefaults__)
        function.__signature__ = signature


def _restore() -> None:
    for saved in _saved.values():
        del saved.function.__signature__  # type: ignore[attr-defined]
        _set(saved.function, saved.code, saved.defaults, saved.keyword_defaults)
    _saved.clear()


def _set(
    function: types.FunctionType,
    code: types.CodeType,
    defaults: tuple[Any, ...] | None,
    keyword_defaults: dict[str, Any] | None,
) -> None:
    function.__code__ = code
    function.__defaults__ = defaults
    function.__kwdefaults__ = keyword_defaults


# The code that torch's functions are given. It runs with the globals of torch's module, so it imports what it calls.


def _redirected_attention(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    from flexgen import patch

    patch.warn_of_interpreter(query, key)
    return patch.flex_attention(
        query,
        key,
        value,
        score_mod,
        block_mask,
        scale,
        enable_gqa,
        return_lse,
        kernel_options,
        return_aux=return_aux,
    )


def _redirected_block_mask(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: Any = False,
    separate_full_blocks: Any = True,
    compute_dq_write_order: Any = False,
    dq_kv_order: Any = True,
) -> Any:
    from flexgen import patch

    return patch.create_block_mask(
        mask_mod,
        B,
        H,
        Q_LEN,
        KV_LEN,
        device=device,
        BLOCK_SIZE=BLOCK_SIZE,
        separate_full_blocks=separate_full_blocks,
        compute_dq_write_order=compute_dq_write_order,
        dq_kv_order=dq_kv_order,
    )


def _redirected_block_mask_before_2_13(
    mask_mod: Any,
    B: Any,
    H: Any,
    Q_LEN: Any,
    KV_LEN: Any,
    device: Any = None,
    BLOCK_SIZE: Any = 128,
    _compile: Any = False,
) -> Any:
    from flexgen import patch

    return patch.create_block_mask(mask_mod, B, H, Q_LEN, KV_LEN, device=device, BLOCK_SIZE=BLOCK_SIZE)


# With torch's parameters, whichever version it is: torch.compile may know them from before.
_REDIRECTIONS: Mapping[str, Any] = {
    "flex_attention": _redirected_attention,
    "create_block_mask": _redirected_block_mask
    if "compute_dq_write_order" in inspect.signature(torch_flex.create_block_mask).parameters
    else _redirected_block_mask_before_2_13,
}

__all__ = ["create_block_mask", "flex_attention", "patch_torch", "warn_of_interpreter"]


def warn_of_interpreter(query: object, key: object) -> None:
    """Warn once a process that a call on the CPU is interpreted, with an estimate of the time it takes.

    What is no attention problem passes silently: the call itself refuses it.
    """
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor)) or query.device.type != "cpu":
        return
    if torch.compiler.is_dynamo_compiling() or query.is_nested or key.is_nested or query.dim() != 4 or key.dim() != 4:
        _warn_once(None)
    else:
        _warn_once(math.prod(query.shape[:3]) * key.shape[2])


def _warn_once(pairs: int | None) -> None:
    if "interpreter" in _told:
        return
    _told.add("interpreter")
    rate = f"about {SECONDS_PER_MILLION_PAIRS} s for a million (query, key) pairs of a head that the mask does not skip"
    known = "" if pairs is None else f": up to {pairs / 1e6 * SECONDS_PER_MILLION_PAIRS:.1g} s for this call"
    warnings.warn(
        f"flexgen interprets its kernels on the CPU, which is for checking and not for work; it takes {rate}{known}, "
        "and a few times as long for a backward",
        UserWarning,
        stacklevel=4,
    )


# torch.compile runs it while it traces.
_warn_once._dynamo_marked_constant = True  # type: ignore[attr-defined]

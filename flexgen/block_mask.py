"""The public makers of masks and block masks, with torch's meaning and keywords, in bounded memory."""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask as BlockMask  # torch's own is flexgen's

from flexgen.block_states import BlockStates
from flexgen.errors import OptionError
from flexgen.runtime.mask_counts import MaskGrid
from flexgen.runtime.mask_evaluation import CalledMask, IndexBox, Mod, evaluate_mask, evaluate_score
from flexgen.torch_library.traced_masks import traced_mask, traced_states

DeviceLike: TypeAlias = torch.device | str | int

DEFAULT_BLOCK_SIZE = 128
_MASK_ARGUMENTS = 4  # of a mask_mod; a score_mod takes one more


def create_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
    BLOCK_SIZE: int | Sequence[int] = DEFAULT_BLOCK_SIZE,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """Return torch's BlockMask of a mask_mod, as `torch.nn.attention.flex_attention.create_block_mask` would.

    Memory grows with the number of blocks and not with Q_LEN * KV_LEN. A small mask is evaluated tile by tile; of a
    large one, on a GPU, generated kernels evaluate only the blocks that interval arithmetic does not decide.

    Args:
        mask_mod: `mask_mod(b, h, q_idx, kv_idx) -> bool`, called on 0-d integer tensors.
        B: the batch size the mask is made for; None if it is the same for each, like 1.
        H: the number of query heads it is made for; None if it is the same for each, like 1.
        Q_LEN: the number of queries; 0 gives a mask of no rows.
        KV_LEN: the number of keys; 0 gives a mask of no columns.
        device: where it is evaluated and stored; by default the accelerator if there is one, else the CPU.
        BLOCK_SIZE: the side of a block, or (query side, key side); any positive size, dividing the lengths or not.
        _compile: hand the creation to torch's own compiled one, which torch deprecates.
        separate_full_blocks: list fully live blocks apart, so that kernels skip mask_mod there.
        compute_dq_write_order: also compute the orders torch's deterministic backward needs (torch 2.13 on).
        dq_kv_order: the order of those: True for descending key blocks, False for ascending.

    Returns:
        A BlockMask with int32 lists of shape [B, H, ceil(Q_LEN / query side), ceil(KV_LEN / key side)].

    Raises:
        OptionError: an argument is malformed, or this torch lacks what it asks for.
        CaptureError: mask_mod raised, branched on an index, or did not return one bool.
    """
    if torch.compiler.is_dynamo_compiling():
        sides = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
        grid = MaskGrid(_or_one(B), _or_one(H), Q_LEN, KV_LEN, *sides)
        block_mask = _from_states(
            traced_states(mask_mod, grid, _traced_device(device)), mask_mod, grid, separate_full_blocks
        )
        if compute_dq_write_order:
            _add_dq_write_order(block_mask, dq_kv_order)
        return block_mask
    _require_mask_mod(mask_mod)
    grid = _grid(B, H, Q_LEN, KV_LEN, BLOCK_SIZE)
    if not isinstance(dq_kv_order, bool):
        raise OptionError(f"dq_kv_order is {dq_kv_order!r}", why="only the two orders True and False can be computed")
    if compute_dq_write_order:
        _require_torch("compute_dq_write_order", compute_dq_write_order)
    place = _device(device)
    if _compile:
        wanted = {
            "separate_full_blocks": separate_full_blocks,
            "compute_dq_write_order": compute_dq_write_order,
            "dq_kv_order": dq_kv_order,
        }
        return _compiled_by_torch(mask_mod, grid, place, wanted)
    states = _states.exact(mask_mod, CalledMask(mask_mod), grid, place)
    block_mask = _from_states(states, mask_mod, grid, separate_full_blocks)
    if compute_dq_write_order:
        _add_dq_write_order(block_mask, dq_kv_order)
    return block_mask


def create_mask(
    mod_fn: Mod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: DeviceLike | None = None,
) -> torch.Tensor:
    """Return the whole mask, bool [B or 1, H or 1, Q_LEN, KV_LEN].

    Args:
        mod_fn: a mask_mod, or a score_mod, whose mask is where a score of 0 does not become -inf.
        B: the batch size, or None for 1.
        H: the number of query heads, or None for 1.
        Q_LEN: the number of queries.
        KV_LEN: the number of keys.
        device: where it is made; by default the accelerator if there is one, else the CPU.

    Raises:
        OptionError: an argument is malformed.
        CaptureError: the mod raised, branched on an index, or did not return one value of the right kind.
    """
    if torch.compiler.is_dynamo_compiling():
        lengths = (_or_one(B), _or_one(H), Q_LEN, KV_LEN)
        return traced_mask(mod_fn, lengths, _traced_device(device), scores=len(_required(mod_fn)) > _MASK_ARGUMENTS)
    grid = _grid(B, H, Q_LEN, KV_LEN, DEFAULT_BLOCK_SIZE)
    shape = (grid.batch, grid.heads, grid.query_length, grid.key_length)
    place = _device(device)
    scores = _takes_a_score(mod_fn)
    if 0 in shape:
        return torch.zeros(shape, dtype=torch.bool, device=place)
    box = IndexBox(*map(range, shape))
    if scores:
        return ~torch.isneginf(evaluate_score(mod_fn, box, place))
    return evaluate_mask(mod_fn, box, place)


def and_masks(*mask_mods: Mod) -> Mod:
    """Return the mask_mod that allows what each of `mask_mods` allows; without any, everything."""
    _require_callables(mask_mods)

    def and_mask(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        allowed = [mask_mod(b, h, q_idx, kv_idx) for mask_mod in mask_mods]
        return functools.reduce(operator.and_, allowed) if allowed else b.new_ones((), dtype=torch.bool)

    return and_mask


def or_masks(*mask_mods: Mod) -> Mod:
    """Return the mask_mod that allows what any of `mask_mods` allows; without any, nothing."""
    _require_callables(mask_mods)

    def or_mask(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        allowed = [mask_mod(b, h, q_idx, kv_idx) for mask_mod in mask_mods]
        return functools.reduce(operator.or_, allowed) if allowed else b.new_zeros((), dtype=torch.bool)

    return or_mask


def noop_mask(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
    """Allow every query every key."""
    return b.new_ones((), dtype=torch.bool)


_states = BlockStates()


def _from_states(states: torch.Tensor, mask_mod: Mod, grid: MaskGrid, separate_full_blocks: bool) -> BlockMask:
    """List the live blocks, full ones apart if asked to."""
    live, full = states > 0, states == 2
    num_blocks, indices = _listed(live & ~full if separate_full_blocks else live)
    full_num_blocks, full_indices = _listed(full) if separate_full_blocks else (None, None)
    return BlockMask.from_kv_blocks(
        num_blocks,
        indices,
        full_num_blocks,
        full_indices,
        BLOCK_SIZE=(grid.q_block_size, grid.kv_block_size),
        mask_mod=mask_mod,
        seq_lengths=(grid.query_length, grid.key_length),
    )


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks each row has and their columns, ascending, before those of the other columns."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), order.to(torch.int32, memory_format=torch.contiguous_format)


def _add_dq_write_order(block_mask: Any, dq_kv_order: bool) -> None:
    compute = getattr(torch_flex, "_compute_dq_write_order_from_block_mask", None)
    if compute is None:
        raise _needs_newer_torch("compute_dq_write_order", True)
    block_mask.dq_write_order, block_mask.dq_write_order_full = compute(block_mask, dq_kv_order=dq_kv_order)
    block_mask.dq_kv_order_spt = dq_kv_order


def _compiled_by_torch(mask_mod: Mod, grid: MaskGrid, device: torch.device, wanted: dict[str, bool]) -> BlockMask:
    defaults = {name: parameter.default for name, parameter in inspect.signature(create_block_mask).parameters.items()}
    asked = {name: value for name, value in wanted.items() if value != defaults[name]}
    for name, value in asked.items():
        _require_torch(name, value)
    lengths = (grid.batch, grid.heads, grid.query_length, grid.key_length)
    block_size = (grid.q_block_size, grid.kv_block_size)
    return torch_flex.create_block_mask(
        mask_mod, *lengths, device=device, BLOCK_SIZE=block_size, _compile=True, **asked
    )


def _require_torch(keyword: str, value: object) -> None:
    if keyword not in inspect.signature(torch_flex.create_block_mask).parameters:
        raise _needs_newer_torch(keyword, value)


def _needs_newer_torch(keyword: str, value: object) -> OptionError:
    return OptionError(
        f"{keyword}={value!r} needs a newer torch than {torch.__version__}",
        why="torch's BlockMask of this version has no place for the result",
        fix=f"use torch 2.13, or leave {keyword} out",
    )


def _grid(B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, BLOCK_SIZE: int | Sequence[int]) -> MaskGrid:
    sides = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else tuple(BLOCK_SIZE)
    if len(sides) != 2:
        raise OptionError(f"BLOCK_SIZE is {BLOCK_SIZE!r}", fix="give one size, or a pair (query side, key side)")
    return MaskGrid(
        batch=1 if B is None else _size("B", B, at_least=0),
        heads=1 if H is None else _size("H", H, at_least=0),
        query_length=_size("Q_LEN", Q_LEN, at_least=0),
        key_length=_size("KV_LEN", KV_LEN, at_least=0),
        q_block_size=_size("BLOCK_SIZE", sides[0], at_least=1),
        kv_block_size=_size("BLOCK_SIZE", sides[1], at_least=1),
    )


def _or_one(size: int | None) -> int:
    return 1 if size is None else size


def _required(mod: Any) -> list[str]:
    """Return the arguments that a mod must be called with, told so that torch.compile can trace it."""
    if isinstance(mod, functools.partial):
        return [name for name in _required(mod.func)[len(mod.args) :] if name not in mod.keywords]
    if isinstance(mod, types.MethodType):
        return _required(mod.__func__)[1:]
    code = getattr(mod, "__code__", None)
    if code is None:
        return _required(mod.__call__)
    return list(code.co_varnames[: code.co_argcount - len(mod.__defaults__ or ())])


def _size(name: str, value: object, at_least: int) -> int:
    try:
        size = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = -1
    if size < at_least:
        raise OptionError(f"{name} is {value!r}", fix=f"give a whole number of at least {at_least}")
    return size


def _device(device: DeviceLike | None) -> torch.device:
    if device is not None:
        try:
            return torch.device(device)
        except (RuntimeError, TypeError) as error:
            why = str(error).partition("\n")[0]
            raise OptionError(
                f"{device!r} is no device", why=why, fix='give "cuda" or "cpu", or leave it out'
            ) from error
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


# torch.compile runs it while it traces and takes the result for a constant.
def _traced_device(device: DeviceLike | None) -> torch.device:
    return _device(device)


_traced_device._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _require_callables(mask_mods: Sequence[object]) -> None:
    for mask_mod in mask_mods:
        if not callable(mask_mod):
            raise OptionError(f"{mask_mod!r} is no mask_mod", fix="pass callables mask_mod(b, h, q_idx, kv_idx)")


def _require_mask_mod(mask_mod: object) -> None:
    if _takes_a_score(mask_mod):
        raise OptionError(
            "create_block_mask got a score_mod",
            why="a block mask lists where mask_mod(b, h, q_idx, kv_idx) allows something; a score_mod changes scores",
            fix="return a bool of the four indices; create_mask takes a score_mod",
        )


def _takes_a_score(mod: object) -> bool:
    """Return whether `mod` is a score_mod (five arguments) and not a mask_mod (four)."""
    if not callable(mod):
        raise OptionError(f"{mod!r} is no mod", fix="pass a callable mask_mod(b, h, q_idx, kv_idx)")
    signature = inspect.signature(mod)
    for count in (4, 5):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 5
    raise OptionError(
        f"the mod takes {signature}",
        why="a mask_mod is called with four arguments and a score_mod with five",
        fix="define mask_mod(b, h, q_idx, kv_idx) or score_mod(score, b, h, q_idx, kv_idx)",
    )

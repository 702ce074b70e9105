"""Checks of kv_lengths, the number of keys that each batch row has."""

from __future__ import annotations

from typing import Any

import torch

from flexgen.errors import ProblemTypeError, UnsupportedProblemError

DTYPES = (torch.int32, torch.int64)


def check_kv_lengths(kv_lengths: Any, query: torch.Tensor, kv_len: int, *, validate: bool) -> None:
    """Refuse what is no number of keys for each batch row.

    Args:
        query: in [B, H, L, D] order.
        kv_len: keys that there is room for.
        validate: look at the numbers too; waits for the device.

    Raises:
        ProblemTypeError: no integer tensor.
        UnsupportedProblemError: another shape or device; with `validate`, a number outside of 0 to kv_len.
    """
    if not isinstance(kv_lengths, torch.Tensor) or kv_lengths.dtype not in DTYPES:
        found = kv_lengths.dtype if isinstance(kv_lengths, torch.Tensor) else type(kv_lengths).__name__
        raise ProblemTypeError(
            f"kv_lengths is {found}, not an int32 or int64 tensor",
            why="kernels read it on the device, so that one launch serves every step",
            fix="pass torch.tensor([...], dtype=torch.int32, device=query.device)",
        )
    if kv_lengths.dim() != 1 or kv_lengths.shape[0] != query.shape[0]:
        raise UnsupportedProblemError(
            f"kv_lengths has shape {tuple(kv_lengths.shape)}, and the query has batch size {query.shape[0]}",
            why="each batch row has one number of keys",
            fix=f"pass a tensor of shape ({query.shape[0]},)",
        )
    if kv_lengths.device != query.device:
        raise UnsupportedProblemError(
            f"kv_lengths is on {kv_lengths.device}, query on {query.device}",
            fix=f"move kv_lengths to {query.device}",
        )
    if validate:
        _check_numbers(kv_lengths, kv_len)


def _check_numbers(kv_lengths: torch.Tensor, kv_len: int) -> None:
    wrong = ((kv_lengths < 0) | (kv_lengths > kv_len)).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise UnsupportedProblemError(
            f"kv_lengths[{row}] is {int(kv_lengths[row])}, outside of 0 to {kv_len}",
            why=f"key and value have room for {kv_len} keys; kernels clamp the number without saying so",
            fix="pass the number of keys that are written, of this batch row",
        )

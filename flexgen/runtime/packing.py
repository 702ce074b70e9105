"""Sequences packed along the length: where each one begins, and what must hold of that."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.runtime.wrappers import is_wrapper, refuse_wrapper

DTYPES = (torch.int32, torch.int64)
MOST_SEQUENCES = 1 << 24  # index arithmetic counts on batch numbers below this
FROM_LENGTHS = "torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where packed sequences begin: the tokens of sequence i are [cu_seqlens[i], cu_seqlens[i + 1]).

    Attributes:
        cu_seqlens_q: [sequences + 1], int32 or int64, on the device of the tensors.
        cu_seqlens_k: the same of keys; None where keys are packed as queries are.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.cu_seqlens_q,) if self.cu_seqlens_k is None else (self.cu_seqlens_q, self.cu_seqlens_k)

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """Return the offsets of both sides by name."""
        keys = self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k
        return {"cu_seqlens_q": self.cu_seqlens_q, "cu_seqlens_k": keys}

    @property
    def form(self) -> Hashable:
        """Return everything that a prepared launch depends on: not the contents, nor the address."""
        return tuple([(t.shape, t.stride(), t.dtype, t.device) for t in self.tensors])


def packing_of(cu_seqlens_q: Any, cu_seqlens_k: Any) -> Packing | None:
    """Return what a call's arguments say; None where both are None.

    Raises:
        ProblemTypeError: they are no tensors, or queries have none.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None:
        return None
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is not None and not isinstance(offsets, torch.Tensor):
            raise ProblemTypeError(
                f"{name} is {type(offsets).__name__}, not a tensor",
                why="kernels read it on the device, so that no length is waited for",
                fix=f"make it a tensor on the query's device, for example {FROM_LENGTHS}",
            )
    if cu_seqlens_q is None:
        raise ProblemTypeError(
            "cu_seqlens_k was given without cu_seqlens_q",
            why="queries and keys belong to the sequence of the same number",
            fix="pass both; without cu_seqlens_k, keys are packed as queries are",
        )
    return Packing(cu_seqlens_q, cu_seqlens_k)


def check_packing(packing: Packing, query: torch.Tensor, key: torch.Tensor) -> None:
    """Refuse offsets that do not go with the tensors, as far as that shows without reading them.

    Args:
        query, key: in [B, H, L, D] order.

    Raises:
        ProblemTypeError, UnsupportedProblemError: says what is wrong with them.
    """
    for name, offsets in packing.named.items():
        _check_offsets(name, offsets, query)
    queries, keys = packing.named.values()
    if queries.shape[0] != keys.shape[0] or queries.dtype != keys.dtype:
        raise UnsupportedProblemError(
            f"cu_seqlens_q has {queries.shape[0]} entries of {queries.dtype}, "
            f"cu_seqlens_k has {keys.shape[0]} of {keys.dtype}",
            why="queries and keys belong to the sequence of the same number",
            fix="give both one entry more than there are sequences, in one dtype",
        )
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise UnsupportedProblemError(
            f"query has batch size {query.shape[0]} and key {key.shape[0]}, and cu_seqlens were given",
            why="packed sequences lie one after the other along the length, in a batch of 1",
            fix="pack them along the length, or leave cu_seqlens out",
        )
    if packing.cu_seqlens_k is None and query.shape[2] != key.shape[2]:
        raise UnsupportedProblemError(
            f"query holds {query.shape[2]} tokens and key {key.shape[2]}, and cu_seqlens_k was left out",
            why="without cu_seqlens_k, keys are packed as queries are",
            fix="pass cu_seqlens_k",
        )


def _check_offsets(name: str, offsets: torch.Tensor, query: torch.Tensor) -> None:
    if offsets.dtype not in DTYPES:
        raise ProblemTypeError(
            f"{name} has dtype {offsets.dtype}", why="it counts tokens", fix=f"pass int32 or int64: {name}.int()"
        )
    if offsets.dim() != 1 or not 1 <= offsets.shape[0] <= MOST_SEQUENCES or offsets.stride(0) != 1:
        raise UnsupportedProblemError(
            f"{name} has shape {tuple(offsets.shape)} and strides {offsets.stride()}",
            why="it lists where each sequence begins, and where the last one ends, one after the other in memory",
            fix=f"pass [sequences + 1] entries, for example {FROM_LENGTHS}",
        )
    if not is_wrapper(query):
        refuse_wrapper(name, offsets)
    if offsets.device != query.device and not query.is_meta:
        raise UnsupportedProblemError(
            f"{name} is on {offsets.device}, query on {query.device}",
            why="kernels read it on the device, so that no length is waited for",
            fix=f"move it once, where it is made: {name}.to({str(query.device)!r})",
        )


def check_contents(packing: Packing, query: torch.Tensor, key: torch.Tensor) -> None:
    """Check what the offsets say; waits for the device.

    Args:
        query, key: in [B, H, L, D] order.

    Raises:
        UnsupportedProblemError: names the first entry that is wrong.
    """
    for (name, offsets), total in zip(packing.named.items(), (query.shape[2], key.shape[2]), strict=True):
        if not offsets.is_meta and not query.is_meta:
            _check_entries(name, offsets.tolist(), total)


def _check_entries(name: str, entries: list[int], total: int) -> None:
    if entries[0] != 0:
        raise UnsupportedProblemError(
            f"{name}[0] is {entries[0]}, not 0",
            why="the first sequence begins at the first token",
            fix=f"begin with 0, as {FROM_LENGTHS} does",
        )
    for at, (begin, end) in enumerate(itertools.pairwise(entries)):
        if end < begin:
            raise UnsupportedProblemError(
                f"{name}[{at + 1}] is {end}, less than {name}[{at}], which is {begin}",
                why=f"sequence {at} would have {end - begin} tokens; entries are sums of lengths, not lengths",
                fix=f"sum them up: {FROM_LENGTHS}",
            )
    if entries[-1] > total:
        raise UnsupportedProblemError(
            f"{name}[{len(entries) - 1}] is {entries[-1]}, and there are {total} tokens",
            why="the last sequence would reach past the end of the tensor, which kernels do not check",
            fix="end at the number of tokens, or before it: the rest belongs to no sequence",
        )


def refuse_lengths(sides: Collection[str]) -> None:
    """Refuse what gives each entry of a batch its own keys.

    Args:
        sides: names of what the call brings besides query, key and value.

    Raises:
        UnsupportedProblemError: kv_lengths or page_table is among them.
    """
    wrong = [name for name in ("kv_lengths", "page_table") if name in sides]
    if wrong:
        raise UnsupportedProblemError(
            f"{wrong[0]} was given for packed sequences (cu_seqlens, or nested tensors)",
            why="it has a row for each entry of the batch, and packed sequences are all one entry",
            fix="leave it out: cu_seqlens_k says how many keys each sequence has; or pad the queries to a batch",
        )


def refuse_table() -> UnsupportedProblemError:
    """Return the error for a block mask beside packed sequences."""
    return UnsupportedProblemError(
        "a block mask or table was given for packed sequences (cu_seqlens, or nested tensors)",
        why="a block mask lists the blocks of one length, and each packed sequence has a length of its own",
        fix="leave it out, and pass the mask itself to flexgen.compile: its bounds hold for each sequence",
    )

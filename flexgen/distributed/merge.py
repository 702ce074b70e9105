"""Adds up attention over parts of the keys: each part's output weighs as much as its sum of exponentials."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class MergedRows:
    """The results of the queries of one chunk, of which parts arrive one after the other.

    While a single part covers all rows, its output is kept as the kernel wrote it. Else outputs are added up in float32
    (of float64 in float64); so are logsumexps, or in float64 where kernels give them in two numbers.

    Args:
        rows: how many queries.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._output: Tensor | None = None
        self._logsumexp: Tensor | None = None
        self._max_scores: Tensor | None = None
        self._is_single = False

    def add(self, start: int, part: Mapping[str, Tensor]) -> None:
        """Add what a kernel returned.

        Args:
            start: which of the rows is the part's first.
            part: "output" [B, Hq, n, Dv] and "logsumexp" [B, Hq, n]; perhaps "logsumexp_tail" and "max_scores".
        """
        output, logsumexp = part["output"], _whole_logsumexp(part)
        if self._output is None and output.shape[2] == self._rows:
            self._output, self._logsumexp, self._max_scores = output, logsumexp, part.get("max_scores")
            self._is_single = True
            return
        self._make_room(part)
        assert self._output is not None and self._logsumexp is not None
        rows = slice(start, start + output.shape[2])
        before, own = self._logsumexp[:, :, rows], self._output[:, :, rows]
        after = torch.logaddexp(before, logsumexp)
        own.mul_(_weight(before, after, own)).addcmul_(output, _weight(logsumexp, after, own))
        before.copy_(after)
        if self._max_scores is not None:
            largest = self._max_scores[:, :, rows]
            largest.copy_(torch.maximum(largest, part["max_scores"]))

    def _make_room(self, part: Mapping[str, Tensor]) -> None:
        """Make sums of all rows, that may be written to."""
        accumulator = part["logsumexp"].dtype
        if self._is_single:
            assert self._output is not None
            self._output, self._is_single = self._output.to(accumulator), False
        if self._output is not None:
            return
        batch, heads, _, columns = part["output"].shape
        self._output = part["output"].new_zeros((batch, heads, self._rows, columns), dtype=accumulator)
        self._logsumexp = _nothing(_whole_logsumexp(part), self._rows)
        if "max_scores" in part:
            self._max_scores = _nothing(part["max_scores"], self._rows)

    def write(self, outputs: Mapping[str, Tensor], start: int) -> None:
        """Write the results into those of a rank.

        Args:
            outputs: "output", "logsumexp", and perhaps "logsumexp_tail" and "max_scores", of all rows of a rank.
            start: which row of the rank's is the first of these.
        """
        rows = slice(start, start + self._rows)
        if self._output is None or self._logsumexp is None:  # no query sees a key
            outputs["output"][:, :, rows].zero_()
            for name in outputs.keys() & {"logsumexp", "max_scores"}:
                outputs[name][:, :, rows].fill_(float("-inf"))
            return
        outputs["output"][:, :, rows].copy_(self._output)
        outputs["logsumexp"][:, :, rows].copy_(self._logsumexp)
        if "logsumexp_tail" in outputs:
            rounded = outputs["logsumexp"][:, :, rows]
            tail = torch.where(self._logsumexp.isinf(), 0.0, self._logsumexp - rounded)
            outputs["logsumexp_tail"][:, :, rows].copy_(tail)
        if self._max_scores is not None:
            outputs["max_scores"][:, :, rows].copy_(self._max_scores)


def _whole_logsumexp(part: Mapping[str, Tensor]) -> Tensor:
    """Return the logsumexp, in float64 where a part of it was too small for the first number."""
    tail = part.get("logsumexp_tail")
    return part["logsumexp"] if tail is None else part["logsumexp"].double() + tail.double()


def _nothing(like: Tensor, rows: int) -> Tensor:
    """Return what there is before any key: -inf in each row."""
    return like.new_full((*like.shape[:2], rows), float("-inf"))


def _weight(part: Tensor, total: Tensor, output: Tensor) -> Tensor:
    """Return what an output's rows are multiplied by, in its dtype: 0 where nothing was seen at all."""
    weight = torch.where(total == float("-inf"), 0.0, torch.exp(part - total))
    return weight.unsqueeze(-1).to(output.dtype)

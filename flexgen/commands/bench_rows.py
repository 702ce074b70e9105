"""Runs the contenders of `flexgen bench` and makes rows of their times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flexgen.commands.contenders import Direction, Peer, decoding, peers
from flexgen.commands.predict import predict
from flexgen.commands.subject import Subject
from flexgen.runtime.apart import apart
from flexgen.runtime.describe import to_bhsd
from flexgen.runtime.timed_call import timed_call
from flexgen.runtime.timing import Contender, Stopwatch, Times, interleaved
from flexgen.work import useful_flops

SEED = 0


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One contender in one direction.

    Attributes:
        times: None where it did not run.
        flops: useful ones of a call, over live pairs.
        least_ms: what the chip's units need for flexgen's kernels at least; None without rates.
        apart: relative difference of its result from flexgen's, by Frobenius norms.
        remark: why it did not run.
    """

    direction: Direction
    contender: str
    times: Times | None
    flops: int
    least_ms: float | None
    apart: float = 0.0
    remark: str = ""

    @property
    def tflops(self) -> float | None:
        """TFLOP/s over live pairs."""
        return self.flops / self.times.median / 1e9 if self.times else None


MakePeers = Callable[[Subject, Any, torch.device], Any]


def bench(
    subject: Subject,
    direction: Direction,
    target: str,
    device: torch.device,
    stopwatch: Stopwatch,
    rounds: int,
    make_peers: MakePeers = peers,
) -> list[BenchRow]:
    """Time every contender in one direction.

    Args:
        make_peers: what there is to compare, as `contenders.peers`.
    """
    subject = decoding(subject) if direction == "decode" else subject
    backward = direction == "backward"
    lowered = subject.lower(target, backward=backward)
    works = predict(subject, lowered)
    least = [work.bound.seconds * 1e3 for work in (works[1:] if backward else works[:1]) if work.bound]
    flops = useful_flops(subject.shape, works[0].visited.live, backward=backward)
    layout = subject.attention.options.layout
    query, key, value = (to_bhsd(tensor, layout).contiguous() for tensor in subject.tensors(device, seed=SEED))
    calls: dict[str, Contender] = {}
    results: dict[str, Sequence[Tensor]] = {}
    refused: dict[str, str] = {}
    for peer in make_peers(subject, lowered.understood.mods, device):
        try:
            calls[peer.name], results[peer.name] = _started(peer, (query, key, value), direction)
        except Exception as error:  # another project's failure is a remark of the table, not ours
            if not refused and not calls:
                raise  # flexgen's own, which comes first
            refused[peer.name] = _first_line(peer, error)
    times = interleaved(calls, rounds, stopwatch)
    own = next(iter(results.values()))
    least_ms = sum(least) if least else None
    rows = [BenchRow(direction, name, times[name], flops, least_ms, apart(results[name], own)) for name in calls]
    return rows + [BenchRow(direction, name, None, flops, least_ms, remark=why) for name, why in refused.items()]


def _started(
    peer: Peer, tensors: tuple[Tensor, Tensor, Tensor], direction: Direction
) -> tuple[Contender, Sequence[Tensor]]:
    """Return the call of a contender, and its result."""
    if peer.attend is None:
        raise NotImplementedError(peer.refusal)
    call = timed_call(peer.attend, tensors, backward=direction == "backward")
    found: Any = call()
    return call, ([found] if isinstance(found, Tensor) else found)


def _first_line(peer: Peer, error: Exception) -> str:
    if peer.refusal:
        return peer.refusal
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"

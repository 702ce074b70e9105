"""`Dropout`: what a run needs to know to drop softmax weights, and the numbers that kernels take of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

SEED = "dropout_seed"  # the tensor, among a launch's
WORDS = 1 << 32  # of which each weight draws one


@dataclass(frozen=True, slots=True)
class Dropout:
    """Dropout of softmax weights.

    Attributes:
        p: the probability that a weight is dropped, from 0 to 1; what is kept is divided by 1 - p.
        seed: int64 [2] on the query's device, the seed and the offset of the random numbers; kernels read it from
            memory, so that a replayed graph sees what was drawn for it.
    """

    p: float
    seed: torch.Tensor

    def numbers(self) -> Mapping[str, int | float]:
        """Return the kernels' numeric arguments.

        A weight is dropped if its word, of 32 random bits, is below `drop_below`; `keep_scale` is 1 / (1 - p), and 0
        where p is 1, which drops what its word would have kept.
        """
        return {
            "drop_below": min(round(self.p * WORDS), WORDS - 1),
            "keep_scale": 1.0 / (1.0 - self.p) if self.p < 1.0 else 0.0,
        }


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a seed and an offset from torch's generator of the device, or from the one given.

    It is a random operation of torch like any other: it follows torch.manual_seed, is repeated by activation
    checkpointing, drawn anew by each replay of a CUDA graph, and seen by torch.compile and torch.func.
    """
    return torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device, generator=generator)

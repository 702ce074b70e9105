"""What one entry of the corpus is: a name, a builder of the mod for a shape, and what the shape must offer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

Mod = Callable[..., torch.Tensor]
Need = Literal["square", "batches", "heads"]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of one attention problem: batch, query and key/value heads, query and key/value lengths."""

    B: int
    Hq: int
    Hkv: int
    Lq: int
    Lk: int

    @property
    def longest(self) -> int:
        return max(self.Lq, self.Lk)

    def offers(self, need: Need) -> bool:
        match need:
            case "square":
                return self.Lq == self.Lk
            case "batches":
                return self.B >= 2
            case "heads":
                return self.Hq >= 2


@dataclass(frozen=True, slots=True)
class Case:
    """One mask or score mod.

    Attributes:
        name: unique among its kind; also names golden files.
        build: makes the user's callable for a shape, with captured tensors on a device. Deterministic.
        needs: what a shape must offer for the case to be meaningful.
    """

    name: str
    build: Callable[[Shape, torch.device], Mod]
    needs: frozenset[Need] = frozenset()

    def fits(self, shape: Shape) -> bool:
        return all(shape.offers(need) for need in self.needs)


class Corpus:
    """An ordered, read-only collection of cases, filled by decorating their builders while its module loads."""

    def __init__(self) -> None:
        self._cases: dict[str, Case] = {}

    def add(self, *needs: Need) -> Callable[[Callable[[Shape, torch.device], Mod]], Case]:
        """Turn a builder into the `Case` named after it."""

        def register(build: Callable[[Shape, torch.device], Mod]) -> Case:
            case = Case(build.__name__, build, frozenset(needs))
            assert case.name not in self._cases, f"two cases are called {case.name}"
            self._cases[case.name] = case
            return case

        return register

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases.values())

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, name: str) -> Case:
        return self._cases[name]


def random_values(*size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return float32 values from N(0, 1), the same on every device and in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=generator).to(device)


def random_ints(low: int, high: int, *size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return int64 values in [low, high), the same on every device and in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, size, generator=generator).to(device)

"""Exported modules and the process that runs them without flexgen, in Triton's own interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from tests.export import standalone

Mod = Callable[..., Any]


_EXPORTED: dict[tuple[Any, ...], str] = {}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention to export.

    Attributes:
        sizes: B, Hq, Hkv, Lq, Lk, Dqk, Dv.
        captured: what the mods captured, in the order of the module's parameters.
        returns_lse: the module returns the logsumexp too.
        trains: query, key and value require grad.
    """

    name: str
    score_mod: Mod | None
    mask_mod: Mod | None
    sizes: tuple[int, ...]
    captured: tuple[Tensor, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    returns_lse: bool = True
    trains: bool = True
    target: str = "interpret"

    def inputs(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        b, hq, hkv, lq, lk, dqk, dv = self.sizes
        order = (1, 2) if self.options.get("layout") == "bshd" else (2, 1)
        random = torch.Generator().manual_seed(7)

        def draw(heads: int, length: int, dim: int) -> Tensor:
            drawn = torch.randn(b, heads, length, dim, generator=random).to(device, dtype)
            drawn = drawn if order == (2, 1) else drawn.transpose(1, 2).contiguous()
            return drawn.requires_grad_(self.trains)

        return draw(hq, lq, dqk), draw(hkv, lk, dqk), draw(hkv, lk, dv)

    def export(self) -> str:
        """Return the module's text, made once: several tests look at it."""
        form = (self.name, self.target, self.sizes)
        if form not in _EXPORTED:
            _EXPORTED[form] = self._export()
        return _EXPORTED[form]

    def _export(self) -> str:
        attention = flexgen.compile(self.score_mod, self.mask_mod, self.options)
        aux = flexgen.AuxRequest(lse=self.returns_lse)
        return attention.export(*self.inputs(), return_aux=aux, target=self.target)


RunCases = Callable[[Sequence[dict[str, Any]]], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def run_standalone(tmp_path_factory: pytest.TempPathFactory) -> RunCases:
    """Return what runs cases in one new process; it fails when the process does."""
    folder = tmp_path_factory.mktemp("standalone")

    def run(cases: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        inputs, outputs = folder / "inputs.pt", folder / "outputs.pt"
        torch.save(list(cases), inputs)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        completed = subprocess.run(
            [sys.executable, str(Path(standalone.__file__)), str(inputs), str(outputs)],
            env=environment | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert completed.returncode == 0, completed.stderr
        return list(torch.load(outputs, weights_only=False))

    return run

"""Exported modules on a GPU, launched by Triton itself: the same numbers as the reference, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flexgen
from flexgen.export_binary import export_package
from flexgen.runtime.device_target import target_of
from tests.export.conftest import Case
from tests.export.standalone import load
from tests.export.test_meaning import CASES, captured_case, expected, weights_of
from tests.reference import largest_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_exported_module_runs_on_this_gpu(case: Case, tmp_path: Path) -> None:
    text = replace(case, target=target_of(torch.device("cuda")).name).export()
    path = tmp_path / f"{case.name}.py"
    path.write_text(text)
    _hold_against_reference(case, load(path).attention)


def _hold_against_reference(case: Case, attention: Callable[..., Any]) -> None:
    arguments = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.inputs()]
    captured = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.captured]
    outputs = attention(*arguments, *captured)
    exact, exact_grads = expected(case, weights_of(case))
    for actual, reference in zip(outputs, exact, strict=True):
        assert largest_error(actual.cpu(), reference) < 1e-4
    leaves = [tensor for tensor in (*arguments, *captured) if tensor.requires_grad]
    if leaves:
        pairs = zip(outputs, weights_of(case), strict=True)
        loss = sum((output * weight.cuda()).sum() for output, weight in pairs)
        for actual, reference in zip(torch.autograd.grad(loss, leaves), exact_grads, strict=True):
            assert largest_error(actual.cpu(), reference) < 1e-3


def test_a_package_of_machine_code_runs_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded by the driver's own library: the forward, and every backward kernel."""
    case = captured_case()
    name = target_of(torch.device("cuda")).name
    attention = flexgen.compile(case.score_mod, case.mask_mod, {"BACKEND": "TRITON"})
    aux = flexgen.AuxRequest(lse=True)
    lowered = attention.lower(*case.inputs(), return_aux=aux, target=name)
    for file, content in export_package([lowered], layout="bhsd", aux=aux, how="made by a test").items():
        path = tmp_path / "packed_for_gpu" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = importlib.import_module("packed_for_gpu")
    _hold_against_reference(case, packed.attention)

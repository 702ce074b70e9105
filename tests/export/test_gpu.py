"""Exported modules on a GPU, launched by Triton itself: the same numbers as the reference, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexgen.runtime.device_target import target_of
from tests.export.conftest import Case
from tests.export.standalone import load
from tests.export.test_meaning import CASES, expected, weights_of
from tests.reference import largest_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_exported_module_runs_on_this_gpu(case: Case, tmp_path: Path) -> None:
    text = replace(case, target=target_of(torch.device("cuda")).name).export()
    path = tmp_path / f"{case.name}.py"
    path.write_text(text)
    arguments = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.inputs()]
    captured = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.captured]
    outputs = load(path).attention(*arguments, *captured)
    exact, exact_grads = expected(case, weights_of(case))
    for actual, reference in zip(outputs, exact, strict=True):
        assert largest_error(actual.cpu(), reference) < 1e-4
    leaves = [tensor for tensor in (*arguments, *captured) if tensor.requires_grad]
    if leaves:
        pairs = zip(outputs, weights_of(case), strict=True)
        loss = sum((output * weight.cuda()).sum() for output, weight in pairs)
        for actual, reference in zip(torch.autograd.grad(loss, leaves), exact_grads, strict=True):
            assert largest_error(actual.cpu(), reference) < 1e-3

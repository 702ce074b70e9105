"""Hopper kernels on a GPU against float32, under a watchdog: a wrong barrier hangs instead of failing."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.gluon_cases import checks
from benchmarks.gluon_check import supervise


@pytest.mark.gpu
@pytest.mark.parametrize("only", sorted({check.name.split()[0] for check in checks()}))
def test_checks_pass(only: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for sm_90")
    said = supervise(only, [], time.monotonic() + 300)
    assert any("check" in row for row in said)
    assert [row for row in said if "failed" in row or not row.get("ok", True)] == []

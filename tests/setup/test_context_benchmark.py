"""The benchmark of sharded sequences: what it tells, and that it runs, on the CPU with two processes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import context_parallel

ABOUT = {"device": "a GPU", "date": "2026-12-01"}


def shared_row(**changes) -> context_parallel.Row:
    row = {"case": "causal", "direction": "forward", "ranks": 2, "assignment": "head-tail", "length": 1024}
    row |= {"head_dim": 128, "one_ms": 2.0, "shared_ms": 1.0, "live_pairs": 10**9, "received": 3_000_000}
    return context_parallel.Row(**row, imbalance=1.0, distance=changes.get("distance", 0.001))


def test_speed_of_several_gpus_is_told_for_each_of_them():
    row = shared_row()
    assert row.speedup == 2.0
    assert row.tflops == pytest.approx(4 * 128 * 1e9 / 1e-3 / 2 / 1e12)
    lines = context_parallel.report([row, shared_row(distance=0.5)], ABOUT).splitlines()
    assert lines[-2] == "| causal | forward | 1024 | 128 | 2 | head-tail | 2.000 | 1.000 | 2.00 | 256 | 3.0 | 1.0e-03 |"
    assert lines[-1].endswith("| 5.0e-01 WRONG |")
    assert {line.count("|") for line in lines[-4:]} == {13}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="running kernels needs triton")
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
def test_sharing_a_sequence_is_timed_on_two_processes(tmp_path: Path):
    """Over gloo, in the interpreter: what it times is of no interest, that results are compared is."""
    sizes = ["--length=128", "--heads=1", "--head-dim=16", "--window=20", "--rounds=1", "--ranks=2"]
    program = [sys.executable, "-m", "benchmarks.context_parallel", "--device", "cpu", *sizes, "--out", str(tmp_path)]
    ran = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2])
    assert ran.returncode == 0, ran.stderr
    rows = json.loads((tmp_path / "context_parallel.json").read_text())["rows"]
    assert [(row["case"], row["direction"]) for row in rows] == [
        (case, direction) for case in ("causal", "window 20") for direction in ("forward", "backward")
    ]
    assert rows[0]["assignment"] == "head-tail"
    assert all(0 < row["distance"] < 1e-5 and row["one_ms"] > 0 < row["shared_ms"] for row in rows)
    assert (tmp_path / "context_parallel.md").read_text() in ran.stdout

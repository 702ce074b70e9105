"""Disks that take no more, and processes that are killed while they compile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.runtime import kernels
from tests.runtime.conftest import HEADER


def environment_of(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "FLEXGEN_CACHE_DIR": str(tmp_path / "cache")}
    return kept | paths | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


FULL = """
import resource, signal, warnings
import torch, flexgen

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))  # a file may hold no more bytes: writing them is an error
query = torch.randn(1, 1, 40, 16)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for window in (3, 5):
        output = flexgen.compile(None, lambda b, h, q, k, w=window: (q >= k) & (q - k < w))(query, query, query)
        gap = torch.arange(40)[:, None] - torch.arange(40)
        scores = (query @ query.mT / 4).masked_fill((gap < 0) | (gap >= window), -torch.inf)
        assert torch.allclose(output, scores.softmax(-1) @ query, atol=1e-5)
print(sum("flexgen keeps no sources between processes: cannot write to" in str(it.message) for it in told))
"""


def test_on_a_full_disk_kernels_run_from_memory_with_one_warning(tmp_path: Path):
    command = [sys.executable, "-c", FULL]
    done = subprocess.run(
        command, env=environment_of(tmp_path), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size]
    assert left == [], "half a file was left"


COMPILES = f"""
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import compile_entry
from flexgen.runtime.cache import source_cache
from flexgen.runtime.load import load_module

types = [ArgType("*fp32")] * 3 + [ArgType("i32")]
print("starts", flush=True)
for number in range(30):
    text = {HEADER + kernels.ADD!r}.replace("total,", f"total + {{number}}.0,")
    module = load_module(source_cache().keep(f"{{number:016}}", text))
    binary = compile_entry(module, "add", types, TARGETS["sm_80"], num_warps=1, num_stages=1)
    assert binary.stages["cubin"]
print("ends", flush=True)
"""


@pytest.mark.parametrize("rounds", [5])
def test_a_process_may_be_killed_while_it_compiles(tmp_path: Path, rounds: int):
    """What it leaves is no obstacle: nothing is damaged, no lock is held, and the next process compiles on."""
    command, environment = [sys.executable, "-c", COMPILES], environment_of(tmp_path)
    for number in range(rounds):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "starts\n"
        time.sleep(0.15 + 0.21 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ends\n"), done.stderr
    verified = subprocess.run(
        [sys.executable, "-m", "flexgen", "cache", "verify"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout
    assert "30 sources and 30 compiled kernels, all intact" in verified.stdout

"""What every test gets: devices, markers, and a kernel cache of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

pytest_plugins = ["tests.golden_files"]

CACHE_VARIABLE = "FLEXGEN_CACHE_DIR"
OWN_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the processes of pytest-xdist share the cores
    else:
        config.stash[OWN_CACHE] = tempfile.mkdtemp(prefix="flexgen-tests-")
        os.environ[CACHE_VARIABLE] = config.stash[OWN_CACHE]
        # What was compiled in an earlier run of the tests is found again.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def pytest_unconfigure(config: pytest.Config) -> None:
    if OWN_CACHE in config.stash:
        shutil.rmtree(config.stash[OWN_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device to run on: the CPU through Triton's interpreter, and a CUDA device under the marker gpu."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("running kernels needs triton")
    return torch.device(request.param)

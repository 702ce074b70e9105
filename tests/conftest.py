"""What every test gets: devices, markers, and a kernel cache of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import zlib
from pathlib import Path

import pytest
import torch

pytest_plugins = ["tests.golden_files"]

CACHE_VARIABLE = "FLEXGEN_CACHE_DIR"
OWN_CACHE = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    torch.manual_seed(0)  # for what modules draw when they are imported
    _repeat_examples(config)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the processes of pytest-xdist share the cores
    else:
        config.stash[OWN_CACHE] = tempfile.mkdtemp(prefix="flexgen-tests-")
        os.environ[CACHE_VARIABLE] = config.stash[OWN_CACHE]
        # What was compiled in an earlier run of the tests is found again.
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))


def _repeat_examples(config: pytest.Config) -> None:
    """Have Hypothesis draw the same examples in every run, unless a profile of its was asked for."""
    if importlib.util.find_spec("hypothesis") is None or config.getoption("--hypothesis-profile", None):
        return
    from hypothesis import settings

    settings.register_profile("repeatable", derandomize=True)
    settings.load_profile("repeatable")


def pytest_unconfigure(config: pytest.Config) -> None:
    if OWN_CACHE in config.stash:
        shutil.rmtree(config.stash[OWN_CACHE], ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> None:
    """Each test draws the same numbers in every run, alone and among others."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device to run on: the CPU through Triton's interpreter, and a CUDA device under the marker gpu."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("running kernels needs triton")
    return torch.device(request.param)

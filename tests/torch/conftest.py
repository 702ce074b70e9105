"""Processes that work together, started by the first test that needs them."""

from __future__ import annotations

import pytest

from tests.torch.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks") / "meeting")
    yield started
    started.stop()


@pytest.fixture(scope="session")
def four_ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("ranks") / "meeting", 4)
    yield started
    started.stop()

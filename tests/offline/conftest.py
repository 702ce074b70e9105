"""A cache of Triton's of its own: what is checked was compiled in this session."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

pytest.importorskip("triton", reason="compiling needs triton")


@pytest.fixture(scope="package", autouse=True)
def _own_triton_cache() -> Iterator[None]:
    from triton import knobs

    with tempfile.TemporaryDirectory(prefix="flexgen-offline-") as directory, knobs.cache.scope():
        knobs.cache.dir = directory
        yield

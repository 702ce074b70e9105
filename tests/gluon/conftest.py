"""Kernels of these tests are compiled in this session, into a cache of their own, and written as a test wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexgen import backends
from tests.offline.conftest import _own_triton_cache  # noqa: F401

WrittenIn = Callable[[str], None]


@pytest.fixture
def written_in(monkeypatch: pytest.MonkeyPatch) -> WrittenIn:
    """Return what makes Gluon kernels be written in one of its spellings, whatever Triton is installed."""
    return lambda spelling: monkeypatch.setattr(backends, "installed_spelling", lambda: spelling)


@pytest.fixture
def golden_spelling(written_in: WrittenIn) -> None:
    """Write Gluon kernels in the spelling of the golden ones, which were checked on a GPU."""
    written_in("3.6")

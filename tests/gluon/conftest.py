"""Kernels of these tests are compiled in this session, into a cache of their own."""

from __future__ import annotations

from tests.offline.conftest import _own_triton_cache  # noqa: F401

"""Small kernels as text, loaded as emitted modules are."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flexgen.runtime.cache import SourceCache
from flexgen.runtime.load import load_module

Load = Callable[[str], ModuleType]

HEADER = """import torch
import triton
import triton.language as tl

"""


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function from the text of a module, without its imports, to the loaded module."""
    cache = SourceCache(Path(tmp_path_factory.mktemp("sources")))

    def load_text(text: str) -> ModuleType:
        text = HEADER + text
        return load_module(cache.keep(hashlib.sha256(text.encode()).hexdigest(), text))

    return load_text

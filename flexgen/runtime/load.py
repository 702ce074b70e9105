"""Load an emitted source as a module, from text that was verified, under a name derived from its content."""

from __future__ import annotations

import hashlib
import linecache
import threading
from types import ModuleType

from flexgen.codegen.source import KernelSource
from flexgen.errors import InternalError
from flexgen.runtime.cache import CachedSource, source_cache

_loaded: dict[str, ModuleType] = {}
_lock = threading.Lock()


def module_of(source: KernelSource) -> ModuleType:
    """Return the loaded module of an emitted source, kept on disk under its key."""
    return load_module(source_cache().keep(source.key, source.text))


def module_name(text: str) -> str:
    """Return the name of the module of a text."""
    return f"flexgen_emitted_{_digest(text)[:16]}"


def load_module(source: CachedSource) -> ModuleType:
    """Return the module of a source; the same text is executed once in a process, whatever thread asks.

    The text of `source` is what runs and what Triton and tracebacks see, also when the file changes or goes later. The
    module is in no table of Python's, so its name cannot collide with a user's.
    """
    digest = _digest(source.text)
    with _lock:
        module = _loaded.get(digest)
        if module is None:
            module = _loaded[digest] = _execute(module_name(source.text), source)
    return module


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _execute(name: str, source: CachedSource) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = filename = str(source.path)
    lines = source.text.splitlines(keepends=True)
    # Triton reads each function's source through linecache; an entry without a time is never checked against the disk.
    linecache.cache[filename] = (len(source.text), None, lines, filename)
    try:
        exec(compile(source.text, filename, "exec", dont_inherit=True), vars(module))
    except Exception as error:
        raise InternalError(f"the emitted module {filename} cannot be loaded: {error}") from error
    return module

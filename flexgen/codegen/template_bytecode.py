"""Compiled templates, kept where Python keeps compiled modules: reading a template's text takes longer than filling it.

A file `__pycache__/forward.py.cpython-312.pyc` beside each template, under Python's own rules: nothing is written where
`sys.dont_write_bytecode` is set or the folder is not writable, and `sys.pycache_prefix` chooses another place.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import sys
import tempfile
from contextlib import suppress
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket, BytecodeCache


class TemplateBytecode(BytecodeCache):
    """Code by template, of this version of Python and of Jinja alone; each file begins with a digest of what it is of.

    Args:
        environment_source: what code depends on besides its template: the text of the environment's definition.
    """

    def __init__(self, environment_source: bytes) -> None:
        self._basis = hashlib.sha256(environment_source + jinja2.__version__.encode() + MAGIC_NUMBER)

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        """Return the file of a template's code; "" for a template that is no file."""
        if filename is None or sys.implementation.cache_tag is None or not os.path.isfile(filename):
            return ""
        return cache_from_source(filename)

    def load_bytecode(self, bucket: Bucket) -> None:
        if not bucket.key:
            return
        with suppress(OSError):
            data = Path(bucket.key).read_bytes()
            if data[:32] == self._digest(bucket, data[32:]):
                bucket.code = marshal.loads(data[32:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        if not bucket.key or sys.dont_write_bytecode:
            return
        code = marshal.dumps(bucket.code)
        with suppress(OSError):
            folder = Path(bucket.key).parent
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(suffix=".tmp", dir=folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(self._digest(bucket, code) + code)
                os.replace(temporary, bucket.key)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise

    def _digest(self, bucket: Bucket, code: bytes) -> bytes:
        digest = self._basis.copy()
        digest.update(bucket.checksum.encode() + code)  # the checksum is of the template's text
        return digest.digest()

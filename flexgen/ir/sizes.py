"""Names of `scalar` nodes that hold the run-time size of a buffer's dimension: `table.size(0)`."""

from __future__ import annotations

import re

import torch

SIZE_DTYPE = torch.int64

_SIZE = re.compile(r"(?s)(.*)\.size\(([0-9]{1,3})\)")


def size_name(buffer: str, dim: int) -> str:
    """Return the name of the scalar that holds size `dim` of the buffer."""
    return f"{buffer}.size({dim})"


def split_size_name(name: object) -> tuple[str, int] | None:
    """Return (buffer, dimension) if the scalar's name is that of a size, else None."""
    found = _SIZE.fullmatch(name) if isinstance(name, str) else None
    return (found[1], int(found[2])) if found else None

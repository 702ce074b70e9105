"""What plain containers hold, as bytes: to see whether one still holds what it held when a mod was captured."""

from __future__ import annotations

import enum
import marshal
from collections import deque

MOST_BYTES = 1 << 20  # compared at every call; of what is larger, only which object it is


def contents_of(value: object) -> bytes | None:
    """Return what a container of plain values, or of bytes, holds.

    Args:
        value: a set, deque, list, tuple or dict of numbers, texts and more of these; or what has a buffer, such as a
            numpy array or an `array.array`.

    Returns:
        None for anything else, and for more than MOST_BYTES.
    """
    held = _of_plain_values(value)
    held = _of_buffer(value) if held is None else held
    return held if held is not None and len(held) <= MOST_BYTES else None


def _of_plain_values(value: object) -> bytes | None:
    match value:
        case deque():
            value = [type(value).__name__, *value]
        case dict():
            value = [(str(key) if isinstance(key, enum.Enum) else key, item) for key, item in value.items()]
        case set() | list() | tuple():
            pass
        case _:
            return None
    try:
        return marshal.dumps(value, 2)  # a version that does not tell how often an object is referred to
    except ValueError:
        return None


def _of_buffer(value: object) -> bytes | None:
    try:
        view = memoryview(value)  # type: ignore[arg-type]
        if view.nbytes > MOST_BYTES or "O" in view.format:
            return None
        return f"{view.format} {view.shape} ".encode() + view.tobytes()
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return None

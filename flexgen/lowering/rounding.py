"""Sizes of tiles: powers of two."""

from __future__ import annotations

MIN_DOT = 16  # tl.dot's smallest dimension


def round_up_to_power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size` and at least MIN_DOT."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


def round_down_to_power_of_two(size: int) -> int:
    """Return the largest power of two that is at most `size`, which is positive."""
    return 1 << (size.bit_length() - 1)


def is_power_of_two(size: int) -> bool:
    return size > 0 and size & (size - 1) == 0


def largest_power_of_two_divisor(size: int) -> int:
    """Return the largest power of two that divides `size`."""
    return size & -size

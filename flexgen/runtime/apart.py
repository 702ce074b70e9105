"""How far two results of the same computation are apart."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

# Relative, by an element's size: two roundings of half precision; more says that something else was computed.
MOST_APART = {2: 0.02, 4: 0.005, 8: 1e-6}


def apart(found: Sequence[Tensor], own: Sequence[Tensor]) -> float:
    """Return the greatest relative difference of the results, by Frobenius norms."""
    pairs = list(zip(found, own, strict=True))
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs)

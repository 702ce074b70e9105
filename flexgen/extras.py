"""`Extras`: what a call is given besides query, key, value and what its mods captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexgen.aux_outputs import NO_AUX, AuxRequest


@dataclass(frozen=True, slots=True)
class Extras:
    """What a call is given besides query, key and value.

    Attributes:
        scale: the softmax scale; None for 1/sqrt(Dqk).
        aux: which auxiliary outputs to return; a run may return more.
        block_table: a DerivedTable or a torch BlockMask.
        kv_lengths: [B], int32 or int64: the number of keys of each batch row; None where all have Lk.
        validate: check the contents of what the device holds; waits for the device.
    """

    scale: float | None = None
    aux: AuxRequest = NO_AUX
    block_table: Any = None
    kv_lengths: Any = None
    validate: bool = False


NO_EXTRAS = Extras()

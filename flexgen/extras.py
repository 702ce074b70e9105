"""`Extras`: what a call is given besides query, key, value and what its mods captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexgen.aux_outputs import NO_AUX, WITH_LSE, AuxRequest
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.packing import Packing


@dataclass(frozen=True, slots=True)
class Extras:
    """What a call is given besides query, key and value.

    Attributes:
        scale: the softmax scale; None for 1/sqrt(Dqk).
        aux: which auxiliary outputs to return; a run may return more.
        block_table: a DerivedTable or a torch BlockMask.
        packing: where sequences begin that are packed along the length; None where each is a batch entry.
        validate: check the contents of what the device holds; waits for the device.
        dropout: which softmax weights are dropped; None for none.
    """

    scale: float | None
    aux: AuxRequest  # without a default, which torch.compile of torch 2.11 could not wrap
    block_table: Any = None
    packing: Packing | None = None
    validate: bool = False
    dropout: Dropout | None = None

    def with_lse(self) -> Extras:
        """Return the same, also asking for the logsumexp; quicker than dataclasses.replace."""
        aux = WITH_LSE[self.aux.max_scores]
        return Extras(self.scale, aux, self.block_table, self.packing, self.validate, self.dropout)


NO_EXTRAS = Extras(None, NO_AUX)

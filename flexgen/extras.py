"""`Extras`: what a call is given besides query, key, value and what its mods captured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flexgen.aux_outputs import NO_AUX, WITH_LSE, AuxRequest
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.packing import Packing

NO_SIDES: Mapping[str, Any] = {}  # a plain dict, whose emptiness torch.compile sees


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
        sides: what kernels read besides query, key, value and captured tensors, as far as it is given:
            "kv_lengths" [B], int32 or int64, the number of keys of each batch row;
            "page_table" [B, max_pages], int32, the pages of each batch row, of which key and value then consist;
            "k_scale", "v_scale", a number or [Hkv] float32, what keys and values are multiplied by.
    """

    scale: float | None
    aux: AuxRequest  # without a default, which torch.compile of torch 2.11 could not wrap
    block_table: Any = None
    packing: Packing | None = None
    validate: bool = False
    dropout: Dropout | None = None
    sides: Mapping[str, Any] = field(default_factory=lambda: NO_SIDES)

    def with_lse(self) -> Extras:
        """Return the same, also asking for the logsumexp; quicker than dataclasses.replace."""
        aux = WITH_LSE[self.aux.max_scores]
        return Extras(self.scale, aux, self.block_table, self.packing, self.validate, self.dropout, self.sides)

    def with_table(self, block_table: Any) -> Extras:
        """Return the same with another block table."""
        return Extras(self.scale, self.aux, block_table, self.packing, self.validate, self.dropout, self.sides)


def given_sides(kv_lengths: Any, page_table: Any, k_scale: Any, v_scale: Any) -> Mapping[str, Any]:
    """Return those of the arguments that are given."""
    if kv_lengths is page_table is k_scale is v_scale is None:
        return NO_SIDES
    sides = {}
    if kv_lengths is not None:
        sides["kv_lengths"] = kv_lengths
    if page_table is not None:
        sides["page_table"] = page_table
    if k_scale is not None:
        sides["k_scale"] = k_scale
    if v_scale is not None:
        sides["v_scale"] = v_scale
    return sides


NO_EXTRAS = Extras(None, NO_AUX)

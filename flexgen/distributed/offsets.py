"""Mods whose indices begin elsewhere than at 0, by numbers that each call brings: one kernel serves all chunks.

There are two forms. Where queries and keys begin at the same place, one number is added to both indices: it cancels in
masks of distances alone, as causal ones and windows are, of which a kernel is then planned as if there were no chunks.
Elsewhere two numbers are added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flexgen.capture.live import Captured, Reading
from flexgen.ir.names import Names
from flexgen.ir.shift import shift_by_scalars


@dataclass(frozen=True, slots=True)
class _Form:
    """What was captured with scalars added to its indices: `q_idx` and `kv_idx` are the scalars' names."""

    captured: Captured
    q_idx: str
    kv_idx: str

    @classmethod
    def of(cls, whole: Captured, q_idx: str, kv_idx: str) -> _Form:
        shifted = shift_by_scalars(whole.mods, whole.origins, {"q_idx": q_idx, "kv_idx": kv_idx})
        return cls(Captured(*shifted, whole.score_dtype), q_idx, kv_idx)

    def values(self, whole: Mapping[str, int | float], q_start: int, kv_start: int) -> tuple[int | float, ...]:
        """Return the scalars' values in their order, given those of the whole."""
        values = {**whole, self.q_idx: q_start, self.kv_idx: kv_start}
        return tuple([values[scalar.name] for scalar in self.captured.mods.scalars])


@dataclass(frozen=True, slots=True)
class ShiftedMods:
    """What was captured, as functions of indices in chunks.

    Attributes:
        whole: what was captured, of indices in the whole sequence.
        together: for chunks of queries and keys that begin at the same place.
        apart: for others.
    """

    whole: Captured
    together: _Form
    apart: _Form

    @classmethod
    def of(cls, whole: Captured) -> ShiftedMods:
        """Shift what was captured."""
        names = Names([*(buffer.name for buffer in whole.mods.buffers), *(one.name for one in whole.mods.scalars)])
        offset, q_offset, kv_offset = (names.unique(name) for name in ("offset", "q_offset", "kv_offset"))
        return cls(whole, _Form.of(whole, offset, offset), _Form.of(whole, q_offset, kv_offset))

    def reading(self, reading: Reading, q_start: int, kv_start: int) -> Reading:
        """Return what a call reads whose first query and key are these of the whole sequence.

        Args:
            reading: of the whole.
        """
        form = self.together if q_start == kv_start else self.apart
        names = [scalar.name for scalar in self.whole.mods.scalars]
        whole = dict(zip(names, reading.scalars, strict=True))
        return Reading(form.captured, reading.buffers, form.values(whole, q_start, kv_start))

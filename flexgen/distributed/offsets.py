"""Mods whose indices begin elsewhere than at 0, by numbers that each call brings: one kernel serves all chunks."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.capture.live import Captured, Reading
from flexgen.ir.names import Names
from flexgen.ir.shift import shift_by_scalars


@dataclass(frozen=True, slots=True)
class ShiftedMods:
    """What was captured, as functions of indices in a chunk.

    Attributes:
        whole: what was captured, of indices in the whole sequence.
        captured: the same with two scalars more, as far as they are read.
        q_offset, kv_offset: the names of the two.
    """

    whole: Captured
    captured: Captured
    q_offset: str
    kv_offset: str

    @classmethod
    def of(cls, whole: Captured) -> ShiftedMods:
        """Shift what was captured."""
        names = Names([*(buffer.name for buffer in whole.mods.buffers), *(one.name for one in whole.mods.scalars)])
        q_offset, kv_offset = names.unique("q_offset"), names.unique("kv_offset")
        shifted = shift_by_scalars(whole.mods, whole.origins, {"q_idx": q_offset, "kv_idx": kv_offset})
        return cls(whole, Captured(*shifted, whole.score_dtype), q_offset, kv_offset)

    def reading(self, reading: Reading, q_start: int, kv_start: int) -> Reading:
        """Return what a call reads whose first query and key are these of the whole sequence.

        Args:
            reading: of the whole.
        """
        names = [scalar.name for scalar in self.whole.mods.scalars]
        values = dict(zip(names, reading.scalars, strict=True))
        values |= {self.q_offset: q_start, self.kv_offset: kv_start}
        return Reading(self.captured, reading.buffers, tuple(values[s.name] for s in self.captured.mods.scalars))

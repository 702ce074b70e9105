"""Live mods: the user's callables, captured once and re-read at every call, traced again only when a guard misses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from flexgen.capture.builder import NodeBuilder
from flexgen.capture.mod import Kind, TracedMod, trace_mod
from flexgen.capture.names import NameTable
from flexgen.capture.numbers import NeedsConstant, symbolic
from flexgen.capture.probe import Bindings, Number, Probe, compile_probe
from flexgen.capture.rebuild import CannotSubstitute, substitute
from flexgen.capture.slots import Slot, SlotKind, discover, with_hidden_tensors
from flexgen.capture.tensors import CapturedTensors
from flexgen.capture.traceable import Reader, reader_of
from flexgen.errors import CaptureError, OptionError
from flexgen.ir.graph import Buffer, Graph, Mods, Scalar, topological
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.sizes import split_size_name

Mod = Callable[..., object]

_log = logging.getLogger("flexgen.capture")
_MAX_ATTEMPTS = 4  # a value may change while it is traced, but not every time
_MAX_VARIANTS = 16  # captures kept for values that alternate


@dataclass(frozen=True, slots=True)
class Captured:
    """The result of one capture.

    Attributes:
        mods: the graphs, with the buffers and scalars that they use.
        origins: where in the user's source each node came from.
        score_dtype: dtype of the input `score` and of the score graph's root.
    """

    mods: Mods
    origins: Origins
    score_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Reading:
    """What the mods are now: a capture that holds for them, and the captured values.

    Attributes:
        buffers: in the order of `captured.mods.buffers`.
        scalars: in the order of `captured.mods.scalars`.
    """

    captured: Captured
    buffers: tuple[torch.Tensor, ...]
    scalars: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class _Variant:
    captured: Captured
    probe: Probe
    slots: tuple[Slot, ...]
    bindings: Bindings
    without_values: Reading  # of mods that capture none


@dataclass(frozen=True, slots=True)
class NumberHistory:
    """What was seen of captured numbers, by the places that hold them.

    Attributes:
        seen: the first value.
        changing: places that held a second value.
        needed_constant: places whose value Python itself needs.
    """

    seen: dict[str, Number] = field(default_factory=dict)
    changing: set[str] = field(default_factory=set)
    needed_constant: set[str] = field(default_factory=set)


def _told(mod: tuple[str, Mod]) -> str:
    """Return a mod's kind and name."""
    kind, function = mod
    return f"{kind} {getattr(function, '__name__', type(function).__name__)}"


class LiveMods:
    """A pair of callables that may close over changing tensors and numbers.

    A captured number is a constant at first; seen with a second value, it becomes a run-time scalar, unless Python
    itself needs its value (`if`, `range`, a shape).

    Args:
        score_mod: `(score, b, h, q_idx, kv_idx) -> score`, or None.
        mask_mod: `(b, h, q_idx, kv_idx) -> bool`, or None.
        numbers: shared by mods of the same code that are to be captured alike; by default these mods' own.
    """

    def __init__(
        self, score_mod: Mod | None = None, mask_mod: Mod | None = None, numbers: NumberHistory | None = None
    ) -> None:
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self._roots: dict[str, Mod] = {}
        if score_mod is not None:
            self._roots["score_mod"] = score_mod
        if mask_mod is not None:
            self._roots["mask_mod"] = mask_mod
        self._mods = tuple(self._roots.values())
        self._variants: tuple[_Variant, ...] = ()
        self._lock = threading.RLock()
        self._numbers = numbers or NumberHistory()

    def __reduce__(self) -> tuple[type[LiveMods], tuple[Mod | None, Mod | None]]:
        """Copy and pickle as the callables alone: a deep copy captures its own copies of what they hold."""
        return LiveMods, (self.score_mod, self.mask_mod)

    def current(self, score_dtype: torch.dtype = torch.float32) -> Reading:
        """Return the capture that holds now, with the captured values as they are now. Safe from several threads.

        Raises:
            CaptureError: a mod cannot be traced.
            UnsupportedOpError: a mod uses operations that are not compiled.
        """
        reading = self.known(score_dtype)
        if reading is not None:
            return reading
        with self._lock:
            reading = self.known(score_dtype)  # another thread may have captured meanwhile
            if reading is not None:
                return reading
            for _ in range(_MAX_ATTEMPTS):
                variant, slots = self._capture(score_dtype)
                _log.debug("captured %s", ", ".join(map(_told, self._roots.items())) or "no mods")
                if _places(discover(self._roots)) != _places(slots):
                    continue  # the mod filled a cache of its own, say: what it put there must be guarded too
                found = variant.probe(*self._mods)
                if found is not None:
                    self._variants = (variant, *self._variants[: _MAX_VARIANTS - 1])
                    return Reading(variant.captured, *found)
        raise CaptureError(
            "what a mod captures is different each time it is read",
            why=f"{_MAX_ATTEMPTS} captures in a row no longer held right after they were made: something the mod reads "
            "(an attribute made anew at every access, say) never is the same object twice",
            fix="read it once outside of the mod, and capture the value",
        )

    def of_the_same_code(self, score_mod: Mod | None, mask_mod: Mod | None) -> LiveMods:
        """Return other mods that try these ones' captures first, and continue what was seen of numbers."""
        made = LiveMods(score_mod, mask_mod, self._numbers)
        made._variants = self._variants
        return made

    def reader(self, captured: Captured) -> Reader:
        """Return how to read a current capture's values in Python that can itself be traced."""
        variant = next(variant for variant in self._variants if variant.captured is captured)
        return reader_of(variant.slots, variant.bindings, captured.mods)

    def known(self, score_dtype: torch.dtype) -> Reading | None:
        """Return what `current` does where that takes no tracing; else None."""
        for variant in self._variants:
            if variant.captured.score_dtype is score_dtype:
                found = variant.probe(*self._mods)
                if found is not None:
                    return Reading(variant.captured, *found) if found[0] or found[1] else variant.without_values
        return None

    def _capture(self, score_dtype: torch.dtype) -> tuple[_Variant, Sequence[Slot]]:
        """Return a capture of the mods as they are now, and what they could read when it began."""
        if not score_dtype.is_floating_point:
            raise OptionError(f"score_dtype is {score_dtype}", fix="pass a floating dtype such as torch.float32.")
        slots = discover(self._roots)
        self._note_numbers(slots)
        while True:
            run_time = [slot for slot in slots if self._is_run_time(slot)]
            attempt = _Attempt(slots, run_time, score_dtype)
            try:
                return attempt.variant(self._roots), slots
            except NeedsConstant as needs:
                self._numbers.needed_constant.update(attempt.paths(needs.names))
            except CannotSubstitute:
                self._numbers.needed_constant.update(slot.path for slot in run_time)

    def _note_numbers(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            if slot.kind is SlotKind.NUMBER and isinstance(slot.value, int | float):
                before = self._numbers.seen.setdefault(slot.path, slot.value)
                if repr(before) != repr(slot.value):
                    self._numbers.changing.add(slot.path)

    def _is_run_time(self, slot: Slot) -> bool:
        if (
            slot.kind is not SlotKind.NUMBER
            or slot.path not in self._numbers.changing
            or slot.path in self._numbers.needed_constant
        ):
            return False
        return isinstance(slot.value, float) or -(2**63) <= slot.value < 2**63  # type: ignore[operator]


class _Attempt:
    """One trace of both mods, with a given set of numbers as run-time scalars."""

    def __init__(self, slots: Sequence[Slot], run_time: Sequence[Slot], score_dtype: torch.dtype) -> None:
        self._slots = slots
        self._score_dtype = score_dtype
        self._builder = NodeBuilder()
        names = NameTable()
        tensors = [slot for slot in slots if slot.kind is SlotKind.TENSOR]
        self._tensors = CapturedTensors({id(slot.value): slot.step.name for slot in tensors}, names)
        self._scalars = {names.claim(slot.step.name, suffix="value"): slot for slot in run_time}

    def paths(self, names: frozenset[str]) -> list[str]:
        return [self._scalars[name].path for name in names]

    def variant(self, roots: Mapping[str, Mod]) -> _Variant:
        traced = self._trace(roots)
        sizes_read = {size for mod in traced for size in mod.sizes_read}
        buffers = {name: self._tensors.buffer(name, sizes_read) for name in self._tensors.by_name}
        graphs = {mod.kind: self._graph(mod, buffers) for mod in traced}
        mods = Mods(graphs.get("score"), graphs.get("mask"))
        slots, bindings = self._bindings(mods, buffers)
        captured = Captured(mods, self._origins(mods), self._score_dtype)
        probe = compile_probe(list(roots), slots, bindings)
        return _Variant(captured, probe, slots, bindings, Reading(captured, (), ()))

    def _trace(self, roots: Mapping[str, Mod]) -> list[TracedMod]:
        replaced = {slot.index: symbolic(name, _number(slot)) for name, slot in self._scalars.items()}
        mods = substitute(self._slots, replaced) if replaced else dict(roots)
        kinds: dict[str, Kind] = {"score_mod": "score", "mask_mod": "mask"}
        return [
            trace_mod(kinds[root], mod, self._tensors, self._builder, self._score_dtype) for root, mod in mods.items()
        ]

    def _graph(self, traced: TracedMod, buffers: Mapping[str, Buffer]) -> Graph:
        """Describe the mod with only the buffers and scalars that its root depends on."""
        used: dict[str, None] = {}
        for node in topological(traced.root):
            if node.op in ("load", "scalar"):
                size = split_size_name(node.attr)
                used[size[0] if size else str(node.attr)] = None
        scalars = tuple(Scalar(name, _scalar_dtype(self._scalars[name])) for name in used if name in self._scalars)
        loaded = tuple(buffers[name] for name in used if name in buffers)
        return Graph(traced.kind, traced.name, traced.root, loaded, scalars)

    def _bindings(self, mods: Mods, buffers: Mapping[str, Buffer]) -> tuple[tuple[Slot, ...], Bindings]:
        slots = with_hidden_tensors(self._slots, list(self._tensors.by_name.values()))
        slot_of = {id(slot.value): slot.index for slot in slots if slot.kind is SlotKind.TENSOR}
        held = {name: slot_of.get(id(tensor)) for name, tensor in self._tensors.by_name.items()}
        touched = {index: buffers[name] for name, index in held.items() if index is not None}
        places = [held[buffer.name] for buffer in mods.buffers]
        pinned = [self._tensors.by_name[buffer.name] for buffer in mods.buffers]
        return slots, Bindings(
            touched=touched,
            buffers=[tensor if index is None else index for index, tensor in zip(places, pinned, strict=True)],
            scalars=[self._scalars[scalar.name].index for scalar in mods.scalars],
            run_time=frozenset(slot.index for slot in self._scalars.values()),
        )

    def _origins(self, mods: Mods) -> Origins:
        live = set(topological(*(graph.root for graph in mods.graphs())))
        table: dict[Any, tuple[Origin, ...]] = {
            node: tuple(origins) for node, origins in self._builder.origins.items() if node in live
        }
        return Origins(MappingProxyType(table))


def _places(slots: Sequence[Slot]) -> list[tuple[str, SlotKind]]:
    return [(slot.path, slot.kind) for slot in slots]


def _number(slot: Slot) -> Number:
    if not isinstance(slot.value, int | float):
        raise TypeError(f"{slot.path} holds no number")
    return slot.value


def _scalar_dtype(slot: Slot) -> torch.dtype:
    return torch.int64 if isinstance(slot.value, int) else torch.float64

"""Hypothesis strategies for mods: their text, and the tensors and numbers that they capture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from flexgen.fuzzing.grammar import STATEMENTS, USUAL_MASKS, Kind, Statement

MOST_STATEMENTS = 7
_SIZES = (1, 2, 3, 7, 16, 24, 40, 129)
# Names that users give, among them what emitted code uses itself and what is no ASCII.
_TENSOR_NAMES = ("table", "bias", "ids", "doc", "acc", "query", "BLOCK_M", "größe", "tl", "kv_idx_2", "row_max", "lo")
_NUMBER_NAMES = ("window", "cap", "num_warps", "offset", "gap_1")
_LOCAL_NAMES = ("acc", "alpha", "mask", "tile", "weight", "live", "start", "µ", "tl", "row", "score_2")
_WORDS = re.compile(r"[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class CapturedTensor:
    """A tensor that mods read, as arguments of `drawn`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    seed: int
    layout: str
    low: int = 0
    high: int = 2
    ascending: bool = False
    special: bool = False
    requires_grad: bool = False

    @property
    def kind(self) -> Kind:
        if self.dtype == "bool":
            return "b"
        return "f" if "float" in self.dtype else "i"


@dataclass(frozen=True, slots=True)
class CapturedNumber:
    """A number that mods read: its value at each call."""

    name: str
    values: tuple[int | float, ...]


@dataclass(frozen=True, slots=True)
class Captures:
    """What mods may read besides their arguments."""

    tensors: tuple[CapturedTensor, ...]
    numbers: tuple[CapturedNumber, ...]


_DTYPES: dict[Kind, tuple[str, ...]] = {
    "i": ("int64", "int32", "int16", "uint8", "int8"),
    "f": ("float32", "float16", "bfloat16", "float64"),
    "b": ("bool",),
}
_CAPTURED_LAYOUTS = ("contiguous", "transposed", "every second", "part", "repeated along 0", "repeated along 1")
_KINDS: tuple[Kind, ...] = ("i", "f", "b", "i", "f")
_RANKS = (1, 1, 2, 2, 3, 0)


@st.composite
def captures(draw: st.DrawFn, calls: int, *, gradients: bool) -> Captures:
    """Draw what mods of a case with so many calls may capture."""
    names = draw(st.lists(st.sampled_from(_TENSOR_NAMES), unique=True, max_size=4))
    tensors = tuple(draw(_captured_tensor(name, gradients)) for name in names)
    number_names = draw(st.lists(st.sampled_from(_NUMBER_NAMES), unique=True, max_size=2))
    return Captures(tensors, tuple(draw(_captured_number(name, calls)) for name in number_names))


@st.composite
def _captured_tensor(draw: st.DrawFn, name: str, gradients: bool) -> CapturedTensor:
    kind = draw(st.sampled_from(_KINDS))
    rank = draw(st.sampled_from(_RANKS))
    shape = tuple(draw(st.sampled_from(_SIZES)) for _ in range(rank))
    dtype, layout = draw(st.sampled_from(_DTYPES[kind])), draw(st.sampled_from(_CAPTURED_LAYOUTS))
    seed = draw(st.integers(0, 99))
    if kind == "i":
        low = 0 if dtype == "uint8" else draw(st.sampled_from((0, 0, -8)))
        return CapturedTensor(name, shape, dtype, seed, layout, low, draw(st.sampled_from((40, 3, 100))), draw(_COINS))
    learned = kind == "f" and gradients and draw(_COINS)
    special = kind == "f" and not learned and draw(st.integers(0, 3)) == 3
    return CapturedTensor(name, shape, dtype, seed, layout, special=special, requires_grad=learned)


@st.composite
def _captured_number(draw: st.DrawFn, name: str, calls: int) -> CapturedNumber:
    if draw(_COINS):
        return CapturedNumber(name, tuple(draw(_WHOLE) for _ in range(calls)))
    return CapturedNumber(name, tuple(draw(_REAL) for _ in range(calls)))


_INDEX_NAMES = ("q_idx", "kv_idx", "q_idx", "kv_idx", "h", "b")
_KINDS_OF_A_MASK: st.SearchStrategy[Kind] = st.sampled_from(("i", "b", "i", "f"))
_KINDS_OF_A_SCORE: st.SearchStrategy[Kind] = st.sampled_from(("f", "i", "f", "b"))
_COINS = st.booleans()
_WHOLE = st.sampled_from((0, 1, 2, 3, 5, 8, 13, 16, 31, 64, -1, -7))
_REAL = st.sampled_from((1.0, 0.5, 2.0, 0.1, -0.3, 3.7, 0.0, -1e4))
_DIVISORS = st.sampled_from((2, 3, 4, 7, 8, 16, 1, -3))
_SHIFTS = st.sampled_from((1, 0, 3))


@dataclass(frozen=True, slots=True)
class DrawnMod:
    """The text of a function.

    Attributes:
        may_read_outside: of a captured tensor, where an element is 0.
    """

    text: str
    may_read_outside: bool


@dataclass(slots=True)
class _Mod:
    """A mod while it is drawn.

    Attributes:
        values: names of values computed so far, by kind.
        statements: the text of each, by name, in order.
    """

    draw: st.DrawFn
    captures: Captures
    values: dict[Kind, list[str]]
    statements: dict[str, str] = field(default_factory=dict)
    may_read_outside: bool = False

    def value(self, kind: Kind) -> str:
        """Draw a value: one of the last computed half the time, else any."""
        names = self.values[kind]
        if not names:
            return self._first(kind)
        if len(names) > 4 and self.draw(_COINS):
            names = names[-3:]
        return self.draw(st.sampled_from(names))

    def _first(self, kind: Kind) -> str:
        """Return a value of a kind of which there is none yet."""
        left, right = self.value("i"), self.value("i")
        return f"({left} >= {right})" if kind == "b" else f"({left} * 0.1)"

    def operand(self, code: str) -> str:
        match code:
            case "i" | "f" | "b":
                return self.value(code)
            case "n":
                return self._number(int) or f"{self.draw(_WHOLE)}"
            case "x":
                return self._number(float) or f"{self.draw(_REAL)}"
            case "d":
                return f"{self.draw(_DIVISORS)}"
        return f"{self.draw(_SHIFTS)}"

    def _number(self, kind: type) -> str | None:
        """Draw a captured number, if there is one, or None."""
        names = [number.name for number in self.captures.numbers if type(number.values[0]) is kind]
        return self.draw(st.sampled_from([*names, None])) if names else None

    def add(self, kind: Kind, text: str) -> str:
        """Add a statement and return the name of its value."""
        number = len(self.statements) + 1
        name = self.draw(st.sampled_from((f"x{number}",) * 6 + _LOCAL_NAMES))
        taken = name in self.statements or any(name == tensor.name for tensor in self.captures.tensors)
        name = f"x{number}" if taken else name
        self.statements[name] = text
        self.values[kind].append(name)
        return name

    def compute(self, kind: Kind) -> str:
        """Add a statement that computes a value of a kind, or reads a captured tensor of that kind."""
        tensors = [tensor for tensor in self.captures.tensors if tensor.kind == kind]
        if tensors and self.draw(st.integers(0, 3)) == 0:
            return self.add(kind, self.read(self.draw(st.sampled_from(tensors))))
        statement = self.draw(st.sampled_from(STATEMENTS[kind]))
        return self.add(kind, self._filled(statement))

    def _filled(self, statement: Statement) -> str:
        return statement.template.format(*(self.operand(code) for code in statement.operands))

    def read(self, tensor: CapturedTensor) -> str:
        """Return an element of a captured tensor at drawn indices, which may lie outside of it."""
        indices = [self._index(size) for size in tensor.shape]
        return f"{tensor.name}[{', '.join(indices)}]" if indices else tensor.name

    def _index(self, size: int) -> str:
        form = self.draw(st.sampled_from(("{0} % {1}", "{0} % {1}", "{0} % {1}", "{0}", "{0}.clamp(0, {2})")))
        self.may_read_outside = self.may_read_outside or form == "{0}"
        value = self.value("i")
        value = value if value in _INDEX_NAMES else f"{value}.long()"  # torch takes a uint8 index for a mask
        return form.format(value, size, size - 1)

    def usual_mask(self) -> str | None:
        """Add what masks usually are made of; None where a table is needed and there is none."""
        statement = self.draw(st.sampled_from(USUAL_MASKS))
        tables = [tensor for tensor in self.captures.tensors if tensor.kind == "i" and len(tensor.shape) == 1]
        if "t" in statement.operands and not tables:
            return None
        operands = [
            _Lookup(self.draw(st.sampled_from(tables))) if code == "t" else self.operand(code)
            for code in statement.operands
        ]
        return self.add("b", statement.template.format(*operands))

    def function(self, name: str, parameters: str, result: str) -> DrawnMod:
        """Return the function, with the statements that its result needs."""
        needed, waiting = set(), _WORDS.findall(result)
        while waiting:
            word = waiting.pop()
            if word in self.statements and word not in needed:
                needed.add(word)
                waiting.extend(_WORDS.findall(self.statements[word]))
        lines = [f"    {name} = {text}" for name, text in self.statements.items() if name in needed]
        text = "\n".join([f"def {name}({parameters}):", *lines, f"    return {result}"])
        return DrawnMod(text, self.may_read_outside)


@dataclass(frozen=True, slots=True)
class _Lookup:
    """Formats `{0[q_idx]}` as a read of a table at that index."""

    tensor: CapturedTensor

    def __getitem__(self, index: str) -> str:
        return f"{self.tensor.name}[{index} % {self.tensor.shape[0]}]"


@st.composite
def mask_mods(draw: st.DrawFn, captured: Captures) -> DrawnMod:
    """Draw a function mask_mod."""
    mod = _Mod(draw, captured, {"i": list(_INDEX_NAMES), "f": [], "b": []})
    parts = [mod.usual_mask() for _ in range(draw(st.sampled_from((1, 0, 2, 3))))]
    results = [part for part in parts if part is not None]
    for kind in draw(st.lists(_KINDS_OF_A_MASK, max_size=MOST_STATEMENTS - 2)):
        mod.compute(kind)
    if not results or draw(_COINS):
        results.append(mod.compute("b"))
    joint = f" {draw(st.sampled_from('&|^'))} "
    return mod.function("mask_mod", "b, h, q_idx, kv_idx", joint.join(results))


_RESULTS = ("{0}", "score + {0}", "score + 0.2 * {0}", "torch.where(q_idx >= kv_idx, {0}, score)")


@st.composite
def score_mods(draw: st.DrawFn, captured: Captures) -> DrawnMod:
    """Draw a function score_mod."""
    mod = _Mod(draw, captured, {"i": list(_INDEX_NAMES), "f": ["score", "score"], "b": []})
    for kind in draw(st.lists(_KINDS_OF_A_SCORE, max_size=MOST_STATEMENTS)):
        mod.compute(kind)
    last = mod.compute("f")
    result = draw(st.sampled_from(_RESULTS))
    return mod.function("score_mod", "score, b, h, q_idx, kv_idx", result.format(last))


def reads(texts: Sequence[str], name: str) -> bool:
    """Whether one of the texts uses a name."""
    return any(name in _WORDS.findall(text) for text in texts)

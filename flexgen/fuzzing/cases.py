"""Hypothesis strategies for whole cases: mods, captured values, and calls of one Attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from flexgen.fuzzing.mods import Captures, captures, mask_mods, reads, score_mods
from flexgen.fuzzing.ways import OF_A_CACHE, OF_LISTED_BLOCKS, OF_PACKED, WAYS, WITHOUT_GRADIENTS


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of a call, as arguments of `drawn`."""

    shape: tuple[int, ...]
    layout: str
    seed: int
    requires_grad: bool
    spread: float = 1.0


@dataclass(frozen=True, slots=True)
class DrawnCall:
    """One call.

    Attributes:
        query, key, value: in the order of the case's layout.
        lengths: of queries and of keys of packed sequences; None where none are packed.
        ways: other ways to compute it, of `WAYS`.
        kv_lengths: how many keys each batch entry has; None for all.
        kv_dtype: of keys and values, where it is not the query's.
    """

    query: Placed
    key: Placed
    value: Placed
    scale: float | None
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None
    backward: bool
    ways: tuple[str, ...]
    kv_lengths: tuple[int, ...] | None = None
    kv_dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One Attention and calls of it.

    Attributes:
        score_mod, mask_mod: the text of a function; None for none.
        options: names and values.
        dtype: torch's name of the inputs' dtype.
    """

    captures: Captures
    score_mod: str | None
    mask_mod: str | None
    options: tuple[tuple[str, object], ...]
    dtype: str
    calls: tuple[DrawnCall, ...]


@dataclass(frozen=True, slots=True)
class Scope:
    """What cases are drawn.

    Attributes:
        backward: every case has gradients; else a few.
        cuda: cases are for a GPU, which computes no float64 and where larger ones cost little.
    """

    backward: bool
    cuda: bool


_LENGTHS = (7, 16, 17, 33, 40, 1, 2, 3, 5, 13, 15, 31, 32, 47, 63, 64, 65, 0, 97, 127, 128, 129, 131, 192)
_MOST_PAIRS = 20_000  # of query and key, over batch and heads, that are interpreted in some tens of milliseconds
_MOST_PAIRS_OF_A_GPU = 1_000_000
_HEAD_DIMS = (16, 16, 8, 32, 1, 3, 5, 17, 24, 33, 64, 80, 128)
_DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")
_LAYOUTS = ("contiguous", "contiguous", "heads inside", "transposed", "every second", "part")
_REPEATED = ("repeated along 0", "repeated along 1", "repeated along 2")
_COINS = st.booleans()
_BATCHES = st.sampled_from((1, 2) * 7 + (3, 0))
_SPREADS = st.sampled_from((1.0, 1.0, 1.0, 1.0, 8.0, 0.01))
_SEEDS = st.integers(0, 99)
# The last one is too small for float16: a query that is scaled there is 0, and slopes next to 0 overflow.
_SCALES = (None, None, 0.3, 1.0, -0.5, 0.0, 4.0, 1e-30)
_OPTIONS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("fwd_BLOCK_M", (16, 32, 64, 128)),
    ("fwd_BLOCK_N", (16, 32, 64, 128)),
    ("bwd_BLOCK_M1", (16, 32, 64)),
    ("bwd_BLOCK_N1", (16, 32, 64)),
    ("bwd_BLOCK_M2", (16, 32, 64)),
    ("bwd_BLOCK_N2", (16, 32, 64)),
    ("num_stages", (1, 2, 3)),
    ("num_warps", (2, 4, 8)),
    ("fwd_PRESCALE_QK", (True,)),
    ("fwd_USE_SUBTILING", (True,)),
    ("fwd_ROWS_GUARANTEED_SAFE", (True, False)),
    ("fwd_LONG_ROWS_FIRST", (True, False)),
    ("WRITE_DQ", (True, False)),
    ("FORCE_USE_FLEX_ATTENTION", (True,)),
    ("FAST_TANH", (False,)),
    ("BACKEND", ("TRITON",)),
)


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> Case:
    """Draw a case."""
    backward = scope.backward or draw(st.integers(0, 4)) == 0
    count = draw(st.sampled_from((1, 1, 2)))
    captured = draw(captures(count, gradients=backward))
    score_mod = draw(score_mods(captured)) if draw(st.integers(0, 2)) else None
    mask_mod = draw(mask_mods(captured)) if draw(st.integers(0, 3)) or score_mod is None else None
    texts = [mod.text for mod in (score_mod, mask_mod) if mod is not None]
    # Only kernels read 0 outside of a tensor: torch, which evaluates a block mask, raises, or worse on a GPU.
    lists_blocks = mask_mod is None or not mask_mod.may_read_outside
    captured = Captures(
        tuple(tensor for tensor in captured.tensors if reads(texts, tensor.name)),
        tuple(number for number in captured.numbers if reads(texts, number.name)),
    )
    dtype = draw(st.sampled_from(_DTYPES[:4] if scope.cuda else _DTYPES))
    options = draw(_options())
    head_dims = draw(_head_dims())
    group = draw(st.sampled_from((1, 1, 2, 3, 4)))
    drawing = _Drawing(scope, backward, ("layout", "bshd") in options, head_dims, group, lists_blocks, dtype)
    calls = tuple(draw(_call(drawing)) for _ in range(count))
    return Case(
        captured,
        None if score_mod is None else score_mod.text,
        None if mask_mod is None else mask_mod.text,
        options,
        dtype,
        calls,
    )


@st.composite
def _options(draw: st.DrawFn) -> tuple[tuple[str, object], ...]:
    chosen = draw(st.lists(st.sampled_from(_OPTIONS), unique=True, max_size=4))
    options = [(name, draw(st.sampled_from(values))) for name, values in chosen]
    if draw(st.integers(0, 3)) == 3:
        options.append(("layout", "bshd"))
    return tuple(options)


@st.composite
def _head_dims(draw: st.DrawFn) -> tuple[int, int]:
    first = draw(st.sampled_from(_HEAD_DIMS))
    return first, first if draw(st.integers(0, 2)) else draw(st.sampled_from(_HEAD_DIMS))


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The extents of a call."""

    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int

    @property
    def pairs(self) -> int:
        return self.batch * self.kv_heads * self.group * self.q_len * self.kv_len

    def smaller(self) -> _Sizes:
        """Return fewer heads, or where there is one only, fewer queries: a long row is worth more than many of them."""
        if self.batch * self.kv_heads > 1:
            return replace(self, batch=max(self.batch - 1, 1), kv_heads=max(self.kv_heads - 1, 1))
        if self.group > 1:
            return replace(self, group=1)
        return replace(self, q_len=self.q_len - self.q_len // 3 - 1)


@st.composite
def _sizes(draw: st.DrawFn, group: int, most_pairs: int) -> _Sizes:
    batch, kv_heads = draw(_BATCHES), draw(st.sampled_from((1, 1, 2, 3)))
    sizes = _Sizes(batch, kv_heads, group, draw(st.sampled_from(_LENGTHS)), draw(st.sampled_from(_LENGTHS)))
    while sizes.pairs > most_pairs:
        sizes = sizes.smaller()
    return sizes


@dataclass(frozen=True, slots=True)
class _Drawing:
    """What the calls of a case have in common.

    Attributes:
        bshd: the layout.
        lists_blocks: a block mask may be made of the mask.
    """

    scope: Scope
    backward: bool
    bshd: bool
    head_dims: tuple[int, int]
    group: int
    lists_blocks: bool
    dtype: str

    def ways(self, packed: bool, of_a_cache: bool) -> tuple[str, ...]:
        """Return the other ways to compute a call."""
        if packed:
            return OF_PACKED
        names = OF_A_CACHE if of_a_cache else tuple(WAYS)
        left_out = set() if self.lists_blocks else {OF_LISTED_BLOCKS}
        left_out |= set(WITHOUT_GRADIENTS) if self.backward else set()
        return tuple(way for way in names if way not in left_out)


@st.composite
def _call(draw: st.DrawFn, drawing: _Drawing) -> DrawnCall:
    sizes = draw(_sizes(drawing.group, _MOST_PAIRS_OF_A_GPU if drawing.scope.cuda else _MOST_PAIRS))
    packed = draw(st.integers(0, 6)) == 6 and sizes.batch > 0
    batch = 1 if packed else sizes.batch
    key_batch = 1 if draw(st.integers(0, 5)) == 5 else batch
    shapes = (
        (batch, sizes.kv_heads * sizes.group, sizes.q_len, drawing.head_dims[0]),
        *((key_batch, sizes.kv_heads, sizes.kv_len, head_dim) for head_dim in drawing.head_dims),
    )
    query, key, value = (draw(_placed(shape, drawing.bshd, drawing.backward)) for shape in shapes)
    kv_lengths = kv_dtype = None
    if not packed and not drawing.backward and draw(st.integers(0, 4)) == 4:
        kv_lengths = tuple(draw(st.integers(0, sizes.kv_len)) for _ in range(batch))
        is_half = drawing.dtype in ("float16", "bfloat16")
        kv_dtype = draw(st.sampled_from((None, "float8_e4m3fn", "float8_e5m2"))) if is_half else None
    return DrawnCall(
        query,
        key,
        value,
        scale=draw(st.sampled_from(_SCALES[:-1] if drawing.dtype == "float16" else _SCALES)),
        lengths=draw(_sequences(sizes.q_len, sizes.kv_len)) if packed else None,
        backward=drawing.backward,
        ways=tuple(draw(st.lists(st.sampled_from(drawing.ways(packed, kv_lengths is not None)), max_size=1))),
        kv_lengths=kv_lengths,
        kv_dtype=kv_dtype,
    )


@st.composite
def _placed(draw: st.DrawFn, sizes: tuple[int, ...], bshd: bool, backward: bool) -> Placed:
    shape = (sizes[0], sizes[2], sizes[1], sizes[3]) if bshd else sizes
    layouts = _REPEATED if draw(st.integers(0, 9)) == 9 else _LAYOUTS
    wanted = backward and draw(st.integers(0, 5)) != 5
    return Placed(shape, draw(st.sampled_from(layouts)), draw(_SEEDS), wanted, draw(_SPREADS))


@st.composite
def _sequences(draw: st.DrawFn, q_len: int, kv_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw how queries and keys are shared out over packed sequences; some may be left over."""
    count = draw(st.integers(1, 4))
    sides = []
    for total in (q_len, kv_len):
        ends = sorted(draw(st.integers(0, total)) for _ in range(count))
        sides.append(tuple(end - start for start, end in zip([0, *ends], ends, strict=False)))
    return sides[0], sides[1]

"""Kernels in the interpreter mean what they mean on a GPU, and cannot touch other memory."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import triton.language

from flexgen.errors import InternalError, KernelCompileError, KernelMemoryError
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.interpret import interpret
from tests.runtime import kernels
from tests.runtime.conftest import Load


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def attend(load: Load, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, subtiled: bool = False):
    module = load(kernels.ATTENTION.format(subtiled=subtiled))
    length = query.shape[0]
    out = torch.full((length, 16), math.nan, dtype=query.dtype)
    strides = [tensor.stride(0) for tensor in (query, key, value)]
    interpret(module, "attention", (-(-length // 16), 1, 1), [query, key, value, out, *strides, 0.25, length])
    return out


def expected_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    score = query.double() @ key.double().T * 0.25
    masked = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -math.inf)
    return masked.softmax(-1) @ value.double()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_attention_equals_float64(load: Load, dtype: torch.dtype, tolerance: float):
    query, key, value = torch.randn(3, 40, 16).to(dtype)
    out = attend(load, query, key, value)
    torch.testing.assert_close(out.double(), expected_attention(query, key, value), rtol=0, atol=tolerance)


def test_views_with_any_row_stride_are_read_in_place(load: Load):
    packed = torch.randn(40, 3, 16)
    query, value = packed[:, 0], packed[:, 2]
    key = torch.randn(1, 16).expand(40, 16)
    out = attend(load, query, key, value)
    torch.testing.assert_close(out.double(), expected_attention(query, key, value), rtol=0, atol=1e-6)


def test_subtiling_is_bitwise_equal(load: Load):
    query, key, value = torch.randn(3, 40, 16)
    assert torch.equal(attend(load, query, key, value), attend(load, query, key, value, subtiled=True))


INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_each_dtype_adds_in_place(load: Load, dtype: torch.dtype):
    left, right = torch.arange(20).to(dtype), torch.full((20,), 3).to(dtype)
    out = torch.zeros(24, dtype=dtype)[2:22]
    interpret(load(kernels.ADD), "add", (2, 1, 1), [left, right, out, 20])
    assert torch.equal(out, left + right)


def test_bfloat16_arithmetic_rounds_as_torch_does(load: Load):
    left, right = torch.randn(64).bfloat16(), torch.randn(64).bfloat16()
    out = torch.zeros_like(left)
    interpret(load(kernels.ADD), "add", (4, 1, 1), [left, right, out, 64])
    assert torch.equal(out, left + right)


CAST = """
@triton.jit
def cast(source, target):
    offset = tl.arange(0, 16)
    tl.store(target + offset, tl.load(source + offset).to(target.dtype.element_ty))
"""


def test_float32_to_bfloat16_rounds_to_nearest_even_and_keeps_nan(load: Load):
    ties = [1.00390625, 1.01171875, -1.00390625, 3.4e38, 1e-40, 0.0, -0.0, math.inf, -math.inf, math.nan]
    source = torch.tensor(ties + torch.randn(6).tolist())
    target = torch.zeros(16, dtype=torch.bfloat16)
    interpret(load(CAST), "cast", (1, 1, 1), [source, target])
    assert torch.equal(target.nan_to_num(7.0), source.bfloat16().nan_to_num(7.0))
    assert torch.signbit(target[6])


BOOLEANS = """
@triton.jit
def flip(source, target, counts):
    offset = tl.arange(0, 16)
    value = tl.load(source + offset)
    tl.store(target + offset, not value)
    tl.store(counts, tl.sum(value.to(tl.int32), 0))
"""


def test_booleans_load_negate_and_store(load: Load):
    source = torch.rand(16) > 0.5
    target, counts = torch.zeros(16, dtype=torch.bool), torch.zeros(1, dtype=torch.int32)
    interpret(load(BOOLEANS), "flip", (1, 1, 1), [source, target, counts])
    assert torch.equal(target, ~source)
    assert counts.item() == source.sum()


SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
INVERTED = """
@triton.jit
def invert(source, target):
    offset = tl.arange(0, 16)
    tl.store(target + offset, ~tl.load(source + offset))
"""


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64, torch.bool]
)
def test_bits_of_unsigned_integers_are_inverted(load: Load, dtype: torch.dtype):
    source = torch.arange(-8, 8).to(dtype)
    target = torch.zeros_like(source)
    interpret(load(INVERTED), "invert", (1, 1, 1), [source, target])
    assert torch.equal(target, ~source if dtype == torch.bool else (~source.view(SIGNED[dtype.itemsize])).view(dtype))


NAN = """
@triton.jit
def extremes(source, other, out):
    offset = tl.arange(0, 16)
    left, right = tl.load(source + offset), tl.load(other + offset)
    tl.store(out + offset, tl.maximum(left, right))
    tl.store(out + 16 + offset, tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL))
    tl.store(out + 32, tl.max(left, 0))
    tl.store(out + 33, tl.min(left, 0))
"""


def test_nan_is_ignored_or_propagated_as_asked(load: Load):
    left, right = torch.arange(16.0), torch.full((16,), 5.0)
    left[3] = right[4] = math.nan
    out = torch.zeros(34)
    interpret(load(NAN), "extremes", (1, 1, 1), [left, right, out])
    assert torch.equal(out[:16], torch.fmax(left, right))
    assert torch.equal(out[16:32].isnan(), torch.maximum(left, right).isnan())
    assert out[32:].tolist() == [15.0, 0.0]


REDUCTIONS = """
@triton.jit
def keep_larger(value, other):
    return tl.where(value > other, value, other)


@triton.jit
def reductions(source, out):
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    tile = tl.load(source + row * 8 + column)
    tl.store(out + tl.arange(0, 8), tl.reduce(tile, 0, keep_larger))
    tl.store(out + 8 + tl.arange(0, 4), tl.argmax(tile, 1))
    tl.store(out + 12, tl.sum(tile))
    tl.store(out + 13 + row * 8 + column, tl.cumsum(tile, 1))
    tl.store(out + 45 + row, tl.max(tile, 1, keep_dims=True))
"""


def test_reductions_and_scans(load: Load):
    source = torch.randn(4, 8)
    out = torch.zeros(49)
    interpret(load(REDUCTIONS), "reductions", (1, 1, 1), [source, out])
    parts = [source.amax(0), source.argmax(1), source.sum().view(1), source.cumsum(1).flatten(), source.amax(1)]
    torch.testing.assert_close(out, torch.cat([part.float() for part in parts]))


LOOPS = """
@triton.jit
def loops(out, start, stop):
    count = 0
    for index in range(start, stop, 2):
        count += index.to(tl.int64)
    for step in tl.static_range(3):
        count += step
    if (start < stop) and (start >= 0):
        count += 100
    while count > 1000:
        count -= 1000
    tl.store(out, count)
"""


@pytest.mark.parametrize(("start", "stop", "total"), [(0, 10, 123), (5, 5, 3), (-4, 0, -3), (0, 100, 553)])
def test_loops_and_conditions_on_scalars(load: Load, start: int, stop: int, total: int):
    out = torch.zeros(1, dtype=torch.int64)
    interpret(load(LOOPS), "loops", (1, 1, 1), [out, start, stop])
    assert out.item() == total


BY_NAME = """
from triton.language import float32 as real, cdiv

KIND = tl.constexpr(real)


@triton.jit
def by_name(out, length):
    tl.store(out, tl.full([4], cdiv(length, 4), KIND) + tl.arange(0, 4).to(real) + out.dtype.element_ty.itemsize)
"""


def test_names_imported_from_the_language_and_types_as_constants(load: Load):
    module = load(BY_NAME.replace("tl.store(out,", "tl.store(out + tl.arange(0, 4),"))
    out = torch.zeros(4)
    interpret(module, "by_name", (1, 1, 1), [out, 9])
    assert out.tolist() == [7.0, 8.0, 9.0, 10.0]


NUMBERS = """
@triton.jit
def numbers(out, whole, fraction):
    tl.store(out, (whole * 2 < 0).to(tl.int32))
    tl.store(out + 1, (fraction == 0.1).to(tl.int32))
"""


def test_numbers_have_the_types_of_the_signature(load: Load):
    out = torch.zeros(2, dtype=torch.int32)
    run = [load(NUMBERS), "numbers", (1, 1, 1), [out, 1 << 30, 0.1]]
    interpret(*run, arg_types=[ArgType("*i32"), ArgType("i32"), ArgType("fp32")])
    assert out.tolist() == [1, 1]  # an i32 wraps, and 0.1 is compared as fp32
    interpret(*run, arg_types=[ArgType("*i32"), ArgType("i64"), ArgType("fp64")])
    assert out[0] == 0


HINTS = """
@triton.jit
def copy(source, target):
    offset = tl.arange(0, 16)
    low = tl.load(source + offset, cache_modifier=".cg", eviction_policy="evict_last", volatile=True)
    high = tl.load(source + 16 + offset, mask=offset < 4, other=7.0, cache_modifier=".ca")
    tl.store(target + offset, low, cache_modifier=".wb", eviction_policy="evict_first")
    tl.store(target + 16 + offset, high, mask=offset < 8, cache_modifier=".cs")
"""


def test_hints_to_loads_and_stores_change_nothing(load: Load):
    source, target = torch.arange(32.0), torch.zeros(32)
    interpret(load(HINTS), "copy", (1, 1, 1), [source, target])
    expected = torch.cat([source[:20], torch.full([4], 7.0), torch.zeros(8)])
    assert torch.equal(target, expected)


def test_device_made_descriptors_read_zeros_and_write_nothing_outside(load: Load):
    source = torch.randn(20, 24)
    target = torch.zeros(21, 24)
    interpret(load(kernels.DESCRIPTOR_COPY), "copy", (2, 2, 1), [source, target[:20], 20, 24])
    assert torch.equal(target[:20], source)
    assert not target[20].any()


def test_an_empty_grid_touches_nothing(load: Load):
    empty = torch.zeros(0)
    interpret(load(kernels.ADD), "add", (0, 1, 1), [empty, empty, empty, 0])


ATOMIC = """
@triton.jit
def histogram(bins, out):
    tl.atomic_add(out + tl.load(bins + tl.arange(0, 16)), 1.0)
"""


def test_atomics_accumulate_duplicates(load: Load):
    bins, out = torch.arange(16) % 3, torch.zeros(3)
    interpret(load(ATOMIC), "histogram", (2, 1, 1), [bins, out])
    assert out.tolist() == [12.0, 10.0, 10.0]


OVERFLOW = """
@triton.jit
def overflow(out):
    offset = tl.arange(0, 4)
    large = tl.exp2(offset.to(tl.float32) * 100)
    tl.store(out + offset, large - large)
"""


def test_infinities_do_not_warn(load: Load):
    out = torch.zeros(4)
    interpret(load(OVERFLOW), "overflow", (1, 1, 1), [out])
    assert out.isnan().tolist() == [False, False, True, True]


class TestMemory:
    """An access outside of the elements of a tensor is an error, and happens before anything is written."""

    def test_reading_behind_the_end_names_tensor_element_and_line(self, load: Load):
        storage = torch.zeros(32)
        arguments = [storage[:20], storage, storage, 21]
        with pytest.raises(KernelMemoryError, match="element 20 of 'left', which has 20") as caught:
            interpret(load(kernels.ADD), "add", (2, 1, 1), arguments)
        assert "tl.load(left + offset" in str(caught.value)

    def test_writing_before_the_start_leaves_the_neighbour_alone(self, load: Load):
        module = load("\n@triton.jit\ndef poke(out):\n    tl.store(out - 1, 5.0)\n")
        storage = torch.zeros(4)
        with pytest.raises(KernelMemoryError, match="element -1 of 'out'"):
            interpret(module, "poke", (1, 1, 1), [storage[2:]])
        assert not storage.any()

    def test_a_null_pointer_may_be_passed_but_not_used(self, load: Load):
        module = load("\n@triton.jit\ndef maybe(out, use):\n    if use != 0:\n        tl.store(out, 1)\n")
        interpret(module, "maybe", (1, 1, 1), [None, 0])
        with pytest.raises(KernelMemoryError):
            interpret(module, "maybe", (1, 1, 1), [None, 1])

    def test_atomics_are_checked(self, load: Load):
        with pytest.raises(KernelMemoryError, match="'out'"):
            interpret(load(ATOMIC), "histogram", (1, 1, 1), [torch.arange(16), torch.zeros(3)])


class TestErrors:
    def test_a_block_as_a_condition_is_refused_at_its_line(self, load: Load):
        module = load("\n@triton.jit\ndef branch(out):\n    if tl.arange(0, 4) > 2:\n        tl.store(out, 1.0)\n")
        with pytest.raises(KernelCompileError, match="must be a scalar") as caught:
            interpret(module, "branch", (1, 1, 1), [torch.zeros(1)])
        assert caught.value.where is not None
        assert caught.value.where.text.strip() == "if tl.arange(0, 4) > 2:"

    def test_a_false_hint_is_refused(self, load: Load):
        module = load("\n@triton.jit\ndef hint(out, n):\n    tl.store(out, tl.multiple_of(n, 16))\n")
        with pytest.raises(KernelCompileError, match="24 is not a multiple of 16"):
            interpret(module, "hint", (1, 1, 1), [torch.zeros(1, dtype=torch.int32), 24])

    def test_an_unknown_entry_is_named(self, load: Load):
        with pytest.raises(InternalError, match="no kernel 'multiply'"):
            interpret(load(kernels.ADD), "multiply", (1, 1, 1), [])

    def test_tensors_must_be_on_the_cpu(self, load: Load):
        with pytest.raises(InternalError, match="meta"):
            interpret(load(kernels.ADD), "add", (1, 1, 1), [torch.zeros(1, device="meta")] * 3 + [1])


def test_tritons_own_modules_stay_as_they_are(load: Load):
    tl = triton.language
    before = [dict(vars(owner)) for owner in (tl, tl.core, tl.core.tensor, tl.math, tl.standard)]
    out = torch.zeros(16)
    interpret(load(kernels.ADD), "add", (1, 1, 1), [out, out, out, 16])
    assert before == [dict(vars(owner)) for owner in (tl, tl.core, tl.core.tensor, tl.math, tl.standard)]

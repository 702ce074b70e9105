"""The launcher compiles once for each class of alignment, and hands over addresses and numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from flexgen.errors import InternalError, NoFeasiblePlanError
from flexgen.lowering.targets import TARGETS, Target
from flexgen.runtime import launch
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import COMPILATIONS
from flexgen.runtime.launch import Launcher
from tests.runtime import kernels
from tests.runtime.conftest import Load

TYPES = [ArgType("*fp32", True), ArgType("*fp32", True), ArgType("*fp32", True), ArgType("i32")]


@pytest.fixture
def launcher(load: Load, monkeypatch: pytest.MonkeyPatch) -> tuple[Launcher, list[Sequence[object]]]:
    """A launcher for a GPU that this machine need not have: compiles for real, records instead of launching."""
    calls: list[Sequence[object]] = []
    monkeypatch.setattr(launch, "make_submit", lambda kernel, device: lambda *args: calls.append(args))
    monkeypatch.setattr(launch, "current_raw_stream", lambda device: 5)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the index of the CPU
    made = Launcher(load(kernels.ADD), "add", TYPES, TARGETS["sm_80"], num_warps=1, num_stages=1)
    return made, calls


def test_lengths_never_compile_again_and_alignment_does_once(launcher: tuple[Launcher, list[Sequence[object]]]):
    add, calls = launcher
    storage = torch.zeros(256)
    aligned, shifted = storage[:64], storage[65:129]
    before = COMPILATIONS.total
    for length in (1, 16, 17, 2**31 - 1):
        add.launch((1, 1, 1), [aligned, aligned, aligned, length])
    assert COMPILATIONS.total == before + 1
    for _ in range(2):
        add.launch((1, 1, 1), [aligned, shifted, aligned, 16])
    assert COMPILATIONS.total == before + 2
    add.launch((1, 1, 1), [shifted, shifted, aligned, 16])
    assert COMPILATIONS.total == before + 3
    assert len(calls) == 7


def test_tensors_are_passed_as_addresses_on_the_given_stream(launcher: tuple[Launcher, list[Sequence[object]]]):
    add, calls = launcher
    tensor = torch.zeros(64)
    add.launch((2, 3, 4), [tensor, None, tensor, 16])
    add.launch((2, 3, 4), [tensor, None, tensor, 16], stream=9)
    values = [tensor.data_ptr(), 0, tensor.data_ptr(), 16]
    assert calls == [(2, 3, 4, 5, values), (2, 3, 4, 9, values)]


def test_an_empty_grid_launches_and_compiles_nothing(launcher: tuple[Launcher, list[Sequence[object]]]):
    add, calls = launcher
    before = COMPILATIONS.total
    add.launch((0, 1, 1), [torch.zeros(0)] * 3 + [0])
    assert not calls
    assert COMPILATIONS.total == before


def test_a_kernel_without_pointers_is_refused(load: Load):
    with pytest.raises(InternalError, match="no pointer"):
        Launcher(load(kernels.ADD), "add", [ArgType("i32")], TARGETS["sm_80"], num_warps=1, num_stages=1)


def own_target() -> Target:
    major, minor = torch.cuda.get_device_capability()
    return TARGETS[f"sm_{major}{minor}"]


@pytest.mark.gpu
def test_vector_add_on_the_device(load: Load):
    add = Launcher(load(kernels.ADD), "add", TYPES, own_target(), num_warps=1, num_stages=1)
    for length in (1, 16, 1000):
        left, right = torch.randn(2, length + 1, device="cuda")
        out = torch.zeros(length + 1, device="cuda")
        add.launch((-(-length // 16), 1, 1), [left[1:], right[1:], out[1:], length])
        assert torch.equal(out[1:], left[1:] + right[1:])
        assert out[0] == 0


@pytest.mark.gpu
def test_descriptor_copy_on_the_device(load: Load):
    types = [ArgType("*bf16", True), ArgType("*bf16", True), ArgType("i32"), ArgType("i32")]
    copy = Launcher(load(kernels.DESCRIPTOR_COPY), "copy", types, own_target(), num_warps=4, num_stages=1)
    source = torch.randn(100, 72, device="cuda").bfloat16()
    for _ in range(20):
        target = torch.zeros_like(source)
        copy.launch((7, 5, 1), [source, target, 100, 72])
        assert torch.equal(source, target)


@pytest.mark.gpu
def test_launches_follow_the_current_stream(load: Load):
    add = Launcher(load(kernels.ADD), "add", TYPES, own_target(), num_warps=1, num_stages=1)
    left = torch.ones(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        out = torch.full_like(left, 5.0)
        add.launch((1 << 16, 1, 1), [out, left, out, 1 << 20])
        total = out.sum()
        torch.cuda.current_stream().synchronize()
    assert total.item() == 6.0 * (1 << 20)


SHARED = """
@triton.jit
def large(left, right, out, length):
    row, column = tl.arange(0, 256)[:, None], tl.arange(0, 256)[None, :]
    a, b = tl.load(left + row * 256 + column), tl.load(right + row * 256 + column)
    tl.store(out + row * 256 + column, tl.dot(a, b, input_precision="ieee"))
"""


@pytest.mark.gpu
def test_too_much_shared_memory_is_a_named_error(load: Load):
    large = Launcher(load(SHARED), "large", TYPES, own_target(), num_warps=8, num_stages=1)
    tensor = torch.zeros(256, 256, device="cuda")
    with pytest.raises(NoFeasiblePlanError, match="shared memory"):
        large.launch((1, 1, 1), [tensor, tensor, tensor, 0])

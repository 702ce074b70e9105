"""A kernel that does not fit the device is planned again for less, once and for all; a forced one is an error.

There is no GPU here: kernels planned for a chip run in the interpreter, which stands in for a device that has less
shared memory than the model counts on.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from triton.runtime.errors import OutOfResources

import flexgen
from flexgen.errors import NoFeasiblePlanError, OutOfResourcesError
from flexgen.lowering.targets import TARGETS
from flexgen.runtime import kernel as kernel_module
from flexgen.runtime import launch
from flexgen.runtime.build import out_of_resources
from flexgen.runtime.interpret import interpret
from flexgen.runtime.launch import Launcher
from tests.runtime import kernels
from tests.runtime.conftest import Load
from tests.runtime.test_launch import TYPES


class Device:
    """A device that runs what needs no more shared memory than it has.

    Attributes:
        has: bytes of shared memory.
        underestimated: how many times as much kernels need as their plans say.
        refused, ran: kernels, by name and bytes that they need.
    """

    def __init__(self) -> None:
        self.has = 1 << 30
        self.underestimated = 1.0
        self.refused: list[tuple[str, int]] = []
        self.ran: list[tuple[str, int]] = []

    def executor(self, plan, source):
        counted = [decision.value for decision in getattr(plan, "decisions", ()) if decision.name == "shared_bytes"]
        needs = int(counted[0] * self.underestimated) if counted else 0
        module = kernel_module.module_of(source)

        def execute(grid, values):
            if needs > self.has:
                self.refused.append((source.entry, needs))
                raise out_of_resources(source.entry, OutOfResources(needs, self.has, "shared memory"), 4, 2)
            self.ran.append((source.entry, needs))
            interpret(module, source.entry, grid, values, source.args, source.line_map)

        return execute


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """A device that takes its plans for an sm_90."""
    made = Device()
    init = kernel_module.Kernel.__init__

    def simulated(self, source, plan, owner) -> None:
        monkeypatch.setattr(kernel_module, "executor", lambda *_: made.executor(plan, source))
        init(self, source, plan, owner)

    monkeypatch.setattr(kernel_module.Kernel, "__init__", simulated)
    for module in ("flexgen.attention", "flexgen.tables"):
        monkeypatch.setattr(f"{module}.target_of", lambda device: TARGETS["sm_90"], raising=False)
    return made


def inputs(requires_grad: bool = False):
    return tuple(
        torch.randn(1, 1, 70, 64, generator=torch.Generator().manual_seed(n)).requires_grad_(requires_grad)
        for n in range(3)
    )


def dense(query, key, value):
    return (query.double() @ key.double().mT / 8).softmax(-1) @ value.double()


def test_what_fits_runs_as_planned_and_warns_of_nothing(device: Device, recwarn: pytest.WarningsRecorder):
    tensors = inputs()
    torch.testing.assert_close(flexgen.compile()(*tensors).double(), dense(*tensors), atol=1e-5, rtol=0)
    assert not device.refused
    assert not recwarn.list


@pytest.mark.parametrize("underestimated", [1.0, 1.7, 2.5])
def test_the_next_plan_that_fits_is_taken_and_kept(device: Device, underestimated: float):
    device.underestimated, device.has = underestimated, 40_000
    attention, tensors = flexgen.compile(), inputs()
    with pytest.warns(RuntimeWarning, match=r"needs \d+ bytes of shared memory, and the device has 40000") as warned:
        output = attention(*tensors)
    assert len(warned) == 1
    torch.testing.assert_close(output.double(), dense(*tensors), atol=1e-5, rtol=0)
    refusals, taken = len(device.refused), device.ran[-1][1]
    assert refusals >= 1
    assert taken <= 40_000
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*tensors)
        attention(*(t[:, :, :66] for t in tensors))  # another form of the same configuration
    assert len(device.refused) == refusals
    assert device.ran[-1][1] == taken


def test_other_configurations_are_planned_for_what_the_device_has(device: Device):
    device.has = 40_000
    attention, tensors = flexgen.compile(), inputs()
    with pytest.warns(RuntimeWarning):
        attention(*tensors)
    refusals = len(device.refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*(t[:, :, :60] for t in tensors))
    assert len(device.refused) == refusals


def test_backward_kernels_that_do_not_fit_are_planned_again(device: Device):
    tensors, attention = inputs(requires_grad=True), flexgen.compile()
    output = attention(*tensors)
    device.has = 45_000
    with pytest.warns(RuntimeWarning, match="takes a smaller plan") as warned:
        found = torch.autograd.grad(output.square().sum(), tensors)
    assert len(warned) == 1
    exact = [t.detach().double().requires_grad_() for t in tensors]
    wanted = torch.autograd.grad(dense(*exact).square().sum(), exact)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-4, rtol=0)
    assert {entry for entry, _ in device.refused} & {"backward_dq", "backward_dkdv"}


def test_what_is_forced_and_does_not_fit_is_an_error_with_the_bytes(device: Device):
    device.has = 30_000
    attention = flexgen.compile(options={"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2})
    with pytest.warns(RuntimeWarning), pytest.raises(NoFeasiblePlanError) as refusal:
        attention(*inputs())
    needed = device.refused[0][1]
    assert f"forward needs {needed} bytes of shared memory, and the device has 30000" in str(refusal.value)
    assert "drop or lower one of BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2" in str(refusal.value)


def test_a_forced_tile_may_still_get_fewer_stages(device: Device):
    tensors = [tensor.bfloat16() for tensor in inputs()]
    flexgen.compile(options={"BLOCK_M": 64, "BLOCK_N": 32, "BACKEND": "TRITON"})(*tensors)
    device.has = device.ran[-1][1] - 1
    with pytest.warns(RuntimeWarning):
        flexgen.compile(options={"BLOCK_M": 64, "BLOCK_N": 32, "BACKEND": "TRITON"})(*tensors)
    assert device.ran[-1][1] <= device.has


def test_where_nothing_fits_the_error_says_what_is_there(device: Device):
    device.has = 10
    with pytest.warns(RuntimeWarning), pytest.raises(NoFeasiblePlanError, match="and the device has 10"):
        flexgen.compile()(*inputs())


def test_tritons_own_error_is_told_in_full(load: Load, monkeypatch: pytest.MonkeyPatch):
    def too_large(kernel: object, device: int) -> None:
        raise OutOfResources(240_000, 232_448, "shared memory")

    monkeypatch.setattr(launch, "make_submit", too_large)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)
    add = Launcher(load(kernels.ADD), "add", TYPES, TARGETS["sm_90"], num_warps=1, num_stages=1)
    with pytest.raises(OutOfResourcesError) as refusal:
        add.launch((1, 1, 1), [torch.zeros(16)] * 3 + [16])
    assert refusal.value.what == "add needs 240000 bytes of shared memory, and the device has 232448"
    assert (refusal.value.required, refusal.value.available) == (240_000, 232_448)

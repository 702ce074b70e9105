"""What a launch hands to Triton's C function is what the installed version's own launcher hands to it."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia import driver

from flexgen.runtime.gluon_descriptor import descriptor_form
from flexgen.runtime.submit import make_submit

PACKED = (4, 1, 1024)  # warps, CTAs of a cluster, bytes of shared memory


class Kernel:
    """Stands in for a kernel of Triton's that has been loaded."""

    function, packed_metadata = 77, PACKED

    def __init__(self, run: object) -> None:
        self.run = run


class Launches:
    """Stands in for Triton's C function: keeps what it is called with."""

    def __init__(self, **launcher: object) -> None:
        self.calls: list[Sequence[object]] = []
        attributes = {
            "launch_cooperative_grid": False,
            "launch_pdl": False,
            "global_scratch_size": 0,
            "profile_scratch_size": 0,
            "num_ctas": 1,
            "launch": self.record,
        }
        self.run = types.SimpleNamespace(**attributes | launcher)

    def record(self, *args: object) -> None:
        self.calls.append(args)


def test_order_of_3_6() -> None:
    made = Launches()
    make_submit(Kernel(made.run), 0)(1, 2, 3, 4, [10, 11])
    assert made.calls == [(1, 2, 3, 4, 77, False, False, None, None, PACKED, None, None, None, 10, 11)]


def test_order_since_3_7() -> None:
    made = Launches(arg_annotations=["annotation"], kernel_signature=b"signature")
    make_submit(Kernel(made.run), 0)(1, 2, 3, 4, [10, 11])
    expected = (1, 2, 3, 4, 77, False, False, PACKED, None, None, None, None, None)
    assert made.calls == [(*expected, ["annotation"], b"signature", [10, 11])]


NEWER: dict[str, Any] = {"arg_annotations": [], "kernel_signature": b""}


@pytest.mark.parametrize("newer", [{}, NEWER], ids=["3.6", "since 3.7"])
def test_scratch_for_every_program_lives_until_the_launch(
    monkeypatch: pytest.MonkeyPatch, newer: dict[str, Any]
) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, *, dtype, device: empty(size, dtype=dtype))
    made = Launches(global_scratch_size=256, num_ctas=2, **newer)
    make_submit(Kernel(made.run), 0)(2, 3, 1, 4, [])
    (scratch,) = [value for value in made.calls[0] if isinstance(value, torch.Tensor)]
    assert scratch.nbytes == 6 * 2 * 256


def test_an_unknown_launcher_is_called_as_triton_documents() -> None:
    made = Launches()
    make_submit(Kernel(made.record), 0)(1, 2, 3, 4, [10])
    assert made.calls == [(1, 2, 3, 4, 77, PACKED, None, None, None, 10)]


@pytest.mark.parametrize("instrumented", [{"profile_scratch_size": 8}, {"gsan_enabled": True}], ids=["profile", "gsan"])
def test_what_instruments_kernels_adds_its_own_arguments(instrumented: dict[str, Any]) -> None:
    class Run(types.SimpleNamespace):
        def __call__(self, *args: object) -> None:
            documented.append(args)

    documented: list[Sequence[object]] = []
    made = Launches(**NEWER, **instrumented)
    make_submit(Kernel(Run(**vars(made.run))), 0)(1, 2, 3, 4, [10])
    assert documented == [(1, 2, 3, 4, 77, PACKED, None, None, None, 10)]
    assert not made.calls


@pytest.mark.parametrize("form", ["3.6", "since 3.7", "documented"])
def test_a_kernel_lives_as_long_as_what_launches_it(form: str) -> None:
    """Since 3.8 Triton unloads the machine code of a kernel that goes."""
    made = Launches(**({} if form == "3.6" else NEWER))
    kernel = Kernel(made.record if form == "documented" else made.run)
    alive = weakref.ref(kernel)
    submit = make_submit(kernel, 0)
    del kernel
    gc.collect()
    assert alive() is not None
    submit(1, 1, 1, 0, [])
    assert len(made.calls) == 1


SIGNATURES = {
    "plain": {"left": "*fp32", "out": "*fp32", "length": "i32", "scale": "fp32"},
    "a descriptor": {"tile": "tensordesc<bf16[1, 1, 64, 128]>", "out": "*bf16", "length": "i32"},
}


class TestInstalled:
    """The installed version's own launcher, over C functions that record: it says the order, whatever the version."""

    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> list[Sequence[object]]:
        """What Triton's C function is called with, in a process without a GPU."""
        calls: list[Sequence[object]] = []
        compiled = types.SimpleNamespace(launch=lambda *args: calls.append(args))
        utilities = types.SimpleNamespace(
            launch=compiled.launch,
            build_signature_metadata=lambda signature: tuple(signature),
            fill_tma_descriptor=lambda *args: args,
            fill_tma_descriptor_tiled=lambda *args: args,
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", types.SimpleNamespace(utils=utilities))
        monkeypatch.setattr(driver, "PyKernelArg", lambda **named: named, raising=False)
        # 3.6 compiles a C function for each signature.
        monkeypatch.setattr(driver, "compile_module_from_src", lambda **named: compiled, raising=False)
        monkeypatch.setattr(driver, "library_dirs", list)
        return calls

    @pytest.mark.parametrize("form", SIGNATURES)
    def test_takes_the_same(self, calls: list[Sequence[object]], form: str) -> None:
        signature = SIGNATURES[form]
        described = [kind for kind in signature.values() if kind.startswith("tensordesc")]
        about_tiles = [
            {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64], "fp4_padded": False}
            for _ in described
        ]
        metadata = types.SimpleNamespace(
            tensordesc_meta=about_tiles,
            num_ctas=1,
            global_scratch_size=0,
            global_scratch_align=1,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=False,
            instrumentation_mode="",
        )
        source = types.SimpleNamespace(signature=signature, constants={})
        launcher = driver.CudaLauncher(source, metadata)
        tile = torch.zeros(2, 4, 100, 128, dtype=torch.bfloat16)
        values = [descriptor_form(tile).of(tile) if kind in described else 16 for kind in signature.values()]
        launcher(1, 2, 3, 4, 77, PACKED, None, None, None, *values)
        make_submit(Kernel(launcher), 0)(1, 2, 3, 4, values)
        own, handed = ([_listed(value) for value in call] for call in calls)
        assert handed == own
        assert len(calls) == 2


def _listed(value: object) -> object:
    """Return a value such that those compare equal which the C function takes for the same."""
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value

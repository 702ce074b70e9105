"""Packed sequences, compiled for Hopper: the loops are those of the kernels for one sequence a batch entry."""

from __future__ import annotations

import re

import pytest
import torch

import flexgen
from flexgen.runtime.resources import measure
from tests.goldens.kernels import Sizes, causal_mask, offsets

SIZES = Sizes(B=1, Hq=16, Hkv=16, Lq=8209, Lk=8209)
MORE_REGISTERS = 8
MORE_SPILLS = 16  # bytes, beside a couple of hundred


def lowered(head_dim: int, *, packed: bool, **options: object) -> flexgen.Lowered:
    tensors = [tensor.requires_grad_() for tensor in Sizes(**{**_fields(SIZES), "D": head_dim}).tensors()]
    attention = flexgen.compile(None, causal_mask, {"fwd_BACKEND": "TRITON", **options})
    return attention.lower(*tensors, target="sm_90", **offsets(16 if packed else None))


def _fields(sizes: Sizes) -> dict[str, object]:
    return {name: getattr(sizes, name) for name in ("B", "Hq", "Hkv", "Lq", "Lk")}


@pytest.mark.parametrize("entry", ["forward", "backward_dq", "backward_dkdv"])
def test_the_loop_is_that_of_one_sequence(entry: str) -> None:
    plain, packed = (lowered(64, packed=is_packed).source[entry] for is_packed in (False, True))
    function = re.compile(r"def (?:attend|accumulate)\(.*?\n\n\n", re.DOTALL)
    (loop,), (packed_loop,) = function.findall(plain), function.findall(packed)
    assert packed_loop == loop


@pytest.mark.parametrize(
    ("entry", "head_dim"),
    [
        ("forward", 64),
        pytest.param("backward_dkdv", 64, marks=pytest.mark.slow),
        pytest.param("forward", 128, marks=pytest.mark.slow),
        pytest.param("backward_dq", 64, marks=pytest.mark.slow),
        pytest.param("backward_dq", 128, marks=pytest.mark.slow),
        pytest.param("backward_dkdv", 128, marks=pytest.mark.slow),
    ],
)
def test_packing_costs_no_pipeline_and_hardly_registers(entry: str, head_dim: int) -> None:
    (plain, copies), (packed, packed_copies) = (
        (measure(binary), str(binary.stages["ttgir"]).count("async_copy_global_to_local"))
        for binary in (lowered(head_dim, packed=is_packed).binary(entry) for is_packed in (False, True))
    )
    assert packed_copies == copies > 0
    assert packed.shared_bytes == plain.shared_bytes
    assert packed.registers <= plain.registers + MORE_REGISTERS
    assert packed.spill_stores <= plain.spill_stores + MORE_SPILLS


@pytest.mark.slow
def test_the_copy_engine_reads_a_sequence() -> None:
    binary = lowered(64, packed=True, fwd_USE_TMA=True).binary()
    assert measure(binary).count("UTMALDG") > 0


def test_offsets_of_64_bits_compile() -> None:
    tensors = [torch.empty(1, 2, 300, 64, dtype=torch.bfloat16, device="meta")] * 3
    long = torch.empty(5, dtype=torch.int64, device="meta")
    kernel = flexgen.compile(None, causal_mask).lower(*tensors, cu_seqlens_q=long, target="gfx942")
    assert ".to(tl.int32) - q_begin" in kernel.source["forward"]
    measure(kernel.binary())

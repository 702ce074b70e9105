"""Exported modules on a GPU, launched by Triton itself: the same numbers as the reference, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flexgen
from flexgen.export_binary import export_package
from flexgen.runtime.device_target import target_of
from tests.export import test_decode
from tests.export.conftest import Case
from tests.export.standalone import load
from tests.export.test_dropout_and_packing import CALLS, SEED, own, text_of
from tests.export.test_dropout_and_packing import weights as weights_of_call
from tests.export.test_hopper import CASES as HOPPER
from tests.export.test_hopper import Hopper
from tests.export.test_meaning import CASES, captured_case, expected, weights_of
from tests.reference import dense_attention, largest_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_exported_module_runs_on_this_gpu(case: Case, tmp_path: Path) -> None:
    text = replace(case, target=target_of(torch.device("cuda")).name).export()
    path = tmp_path / f"{case.name}.py"
    path.write_text(text)
    _hold_against_reference(case, load(path).attention)


def _hold_against_reference(case: Case, attention: Callable[..., Any]) -> None:
    arguments = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.inputs()]
    captured = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.captured]
    outputs = attention(*arguments, *captured)
    exact, exact_grads = expected(case, weights_of(case))
    for actual, reference in zip(outputs, exact, strict=True):
        assert largest_error(actual.cpu(), reference) < 1e-4
    leaves = [tensor for tensor in (*arguments, *captured) if tensor.requires_grad]
    if leaves:
        pairs = zip(outputs, weights_of(case), strict=True)
        loss = sum((output * weight.cuda()).sum() for output, weight in pairs)
        for actual, reference in zip(torch.autograd.grad(loss, leaves), exact_grads, strict=True):
            assert largest_error(actual.cpu(), reference) < 1e-3


def test_a_package_of_machine_code_runs_on_this_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded by the driver's own library: the forward, and every backward kernel."""
    case = captured_case()
    name = target_of(torch.device("cuda")).name
    attention = flexgen.compile(case.score_mod, case.mask_mod, {"BACKEND": "TRITON"})
    aux = flexgen.AuxRequest(lse=True)
    lowered = attention.lower(*case.inputs(), return_aux=aux, target=name)
    for file, content in export_package([lowered], layout="bhsd", aux=aux, how="made by a test").items():
        path = tmp_path / "packed_for_gpu" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    packed = importlib.import_module("packed_for_gpu")
    _hold_against_reference(case, packed.attention)


@pytest.mark.parametrize("name", HOPPER)
def test_an_exported_module_with_hopper_kernels_runs(name: str, tmp_path: Path) -> None:
    """Forward and every backward kernel, against float64; the first run of a process compiles them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for sm_90")
    case = HOPPER[name]
    path = tmp_path / "hopper_module.py"
    path.write_text(case.export())
    _hold_hopper_against_reference(case, load(path).attention)


@pytest.mark.parametrize("name", HOPPER)
def test_a_package_with_hopper_kernels_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded and described to the copy engine by the driver's own library, without Triton."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for sm_90")
    case, package = HOPPER[name], f"hopper_package_of_{name}"
    files = export_package([case.lower()], layout="bhsd", aux=flexgen.AuxRequest(lse=True), how="made by a test")
    for file, content in files.items():
        path = tmp_path / package / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path))
    _hold_hopper_against_reference(case, importlib.import_module(package).attention)


def _hold_hopper_against_reference(case: Hopper, attention: Callable[..., Any]) -> None:
    tensors = case.inputs("cuda")
    output, logsumexp = attention(*tensors, *(tensor.cuda() for tensor in case.captured))
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(6)).to(output.dtype)
    grads = torch.autograd.grad((output * weight.cuda()).sum() + logsumexp.sum(), tensors)
    inputs = [tensor.detach().double().requires_grad_() for tensor in case.inputs()]
    dense = dense_attention(*inputs, case.score_mod, case.mask_mod)
    exact_grads = torch.autograd.grad((dense.out * weight.double()).sum() + dense.lse.sum(), inputs)
    for actual, exact in zip((output, logsumexp, *grads), (dense.out, dense.lse, *exact_grads), strict=True):
        assert largest_error(actual.detach().cpu(), exact.detach()) < 2e-2 * float(exact.detach().abs().max())


@pytest.mark.parametrize("name", CALLS)
def test_dropout_and_packed_sequences_on_this_gpu(name: str, tmp_path: Path) -> None:
    """The module draws on the GPU what flexgen draws there with the same seed."""
    case, named = CALLS[name]
    target = target_of(torch.device("cuda")).name
    path = tmp_path / "drawing.py"
    path.write_text(text_of(case, target))
    given = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in named.items()}
    arguments = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in case.inputs()]
    captured = [tensor.detach().cuda() for tensor in case.captured]
    torch.manual_seed(SEED)
    output, logsumexp = load(path).attention(*arguments, *captured, **given)
    found = [output, logsumexp]
    if case.trains:
        found += torch.autograd.grad((output * weights_of_call(case)[0].cuda()).sum(), arguments)
    for actual, exact in zip(found, own(case, named, "cuda"), strict=True):
        error = largest_error(actual.detach().cpu().nan_to_num(1e9, 1e9, -1e9), exact.cpu().nan_to_num(1e9, 1e9, -1e9))
        assert error < 1e-3


@pytest.mark.parametrize("name", test_decode.CASES)
def test_decoding_over_caches_on_this_gpu(name: str, tmp_path: Path) -> None:
    """Splits, growing caches, pages and 8-bit keys: what flexgen computes on the GPU."""
    path = tmp_path / "decoding.py"
    path.write_text(test_decode.text_of(name, target_of(torch.device("cuda")).name))
    given = {key: one.cuda() if isinstance(one, torch.Tensor) else one for key, one in test_decode.passed(name).items()}
    tensors = [tensor.cuda() for tensor in test_decode.CASES[name][3]]
    for actual, exact in zip(load(path).attention(*tensors, **given), test_decode.own(name, "cuda"), strict=True):
        assert largest_error(actual.cpu(), exact.cpu()) < (1e-2 if exact.dtype == torch.float16 else 1e-4)

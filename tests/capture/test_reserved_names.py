"""Captured values keep their names, unless an emitted kernel binds the name itself where the value is in scope."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch

import flexgen
from benchmarks.gluon_backward_check import backward_checks, lowered
from flexgen.capture.names import is_reserved
from flexgen.codegen.source import KernelSource, Role
from tests.goldens.kernels import CASES, KernelCase

# Functions that only combine their arguments: captured values reach them as values, under names of their own.
MODS = ("score_mod", "mask_mod", "score_grad", "contribution_", "scatter_", "measure_")
PRINTED = ("chosen", "converted")  # values of loop bounds, named so that they differ from what is captured
CAPTURED = (Role.BUFFER, Role.BUFFER_STRIDE, Role.BUFFER_SIZE, Role.SCALAR)


def bound_names(source: KernelSource) -> set[str]:
    """Return what the kernel's functions bind, other than captured values and what needs none of them."""
    captured = {name for arg in source.args if arg.role in CAPTURED for name in (arg.name, arg.of)}
    tree = ast.parse(source.text)
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and not function.name.startswith(MODS) and in_scope(function, source):
            names |= set(bindings(function))
    own = (*(f"{name}_" for name in captured), *PRINTED)
    return {name for name in names - captured if not name.isupper() and not name.startswith(own)}


def in_scope(function: ast.FunctionDef, source: KernelSource) -> bool:
    """Whether captured values may reach the function: the entry, and the loop that calls the mods."""
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    called = [callee.id for callee in calls if isinstance(callee, ast.Name)]
    return function.name == source.entry or any(name.startswith(MODS) for name in called)


def bindings(function: ast.FunctionDef) -> Iterator[str]:
    yield from (argument.arg for argument in function.args.args)
    yield from (n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


@pytest.mark.parametrize("target", ["sm_100", "sm_90"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_names_that_forward_kernels_bind_are_reserved(case: KernelCase, target: str) -> None:
    lowered = case.lower(target)
    assert [name for name in sorted(bound_names(lowered.forward.source)) if not is_reserved(name)] == []


HOPPER = ("window tails D=64", "softcap D=128", "documents D=256", "block mask causal D=64", "GQA document starts")


@pytest.mark.parametrize("name", HOPPER)
def test_names_that_hopper_backward_kernels_bind_are_reserved(name: str) -> None:
    check = next(check for check in backward_checks() if check.name == f"backward: {name}")
    for source, _ in lowered(check).backward.passes.values():
        assert [name for name in sorted(bound_names(source)) if not is_reserved(name)] == []


# Each of these was, or would be, overwritten in a kernel's loop, or a parameter twice.
NAMES = ["block", "head", "weight", "delta", "row_exists", "q_lo", "lo_0", "output", "grad_bias", "score_mod", "step"]


@pytest.mark.parametrize("name", NAMES)
def test_captured_number_of_any_name_is_itself(name: str) -> None:
    """The number changes between calls, so that it is an argument of the kernels."""
    scope: dict[str, object] = {}
    exec(SOURCE.replace("NAME", name), scope)
    bias = torch.linspace(-1, 1, 70, requires_grad=True)
    mod, mask, put = scope["make"](bias)  # type: ignore[operator]
    inputs = [torch.randn(1, 1, 70, 16, requires_grad=True) for _ in range(3)]
    tiles = dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), 32)
    attention = flexgen.compile(mod, mask, tiles)
    for number in (0.1, 0.2, 0.1):
        put(number)
        changing = gradients(attention, inputs, bias)
    fixed = gradients(flexgen.compile(mod, mask, tiles), inputs, bias)
    for one, other in zip(changing, fixed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


SOURCE = """
def make(bias):
    NAME = 0.1

    def mod(score, b, h, q, k):
        return score * 0.5 + NAME * (q - k) + bias[k]

    def mask(b, h, q, k):
        return ((q >= k) & (q - k < NAME * 100 + 20)) | (k < 3)

    def put(number):
        nonlocal NAME
        NAME = number

    return mod, mask, put
"""


def gradients(attention: flexgen.Attention, inputs: list[torch.Tensor], bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out = attention(*inputs)
    return (out.detach(), *torch.autograd.grad(out.sum(), [*inputs, bias]))


@pytest.mark.parametrize("name", ["window", "slopes", "document_id", "cap", "temperature", "offsets"])
def test_usual_names_are_kept(name: str) -> None:
    assert not is_reserved(name)

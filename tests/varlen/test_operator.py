"""Packed sequences under torch.compile, export and torch.func: their offsets are operands of the operator."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexgen
from tests.backward.run import draw
from tests.forward.run import refusal
from tests.reference import assert_near
from tests.varlen.run import SMALL_TILES, Packed, offsets_of, pack

bias = draw(3)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def biased(score, b, h, q_idx, kv_idx):
    return score + bias[b] * (q_idx - kv_idx)


ATTENTION = flexgen.compile(biased, causal, SMALL_TILES)
LENGTHS = (9, 23, 4)


def step(query, key, value, offsets):
    return ATTENTION(query, key, value, cu_seqlens_q=offsets)


def results(function, packed: Packed) -> list[torch.Tensor]:
    out = function(*packed.tensors, packed.cu_seqlens_q)
    return [out, *torch.autograd.grad(out.square().sum(), [*packed.tensors, bias])]


class _Recorder(TorchDispatchMode):
    """Notes the calls of flexgen's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flexgen":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("keys_apart", [False, True])
def test_operators_pass_opcheck(keys_apart):
    packed = pack(LENGTHS, (3, 30, 0) if keys_apart else None, unused=2)
    with _Recorder() as recorder:
        ATTENTION(*packed.tensors, **packed.offsets).sum().backward()
    for operator, arguments in recorder.calls:
        torch.library.opcheck(operator, _detached(arguments))


def _detached(argument):
    if isinstance(argument, tuple | list):
        return type(argument)(map(_detached, argument))
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def test_compiled_calls_take_other_offsets_without_tracing_again():
    traced = []

    def note(graph, _):
        traced.append(graph)
        return graph

    compiled = torch.compile(step, backend=note, fullgraph=True)
    packed = pack(LENGTHS, unused=5)
    for lengths in (LENGTHS, (0, 1, 35), (12, 12, 12)):
        other = Packed(*packed.tensors, offsets_of(lengths))
        for found, expected in zip(results(compiled, other), results(step, other), strict=True):
            assert_near("compiled", found, expected, 1e-5)
    assert len(traced) == 1


@pytest.mark.filterwarnings("ignore:A model attribute")
def test_exported_program_takes_offsets():
    packed = pack(LENGTHS, grad=False)

    class Module(torch.nn.Module):
        def forward(self, query, key, value, offsets):
            return step(query, key, value, offsets)

    program = torch.export.export(Module(), (*packed.tensors, packed.cu_seqlens_q)).module()
    other = Packed(*packed.tensors, offsets_of((1, 20, 15)))
    assert_near("exported", program(*other.tensors, other.cu_seqlens_q), step(*other.tensors, other.cu_seqlens_q), 1e-6)


def test_function_transforms():
    packed = pack(LENGTHS)
    found = torch.func.grad(lambda query: step(query, *packed.tensors[1:], packed.cu_seqlens_q).square().sum())
    assert_near("gradient", found(packed.query.detach()), results(step, packed)[1], 1e-6)
    stacked = torch.stack([packed.query.detach()] * 2)
    each = torch.vmap(lambda query: step(query, query, query, packed.cu_seqlens_q))
    refusal(lambda: each(stacked), flexgen.UnsupportedProblemError, "cu_seqlens", "vmap")


def test_wrong_offsets_are_refused_while_tracing():
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    packed = pack(LENGTHS, grad=False)
    with pytest.raises(Exception, match=r"dtype torch\.float32"):
        compiled(*packed.tensors, packed.cu_seqlens_q.float())

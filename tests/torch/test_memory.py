"""Memory of a training step: everything that is allocated is linear in the length."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.torch.models import causal, draw

MIB = 1 << 20


def attention_of(name: str, length: int, device: str) -> flexgen.Attention:
    documents = (torch.arange(length, device=device) // (length // 16)).to(torch.int32)

    def document_causal(b, h, q_idx, kv_idx):
        return (documents[q_idx] == documents[kv_idx]) & (q_idx >= kv_idx)

    return flexgen.compile(None, {"causal": causal, "documents": document_causal}[name])


def step(attention, inputs, grad_output) -> None:
    torch.autograd.grad(attention(*inputs), inputs, grad_output)


def allocations_on_the_cpu(name: str, length: int) -> list[int]:
    """Return the bytes that each operation of a step allocates, in a process that has compiled it."""
    attention, inputs = attention_of(name, length, "cpu"), draw(length)
    grad_output = torch.randn_like(inputs[0])
    step(attention, inputs, grad_output)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        step(attention, inputs, grad_output)
    return [event.self_cpu_memory_usage for event in profile.events() if event.self_cpu_memory_usage > 0]


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_no_allocation_is_larger_than_an_input(name):
    short, long = (allocations_on_the_cpu(name, length) for length in (96, 192))
    assert max(long) == draw(192)[0].nbytes  # of the length squared there would be 12 times as much
    assert sum(long) <= 2.1 * sum(short)


def peak_on_the_gpu(name: str, length: int) -> tuple[int, int]:
    """Return the peak of a step above its inputs, and the bytes of one input."""
    attention = attention_of(name, length, "cuda")
    inputs = [torch.randn(1, 1, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    grad_output = torch.randn_like(inputs[0])
    step(attention, inputs, grad_output)  # compiles, and derives the tables of blocks, which stay
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(attention, inputs, grad_output)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, inputs[0].nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_peak_of_a_long_step_is_linear_in_the_length(name):
    """Output, three gradients, and a few numbers a row; one bit a pair would be 128 MiB."""
    half, _ = peak_on_the_gpu(name, 16384)
    peak, of_one_input = peak_on_the_gpu(name, 32768)
    assert peak <= 8 * of_one_input < 64 * MIB
    assert peak <= 2.1 * half + MIB


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "documents"])
def test_derived_tables_of_a_long_step_are_small(name):
    length = 32768
    torch.cuda.synchronize()
    inputs = [torch.randn(1, 1, length, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    attention, grad_output = attention_of(name, length, "cuda"), torch.randn_like(inputs[0])
    before = torch.cuda.memory_allocated()
    step(attention, inputs, grad_output)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 16 * MIB

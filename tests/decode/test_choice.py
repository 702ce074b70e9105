"""When keys are split, over how many programs, and what a growing cache costs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import flexgen
from flexgen import attention as attention_module
from flexgen.lowering.targets import TARGETS
from flexgen.lowering.triton_decode.splits import Extent, split_count, visited_keys
from flexgen.runtime import launch, split_kernel
from flexgen.runtime.build import COMPILATIONS
from tests.corpus.case import Shape
from tests.forward.run import random_inputs, refusal

CPU = torch.device("cpu")


def meta(batch: int, q_heads: int, kv_heads: int, queries: int, keys: int, head_dim: int = 128):
    def empty(heads: int, length: int) -> torch.Tensor:
        return torch.empty(batch, heads, length, head_dim, dtype=torch.bfloat16, device="meta")

    return empty(q_heads, queries), empty(kv_heads, keys), empty(kv_heads, keys)


def plan_of(tensors, mask=None, options=None, **call):
    return flexgen.compile(None, mask, options).lower(*tensors, target="sm_90", **call).plan


def backend(plan) -> tuple[str, dict[str, str]]:
    decision = next(decision for decision in plan.decisions if decision.name == "BACKEND")
    return decision.value, {str(rejected.value): rejected.because for rejected in decision.rejected}


def test_few_queries_are_decoded_and_many_are_not():
    assert backend(plan_of(meta(1, 8, 2, 16, 4096)))[0] == "TRITON_DECODE"
    value, rejected = backend(plan_of(meta(1, 8, 2, 17, 4096)))
    assert value == "TRITON"
    assert "more than 16 queries" in rejected["TRITON_DECODE"]


def test_a_block_mask_and_the_general_kernels_options_are_served_elsewhere():
    def causal(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    tensors = meta(1, 8, 2, 8, 512)
    block_mask = flexgen.create_block_mask(causal, 1, 1, 8, 512, device="cpu")
    value, rejected = backend(plan_of(tensors, causal, block_table=block_mask))
    assert (value, "block table" in rejected["TRITON_DECODE"]) == ("TRITON", True)
    value, rejected = backend(plan_of(tensors, causal, {"FORCE_USE_FLEX_ATTENTION": True}))
    assert (value, rejected["TRITON_DECODE"]) == ("TRITON", "FORCE_USE_FLEX_ATTENTION selects the general kernel")
    assert backend(plan_of(tensors, causal, {"BACKEND": "TRITON"}))[0] == "TRITON"


def test_a_choice_that_cannot_be_honoured_says_why():
    many, few = meta(1, 8, 2, 128, 512), meta(1, 8, 2, 1, 512)
    refusal(lambda: plan_of(many, None, {"SPLIT_KV": 4}), flexgen.OptionError, "SPLIT_KV=4", "16 queries")
    refusal(lambda: plan_of(many, None, {"BACKEND": "TRITON_DECODE"}), flexgen.OptionError, "16 queries")
    refusal(lambda: plan_of(few, None, {"SPLIT_KV": 4, "BACKEND": "TRITON"}), flexgen.OptionError, "BACKEND='TRITON'")
    refusal(lambda: flexgen.compile(options={"SPLIT_KV": 0}), flexgen.OptionError, "SPLIT_KV=0")


class TestNumberOfSplits:
    """On a device of 132 multiprocessors."""

    def count(self, tensors, mask=None, options=None) -> int:
        plan = plan_of(tensors, mask, options)
        query, key, _ = tensors
        return split_count(plan, Extent(query.shape[0] * key.shape[1], query.shape[2], key.shape[2], 132))

    def test_fills_the_device_once(self):
        assert self.count(meta(8, 32, 8, 1, 32768)) == 4
        assert self.count(meta(1, 32, 8, 1, 131072)) == 33

    def test_is_one_where_programs_fill_it_to_the_end(self):
        assert self.count(meta(24, 16, 16, 1, 8192)) == 1  # 384 programs, of which 396 run at once

    @pytest.mark.parametrize("batch", [17, 25, 26, 32, 40, 100, 250])
    def test_leaves_no_last_wave_of_a_few_programs(self, batch):
        tensors = meta(batch, 16, 16, 1, 65536)
        plan, programs = plan_of(tensors), batch * 16
        slots = plan.held * 132
        assert slots == 396
        splits = self.count(tensors)
        totals = {count: programs * count for count in range(1, 9)}
        idle = {count: max(0, 1.4 * 132 - ((total - 1) % slots + 1)) / total for count, total in totals.items()}
        assert idle[splits] <= 0.05 or idle[splits] == min(idle.values())
        assert all(idle[count] > 0.02 for count in range(1, splits))

    def test_leaves_each_split_a_few_tiles(self):
        assert self.count(meta(1, 8, 1, 1, 256)) == 2
        assert self.count(meta(1, 8, 1, 1, 64)) == 1

    def test_is_by_the_live_keys_of_a_window_wherever_it_lies(self):
        position = torch.zeros(1, dtype=torch.int32)

        def window(b, h, q_idx, kv_idx):
            distance = position[b] + q_idx - kv_idx
            return (distance >= 0) & (distance < 1024)

        tensors = meta(1, 32, 8, 1, 131072)
        plan = plan_of(tensors, window)
        assert visited_keys(plan, Extent(8, 1, 131072, 132)) == 1024
        assert self.count(tensors, window) == 8

    def test_is_by_ranges_that_shapes_decide(self):
        def causal(b, h, q_idx, kv_idx):
            return q_idx >= kv_idx

        assert self.count(meta(1, 8, 2, 4, 65536), causal) == 1

    def test_is_what_was_asked_for(self):
        assert self.count(meta(1, 8, 2, 1, 64), options={"SPLIT_KV": 7}) == 7


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The forward kernels that are emitted."""
    found: list[object] = []
    compile_forward = attention_module.compile_forward
    monkeypatch.setattr(attention_module, "compile_forward", lambda *args: found.append(args) or compile_forward(*args))
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """The grids of launches; kernels are compiled for sm_90 for real, and nothing runs."""
    found: list[tuple[int, int, int]] = []
    monkeypatch.setattr(launch, "make_submit", lambda kernel, device: lambda *args: found.append(args[:3]))
    monkeypatch.setattr(launch, "current_raw_stream", lambda device: 0)
    monkeypatch.setattr(launch, "current_device", lambda: -1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the index of the CPU
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(attention_module, "target_of", lambda device: TARGETS["sm_90"])
    monkeypatch.setattr(split_kernel, "processors", lambda device: 132)
    return found


def test_a_growing_cache_emits_one_kernel(emitted):
    query, cache, _ = random_inputs(Shape(1, 4, 2, 1, 1100), CPU)
    offset = 0

    def causal(b, h, q_idx, kv_idx):
        return q_idx + offset >= kv_idx

    attention = flexgen.compile(None, causal)
    for offset in (0, 1, 2, 15, 16, 17, 100, 127, 128, 129, 500, 1000, 1024):
        attention(query, cache[:, :, : offset + 1], cache[:, :, : offset + 1])
    assert len(emitted) <= 2  # the offset is a constant until it changes


STEPS = 1000


class TestAThousandSteps:
    """They emit at most two kernels, and Triton compiles nothing after the second."""

    def check(self, emitted, step) -> None:
        before = COMPILATIONS.total
        for number in (0, 1):
            step(number)
        after_two = COMPILATIONS.total
        for number in range(2, STEPS):
            step(number)
        assert 1 <= len(emitted) <= 2
        assert after_two - before <= 2 * len(emitted)  # a decode kernel and the one that combines
        assert COMPILATIONS.total == after_two

    def test_over_slices_of_a_cache(self, emitted, launched):
        query, cache, _ = random_inputs(Shape(1, 8, 2, 1, STEPS), CPU, dtype=torch.bfloat16, head_dim=64)
        attention = flexgen.compile()
        self.check(emitted, lambda step: attention(query, cache[:, :, : step + 1], cache[:, :, : step + 1]))
        assert len(emitted) == 1
        assert {grid[1] for grid in launched if grid[0] == 2} == {1, 2, 3, 4}  # the splits grow with the cache

    def test_over_slices_with_a_number_that_is_captured(self, emitted, launched):
        query, cache, _ = random_inputs(Shape(1, 8, 2, 1, STEPS), CPU, dtype=torch.bfloat16, head_dim=64)
        offset = 0

        def window(b, h, q_idx, kv_idx):
            distance = q_idx + offset - kv_idx
            return (distance >= 0) & (distance < 256)

        attention = flexgen.compile(None, window)

        def step(number: int) -> None:
            nonlocal offset
            offset = number
            attention(query, cache[:, :, : number + 1], cache[:, :, : number + 1])

        self.check(emitted, step)

    def test_over_numbers_of_keys_on_the_device_and_positions(self, emitted, launched):
        query, key, value = random_inputs(Shape(2, 8, 2, 1, STEPS), CPU, dtype=torch.bfloat16, head_dim=64)
        lengths, position = torch.ones(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)

        def window(b, h, q_idx, kv_idx):
            distance = position[b] + q_idx - kv_idx
            return (distance >= 0) & (distance < 512)

        attention = flexgen.compile(None, window)

        def step(number: int) -> None:
            lengths.fill_(number + 1)
            position.fill_(number)
            attention(query, key, value, kv_lengths=lengths)

        self.check(emitted, step)
        assert len(emitted) == 1
        assert len(set(launched)) == 2, "one grid of each kernel serves every step"

    def test_over_batches_that_change(self, emitted, launched):
        query, key, value = random_inputs(Shape(8, 8, 2, 1, 256), CPU, dtype=torch.bfloat16, head_dim=64)
        attention = flexgen.compile()

        def step(number: int) -> None:
            batch = 1 + number % 8
            attention(query[:batch], key[:batch], value[:batch])

        self.check(emitted, step)
        assert len(emitted) == 1


def test_kv_lengths_decide_neither_kernel_nor_grid():
    inputs = random_inputs(Shape(2, 4, 2, 1, 300), CPU)
    attention = flexgen.compile()
    lengths = torch.zeros(2, dtype=torch.int32)
    for step in range(0, 300, 60):
        lengths.fill_(step)
        attention(*inputs, kv_lengths=lengths)
    assert len(attention._kernels) == len(attention._prepared) == 1


def test_a_plan_does_not_depend_on_what_grows():
    plans = [plan_of(meta(1, 8, 2, 1, keys)) for keys in (1, 16, 128, 4096, 4097)]
    assert all(replace(plan, decisions=()) == replace(plans[0], decisions=()) for plan in plans)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(
    ("qk_head_dim", "v_head_dim"), [(80, 24), (192, 128), (24, 40), (64, 256), (512, 16), (1, 512)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_are_powers_of_two_whatever_the_head_dims(target, qk_head_dim, v_head_dim, dtype):
    """Keys and values of different head dims share a stage's bytes: Triton takes no 102 keys."""
    query, key, _ = (tensor.to(dtype) for tensor in meta(1, 4, 2, 5, 333, qk_head_dim))
    value = torch.empty(1, 2, 333, v_head_dim, dtype=dtype, device="meta")
    for stored in (key, key.to(torch.float8_e5m2)) if dtype == torch.bfloat16 else (key,):
        tensors = (query, stored, value.to(stored.dtype))
        plan = flexgen.compile(options={"SPLIT_KV": 3}).lower(*tensors, target=target).plan
        for size in (plan.BLOCK_M, plan.BLOCK_N):
            assert size >= 16 and size & (size - 1) == 0


def test_a_decode_of_different_head_dims_compiles():
    query, key, _ = meta(1, 4, 2, 5, 333, 80)
    value = torch.empty(1, 2, 333, 24, dtype=torch.bfloat16, device="meta")
    binary = flexgen.compile(options={"SPLIT_KV": 3}).lower(query, key, value, target="sm_90").binary("forward")
    assert binary.stages["cubin"]

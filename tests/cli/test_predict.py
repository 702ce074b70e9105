"""Predicted work: counts are those of the mask itself and of the tiles, and bounds are arithmetic on them."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.commands import predict as counting
from flexgen.commands.arguments import Shape
from flexgen.commands.predict import predict
from flexgen.commands.subject import Subject
from flexgen.explain_work import duration, explain_work, quantity
from flexgen.lowering.targets import TARGETS
from flexgen.work import Visited, Work, predict_work, useful_flops

document = torch.arange(300) // 70


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def head_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx <= 40 * (h + 1))


def documents(b, h, q_idx, kv_idx):
    return document[q_idx] == document[kv_idx]


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def works(
    shape: Shape,
    mask=None,
    score=None,
    target: str = "sm_80",
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    **options: object,
) -> dict[str, Work]:
    subject = Subject("test", flexgen.compile(score, mask, options), shape, dtype)
    return {work.kernel: work for work in predict(subject, subject.lower(target, backward=backward))}


def live_pairs(mask, shape: Shape) -> int:
    sizes = (shape.B, shape.Hq, shape.Lq, shape.Lk)
    b, h, q_idx, kv_idx = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
    return int(mask(b, h, q_idx, kv_idx).sum())


@pytest.mark.parametrize("mask", [causal, head_window, documents])
def test_live_pairs_are_the_masks_own_and_lie_in_the_visited_tiles(mask):
    shape = Shape(2, 4, 2, 300, 300, 32, 16)
    found = works(shape, mask, backward=True)
    assert set(found) == {"forward", "backward_dq", "backward_dkdv"}
    for work in found.values():
        assert work.visited.live == live_pairs(mask, shape)
        assert work.visited.live <= work.visited_pairs
        assert not work.visited.estimated


def test_a_causal_forward_in_numbers():
    shape = Shape(2, 4, 2, 256, 256, 32, 16)
    work = works(shape, causal, BLOCK_M=64, BLOCK_N=32)["forward"]
    tiles = 2 + 4 + 6 + 8  # of each of four rows of tiles, two to the diagonal's step
    assert work.visited.tiles == tiles * 8
    assert work.visited_pairs == tiles * 8 * 64 * 32
    assert work.flops == work.visited_pairs * 2 * (32 + 16)
    assert work.live_flops == work.visited.live * 2 * (32 + 16) == useful_flops(shape, work.visited.live)
    assert work.exponentials == work.visited_pairs + tiles * 8 * 64
    rows, keys = 2 * 4 * 256, 2 * 2 * 256
    assert work.memory_bytes == {"query": rows * 64, "key": keys * 64, "value": keys * 32, "output": rows * 32}
    assert work.cache_bytes == tiles * 8 * 32 * (32 + 16) * 2
    assert work.visited.programs == 4 * 8


def test_both_backward_kernels_recompute_the_scores():
    shape = Shape(1, 2, 2, 128, 128, 64, 32)
    found = works(shape, backward=True)
    pairs = 2 * 128 * 128
    assert found["backward_dq"].live_flops == pairs * 2 * (64 + 32 + 64)
    assert found["backward_dkdv"].live_flops == pairs * 2 * (64 + 32 + 64 + 32)
    assert useful_flops(shape, pairs, backward=True) == pairs * (6 * 64 + 4 * 32)


def test_only_the_keys_of_a_window_are_read():
    shape = Shape(1, 8, 2, 1, 4096, 64, 64)

    def window(b, h, q_idx, kv_idx):
        return (kv_idx >= 1000) & (kv_idx < 1100)

    work = works(shape, window)["forward"]
    assert 100 <= work.visited.read_rows // 2 <= 100 + 2 * 128
    assert work.visited.programs == 2, "the heads of a group share a program"


def test_special_functions_of_the_mod_are_counted_at_their_cost():
    shape = Shape(1, 1, 1, 128, 128, 64, 64)
    plain, capped = works(shape)["forward"], works(shape, score=softcap)["forward"]
    accurate = works(shape, score=softcap, FAST_TANH=False)["forward"]
    assert capped.exponentials - plain.exponentials == capped.visited_pairs
    assert accurate.exponentials - plain.exponentials == 2 * accurate.visited_pairs


def test_heads_beyond_some_are_estimated_and_that_is_told():
    shape = Shape(1, 64, 64, 128, 128, 16, 16)
    work = works(shape, head_window)["forward"]
    exact = live_pairs(head_window, shape)
    assert work.visited.estimated and abs(work.visited.live - exact) < 0.1 * exact
    assert "estimated from a part of them" in explain_work(work, shape)


def test_packed_sequences_are_counted_each_by_itself():
    lengths = (300, 37, 0, 500, 37)

    def after_a_prefix(b, h, q_idx, kv_idx):
        return q_idx + 20 * (b == 4) >= kv_idx

    for mask, extra in ((causal, 0), (after_a_prefix, 37 * 36 // 2 - 16 * 17 // 2)):
        shape = Shape(1, 4, 2, sum(lengths), sum(lengths), 64, 64)
        subject = Subject("test", flexgen.compile(None, mask), shape, torch.bfloat16, packed=lengths)
        for work in predict(subject, subject.lower("sm_90", backward=True)):
            assert work.visited.live == 4 * (sum(n * (n + 1) // 2 for n in lengths) + extra)
            assert work.visited.pairs == 4 * sum(n * n for n in lengths)
            assert work.visited.live <= work.visited_pairs


def test_many_tiles_that_the_mask_cuts_are_sampled_and_that_is_told(monkeypatch: pytest.MonkeyPatch):
    def scattered(b, h, q_idx, kv_idx):
        return (q_idx * 7 + kv_idx * 13) % 5 < 2

    shape = Shape(1, 1, 1, 512, 512, 16, 16)
    assert not works(shape, scattered)["forward"].visited.estimated
    monkeypatch.setattr(counting, "MOST_PAIRS", 1 << 14)
    visited = works(shape, scattered)["forward"].visited
    assert visited.estimated and abs(visited.live - live_pairs(scattered, shape)) < 0.02 * visited.live


def test_reads_outside_of_a_captured_tensor_are_0_as_in_the_kernel():
    def nonzero(b, h, q_idx, kv_idx):
        return (document[kv_idx] == 0) & (q_idx >= 0)

    work = works(Shape(1, 1, 1, 16, 400, 16, 16), nonzero)["forward"]
    assert work.visited.live == 16 * (int((document == 0).sum()) + 100)


def test_bounds_are_amounts_by_rates_of_the_working_multiprocessors():
    work = works(Shape(1, 2, 2, 256, 256, 64, 64), causal, target="sm_90")["forward"]
    chip = TARGETS["sm_90"].chip
    assert chip is not None and work.multiprocessors_used == work.visited.programs / 132 < 1
    seconds = {bound.unit: bound.seconds for bound in work.bounds}
    assert seconds["matrix unit"] == pytest.approx(work.flops / (chip.half * work.multiprocessors_used))
    assert seconds["memory"] == pytest.approx(work.bytes / chip.memory)
    assert [bound.seconds for bound in work.bounds] == sorted(seconds.values(), reverse=True)


def test_float32_takes_the_rate_of_its_precision():
    shape = Shape(1, 2, 2, 256, 256, 64, 64)
    times = [
        {bound.unit: bound.seconds for bound in work.bounds}["matrix unit"] / work.flops
        for precision in ("ieee", "tf32x3", "tf32")
        for work in [works(shape, dtype=torch.float32, FLOAT32_PRECISION=precision)["forward"]]
    ]
    assert times[0] > times[1] > times[2]


@pytest.mark.parametrize("shape", [Shape(1, 2, 2, 0, 64, 16, 16), Shape(1, 2, 2, 64, 0, 16, 16)])
def test_nothing_to_compute_is_no_error(shape: Shape):
    work = works(shape, causal)["forward"]
    assert work.flops == 0
    assert "none: nothing is computed" in explain_work(work, shape)


def test_the_interpreter_has_counts_but_no_times():
    shape = Shape(1, 2, 2, 64, 64, 16, 16)
    work = works(shape, causal, target="interpret")["forward"]
    assert work.bound is None and work.visited.live == live_pairs(causal, shape)
    assert "the interpreter has no rates" in explain_work(work, shape)


def test_targets_agree_with_their_chips():
    for target in TARGETS.values():
        if target.backend == "interpret":
            assert target.chip is None and target.multiprocessor is None
            continue
        assert target.chip is not None and target.multiprocessor is not None
        held = target.multiprocessor
        assert target.shared_bytes + held.shared_reserved <= held.shared_bytes
        assert target.chip.half > target.chip.tf32 >= target.chip.float32


def test_numbers_are_short():
    assert quantity(4_194_304, "B") == "4.19 MB" and quantity(12, "B") == "12 B" and quantity(2.5e12, "/s") == "2.5 T/s"
    assert duration(9.996e-4) == "1000 us" and quantity(999.6, "B") == "1000 B"
    assert duration(1.234e-5) == "12.3 us" and duration(2e-9) == "2 ns" and duration(3) == "3 s"


def test_a_decode_in_numbers():
    shape = Shape(2, 8, 2, 1, 4096, 64, 32)
    work = works(shape, SPLIT_KV=3, BLOCK_N=64, num_warps=4)["forward"]
    programs, tiles = 2 * 2, 2 * 2 * 64
    assert (work.visited.programs, work.visited.splits, work.visited.tiles) == (programs, 3, tiles)
    assert work.visited_pairs == tiles * 16 * 64
    rows, keys = 2 * 8, 2 * 2 * 4096
    partial = rows * 3 * (32 + 4) * 4  # the combining kernel reads these, and writes the output
    assert work.memory_bytes == {"query": rows * 128, "key": keys * 128, "value": keys * 64, "partial rows": partial}
    assert work.multiprocessors_used == programs * 3 / TARGETS["sm_80"].chip.multiprocessors
    assert "4 x 3 splits for 108 multiprocessors" in explain_work(work, shape)


def test_a_decode_of_one_split_writes_its_output():
    shape = Shape(64, 8, 8, 1, 4096, 64, 64)
    work = works(shape, SPLIT_KV=1)["forward"]
    assert work.visited.splits == 1
    assert "partial rows" not in work.memory_bytes and "output" in work.memory_bytes


def test_keys_and_values_count_as_they_are_stored():
    shape = Shape(1, 4, 2, 16, 256, 64, 32)
    query = torch.empty(1, 4, 16, 64, dtype=torch.bfloat16, device="meta")
    key, value = (torch.empty(1, 2, 256, size, dtype=torch.float8_e5m2, device="meta") for size in (64, 32))
    plan = flexgen.compile(options={"BACKEND": "TRITON"}).lower(query, key, value, target="sm_90").plan
    work = predict_work("forward", plan, shape, Visited(1000, 2, 4, 512, 512, 16384), 0)
    assert (work.memory_bytes["key"], work.memory_bytes["value"]) == (512 * 64, 512 * 32)
    assert work.memory_bytes["output"] == 4 * 16 * 32 * 2
    assert work.cache_bytes == 512 * (64 + 32)

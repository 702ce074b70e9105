"""A kernel over a shard of queries and keys sees logical indices: the affine part of the index map."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.lowering.targets import TARGETS
from flexgen.options import KernelOptions
from flexgen.pipeline import compile_forward, understand
from flexgen.runtime.describe import Launch, describe_guard, describe_problem
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.outputs import output_form
from tests.reference import dense_attention


def causal_window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


def sink_and_window(b, h, q_idx, kv_idx):
    return causal_window(b, h, q_idx, kv_idx) | ((kv_idx < 6) & (q_idx >= kv_idx))


def distance_bias(score, b, h, q_idx, kv_idx):
    return score - 0.1 * (q_idx - kv_idx).abs() + 0.01 * q_idx * (h + 1)


def run_shard(score_mod, mask_mod, tensors, q_offset: int, kv_offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value = tensors
    captured = LiveMods(score_mod, mask_mod).current().captured
    understood = understand(captured)
    launch = Launch(
        batch=query.shape[0],
        q_heads=query.shape[1],
        kv_heads=key.shape[1],
        q_len=query.shape[2],
        kv_len=key.shape[2],
        tensors={"query": query, "key": key, "value": value},
        scale=query.shape[3] ** -0.5,
        q_offset=q_offset,
        kv_offset=kv_offset,
    )
    outputs = output_form(launch, "bhsd", logsumexp=True, max_scores=False, tail=True)
    problem = describe_problem(
        launch, constant_scale=True, table=None, output_logsumexp=True, output_max=False, has_offsets=True
    )
    guard = replace(describe_guard(launch, outputs.row_span, understood.facts.rows_safe), rows_safe_holds=False)
    options = KernelOptions(BLOCK_M=16, BLOCK_N=16)
    forward = compile_forward(understood, problem, guard, TARGETS["interpret"], options, True)
    found = outputs.allocate(query)
    Kernel(forward.source, forward.plan, captured).run(launch, found)
    return found["output"], found["logsumexp"]


@pytest.mark.parametrize("mask_mod", [None, causal_window, sink_and_window])
@pytest.mark.parametrize("score_mod", [None, distance_bias])
@pytest.mark.parametrize(("group", "queries"), [(1, 33), (3, 5)])
def test_a_shard_of_queries_and_keys_equals_its_part_of_the_whole(score_mod, mask_mod, group, queries):
    torch.manual_seed(0)
    total, q_offset, kv_offset, keys = 120, 61, 30, 70
    query = torch.randn(2, 2 * group, total, 24)
    key, value = (torch.randn(2, 2, total, 24) for _ in range(2))
    rows, columns = slice(q_offset, q_offset + queries), slice(kv_offset, kv_offset + keys)
    shard = (query[:, :, rows], key[:, :, columns], value[:, :, columns])
    out, lse = run_shard(score_mod, mask_mod, shard, q_offset, kv_offset)

    def only_the_shard(b, h, q_idx, kv_idx):
        inside = (kv_idx >= kv_offset) & (kv_idx < kv_offset + keys)
        return inside if mask_mod is None else inside & mask_mod(b, h, q_idx, kv_idx)

    exact = dense_attention(query, key, value, score_mod, only_the_shard)
    torch.testing.assert_close(out.double(), exact.out[:, :, rows], atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.double(), exact.lse[:, :, rows], atol=2e-5, rtol=0)

"""Which pairs are dropped: a function of (seed, offset, b, h, q_idx, kv_idx) alone, the same in every kernel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.aux_outputs import NO_AUX
from flexgen.capture.live import LiveMods
from flexgen.extras import Extras
from flexgen.lowering.dropout import Draws
from flexgen.lowering.targets import TARGETS
from flexgen.options import KernelOptions
from flexgen.pipeline import compile_forward, understand
from flexgen.runtime.describe import Launch, describe_guard, describe_problem
from flexgen.runtime.dropout import Dropout
from flexgen.runtime.kernel import Kernel
from flexgen.runtime.outputs import output_form
from tests.dropout.dense import seeded
from tests.dropout.philox import keep_mask, philox

P = 0.3

# From the known-answer vectors of Random123, the library of Philox's authors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_the_reference_is_philox(counter: str, key: str, expected: str) -> None:
    words = philox(*([int(word, 16) for word in text.split()] for text in (counter, key)))
    assert [f"{int(word):08x}" for word in words] == expected.split()


def patterns(
    device: torch.device,
    sizes: tuple[int, int, int, int],
    options: dict[str, object],
    *,
    kv_heads: int | None = None,
    blocks: tuple[int, int] | None = None,
    number: int = 0,
) -> tuple[list[Tensor], Tensor]:
    """Return which pairs the forward, the dQ and the dV kernels keep, each [B, Hq, Lq, Lk], and the seed.

    Every score is 0, so that weights are equal. Values, or gradients of the output, are unit vectors: each element of a
    result comes from one pair.
    """
    batch, heads, q_len, kv_len = sizes
    kv_heads = heads if kv_heads is None else kv_heads
    attention = flexgen.compile(None, None, {"BACKEND": "TRITON", **options})
    table = None
    if blocks is not None:
        table = flexgen.create_block_mask(
            flexgen.noop_mask, batch, heads, q_len, kv_len, device=device, BLOCK_SIZE=blocks
        )
    generator, seed = seeded(device, number)
    state = generator.get_state()

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        generator.set_state(state)
        return attention(query, key, value, dropout_p=P, generator=generator, block_table=table)

    keys = torch.eye(kv_len, device=device).expand(batch, kv_heads, kv_len, kv_len)
    query = torch.zeros(batch, heads, q_len, kv_len, device=device, requires_grad=True)
    forward = run(query.detach(), keys, keys) > 0
    output = run(query, keys, torch.ones(batch, kv_heads, kv_len, 16, device=device))
    (grad_query,) = torch.autograd.grad(output, query, torch.full_like(output, 1 / 16))
    found = [forward, grad_query > 0]
    if kv_heads == heads:  # else the heads of a group are added up
        value = torch.ones(batch, heads, kv_len, q_len, device=device, requires_grad=True)
        output = run(query.detach(), keys, value)
        (grad_value,) = torch.autograd.grad(output, value, torch.eye(q_len, device=device).expand_as(output))
        found.append(grad_value.mT > 0)
    return found, seed


def tiles(rows: int, columns: int) -> dict[str, object]:
    return dict.fromkeys(("BLOCK_M", "BLOCK_M1", "BLOCK_M2"), rows) | dict.fromkeys(
        ("BLOCK_N", "BLOCK_N1", "BLOCK_N2"), columns
    )


@pytest.mark.parametrize("shape", [(16, 16), (16, 64), (128, 32)], ids=str)
def test_kernels_agree_bit_for_bit_whatever_their_tiles(device: torch.device, shape: tuple[int, int]) -> None:
    sizes = (2, 2, 36, 52)
    found, seed = patterns(device, sizes, tiles(*shape))
    expected = keep_mask(seed, P, sizes).to(device)
    assert len(found) == 3 and all(torch.equal(pattern, expected) for pattern in found)


@pytest.mark.parametrize(("heads", "q_len"), [(6, 5), (4, 40)], ids=["packed", "unpacked"])
def test_heads_of_a_group_draw_for_themselves(device: torch.device, heads: int, q_len: int) -> None:
    sizes = (2, heads, q_len, 50)
    found, seed = patterns(device, sizes, {}, kv_heads=2)
    assert all(torch.equal(pattern, keep_mask(seed, P, sizes).to(device)) for pattern in found)


@pytest.mark.parametrize("blocks", [(32, 64), (48, 96), (20, 24)], ids=str)
def test_blocks_of_any_size(device: torch.device, blocks: tuple[int, int]) -> None:
    sizes = (1, 2, 60, 100)
    found, seed = patterns(device, sizes, {}, blocks=blocks)
    assert all(torch.equal(pattern, keep_mask(seed, P, sizes).to(device)) for pattern in found)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def lowered(options: dict[str, object], *, heads: int = 4, q_len: int = 128, blocks: tuple[int, int] | None = None):
    query, key = (torch.empty(1, h, n, 32, device="meta") for h, n in ((heads, q_len), (2, 128)))
    table = blocks and flexgen.create_block_mask(causal, 1, 1, q_len, 128, device="cpu", BLOCK_SIZE=blocks)
    return flexgen.compile(None, causal, options).lower(
        query.requires_grad_(), key, key, target="sm_90", dropout_p=P, block_table=table
    )


def test_where_pairs_can_share_a_call_they_do() -> None:
    low = lowered({})
    assert low.plan.DROPOUT is Draws.GROUPED and "four pairs" in low.explain()
    assert lowered({}, q_len=4).plan.DROPOUT is Draws.SINGLE  # packed
    assert lowered({}, blocks=(48, 96)).plan.DROPOUT is Draws.GROUPED
    low = lowered({}, blocks=(20, 24))
    assert low.plan.DROPOUT is Draws.SINGLE and "20 x 24" in low.explain()


def test_without_dropout_nothing_of_it_is_in_the_text() -> None:
    query = torch.empty(1, 2, 128, 32, device="meta", requires_grad=True)
    low = flexgen.compile(None, causal).lower(query, query, query, target="sm_90")
    assert low.plan.DROPOUT is Draws.NONE
    for text in low.source.values():
        assert "philox" not in text and "drop" not in text and "keep" not in text


def test_a_part_of_the_batch_and_of_the_heads_has_its_own_pattern(device: torch.device) -> None:
    attention = flexgen.compile()
    _, seed = seeded(device, 7)
    keys = torch.eye(40, device=device).expand(3, 4, 40, 40)
    query = torch.zeros(3, 4, 20, 40, device=device)

    def run(batch: int, heads: int) -> Tensor:
        tensors = tuple(tensor[:batch, :heads] for tensor in (query, keys, keys))
        extras = Extras(None, NO_AUX, dropout=Dropout(P, seed))
        return attention.run(attention.read(*tensors), tensors, extras)["output"]

    whole = run(3, 4)
    assert torch.equal(whole > 0, keep_mask(seed, P, (3, 4, 20, 40)).to(device))
    assert torch.equal(run(2, 4), whole[:2]) and torch.equal(run(3, 3), whole[:, :3])


def test_indices_beyond_30_bits_are_their_own() -> None:
    """A kernel with run-time offsets draws for the logical indices."""
    starts, seed = (0, 0, 2**30 + 5, 2**30 + 9), torch.tensor([-3, 2**62 + 11])
    sizes = (1, 2, 20, 33)
    captured = LiveMods(None, None).current().captured
    tensors = {"query": torch.zeros(1, 2, 20, 33), "key": torch.eye(33).expand(1, 2, 33, 33)}
    launch = Launch(
        *(1, 2, 2, 20, 33, tensors | {"value": tensors["key"]}, 1.0),
        q_offset=starts[2],
        kv_offset=starts[3],
        dropout=Dropout(P, seed),
    )
    outputs = output_form(launch, "bhsd", logsumexp=False, max_scores=False)
    aux = dict.fromkeys(("output_logsumexp", "output_max"), False)
    problem = describe_problem(launch, constant_scale=True, table=None, has_offsets=True, **aux)
    guard = replace(describe_guard(launch, outputs.row_span, understand(captured).facts.rows_safe))
    options = KernelOptions(BLOCK_M=16, BLOCK_N=16)
    forward = compile_forward(understand(captured), problem, guard, TARGETS["interpret"], options, True)
    assert forward.plan.DROPOUT is Draws.SINGLE
    found = outputs.allocate(tensors["query"])
    Kernel(forward.source, forward.plan, captured).run(launch, found)
    assert torch.equal(found["output"] > 0, keep_mask(seed, P, sizes, starts))


# How random it is; the pattern of the reference, which kernels have bit for bit.


def test_rate_is_the_probability() -> None:
    _, seed = seeded(torch.device("cpu"), 1)
    for p in (1e-3, 0.1, 0.5, 0.9):
        dropped = ~keep_mask(seed, p, (2, 4, 256, 256))
        deviation = (p * (1 - p) / dropped.numel()) ** 0.5
        assert abs(dropped.double().mean().item() - p) < 5 * deviation


@pytest.mark.parametrize("axis", range(4), ids=["b", "h", "q_idx", "kv_idx"])
@pytest.mark.parametrize("distance", [1, 2, 8, 16])
def test_neighbours_are_independent(axis: int, distance: int) -> None:
    """Chi-square of the 2 x 2 table of a pair and its neighbour, one degree of freedom; the seed is fixed."""
    _, seed = seeded(torch.device("cpu"), 2)
    sizes = [2, 2, 96, 96]
    sizes[axis] = max(sizes[axis], 2 * distance)
    kept = keep_mask(seed, 0.4, (sizes[0], sizes[1], sizes[2], sizes[3])).numpy()
    one, other = np.delete(kept, range(distance), axis), np.delete(kept, range(-distance, 0), axis)
    table = np.array([[(one & other).sum(), (one & ~other).sum()], [(~one & other).sum(), (~one & ~other).sum()]])
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    assert ((table - expected) ** 2 / expected).sum() < 15  # of 10000 such tables one is above


def test_other_seeds_and_offsets_have_other_patterns() -> None:
    sizes, found = (1, 1, 64, 64), []
    for seed, offset in ((0, 0), (0, 1), (1, 0), (0, 2**32), (2**32, 0), (-1, 0), (0, -1)):
        found.append(keep_mask(torch.tensor([seed, offset]), 0.5, sizes).double())
    for at, one in enumerate(found):
        for other in found[:at]:
            assert 0.4 < (one == other).double().mean() < 0.6

"""Captured tensors are indexed with torch's meaning, whatever their rank, strides and dtype."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.errors import CaptureError
from flexgen.ir.graph import Graph, topological
from tests.capture.meaning import assert_same_meaning

Mod = Callable[..., object]
_GENERATOR = torch.Generator().manual_seed(1)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_GENERATOR)


HEADS, ROWS, PAIRS = rand(3), rand(3, 9), rand(2, 3, 5, 7)
EXPANDED, STRIDED = rand(1).expand(9), rand(3, 20)[:, ::2]
INTEGERS, BYTES = torch.tensor([2, 0, 1, 1, 0, 2, 0, 1, 2], dtype=torch.int32), torch.arange(9, dtype=torch.uint8)
FLAGS, ZERO_D, HALF = torch.arange(9) % 2 == 0, torch.tensor(0.7), rand(9).bfloat16()
DOUBLES = rand(9).double()

LOOKUPS: dict[str, Mod] = {
    "vector": lambda s, b, h, q, k: s + HEADS[h],
    "two indices": lambda s, b, h, q, k: s + ROWS[h, q],
    "two steps": lambda s, b, h, q, k: s + ROWS[h][q],
    "four indices": lambda s, b, h, q, k: s + PAIRS[b, h, q, k],
    "expression": lambda s, b, h, q, k: s + ROWS[h, q - k + 4],
    "negative index wraps": lambda s, b, h, q, k: s + ROWS[h, q - k],
    "constant indices": lambda s, b, h, q, k: s + ROWS[0, q] + ROWS[-1, -2] + HEADS[-3],
    "nested": lambda s, b, h, q, k: s + HEADS[INTEGERS[q]] + HEADS[INTEGERS[k].long()],
    "slice": lambda s, b, h, q, k: s + ROWS[:, 1:8][h, q] + ROWS[h, 2:][0] + ROWS[..., ::3][h, 2],
    "ellipsis and None": lambda s, b, h, q, k: s + PAIRS[..., q, k][b, h] + ROWS[None, h, q][0],
    "expanded and strided": lambda s, b, h, q, k: s + EXPANDED[q] + STRIDED[h, k],
    "0-d": lambda s, b, h, q, k: s * ZERO_D + ZERO_D,
    "transposed": lambda s, b, h, q, k: (
        s + ROWS.T[q, h] + ROWS.transpose(0, 1)[k][h] + PAIRS.permute(3, 0, 1, 2)[k, b, h, q]
    ),
    "reshaped": lambda s, b, h, q, k: (
        s + ROWS.view(-1)[h * 9 + q] + PAIRS.flatten(2)[b, h, q * 7 + k] + HEADS.view(1, 3, 1)[0, h, 0]
    ),
    "unit axes": lambda s, b, h, q, k: s + HEADS.unsqueeze(0)[0, h] + HEADS[:, None][h].squeeze(0),
    "diagonal": lambda s, b, h, q, k: s + ROWS.diagonal()[h] + ROWS.diagonal(2)[h],
    "expand in the mod": lambda s, b, h, q, k: s + HEADS[:, None].expand(3, 5)[h, q],
    "flip and repeat": lambda s, b, h, q, k: s + HEADS.flip(0)[h] + HEADS.repeat(3)[q],
    "join": lambda s, b, h, q, k: s + torch.cat([HEADS, HEADS * 2])[q] + torch.stack([HEADS, HEADS + 1])[b, h],
    "unbind and split": lambda s, b, h, q, k: (
        s + ROWS.unbind(0)[1][q] + ROWS.split(4, dim=1)[0][h, 1] + HEADS.chunk(3)[2][0]
    ),
    "whole-tensor arithmetic": lambda s, b, h, q, k: s + (ROWS * 2 + 1)[h, q] + (ROWS * HEADS[:, None])[h, k],
    "cast of a table": lambda s, b, h, q, k: s + INTEGERS.float()[q] + HALF[k] + HALF.float()[q] + DOUBLES[q],
    "gather": lambda s, b, h, q, k: s + torch.gather(ROWS[h], 0, q) + torch.take(ROWS, h * 9 + q),
    "index_select": lambda s, b, h, q, k: (
        s + torch.index_select(HEADS, 0, h)[0] + torch.nn.functional.embedding(h, ROWS)[q]
    ),
    "index tensor": lambda s, b, h, q, k: s + ROWS[h][torch.tensor([0, 2, 4])][1] + ROWS[:, [1, 3]][h, 0],
    "two index tensors": lambda s, b, h, q, k: s + ROWS[torch.tensor([0, 2]), torch.tensor([1, 3])][b],
    "arange in the mod": lambda s, b, h, q, k: s + torch.arange(100)[q] + torch.arange(10, 0, -1)[k],
    "small constant table": lambda s, b, h, q, k: s + torch.tensor([0.5, 0.25, 3.0])[h],
    "bool table": lambda s, b, h, q, k: torch.where(FLAGS[q] & ~FLAGS[k], s, 0.0),
    "narrow index": lambda s, b, h, q, k: s + ROWS[h, BYTES[q].long()] + HEADS[INTEGERS[q].to(torch.int16)],
    "sum of a row": lambda s, b, h, q, k: s + ROWS[h].sum() + ROWS.sum(0)[q] + ROWS.sum(dim=1, keepdim=True)[h, 0],
    "mean, prod, extrema": lambda s, b, h, q, k: s + ROWS[h].mean() + ROWS.prod(1)[h] + ROWS.amax(0)[q] + ROWS[h].min(),
    "max along a dim": lambda s, b, h, q, k: s + ROWS.max(dim=0).values[q] + ROWS.min(1)[0][h],
    "any and all": lambda s, b, h, q, k: s + (q == INTEGERS).any() + FLAGS.all() + (ROWS[h] > 0).any(dim=-1),
    "dot": lambda s, b, h, q, k: s + torch.dot(ROWS[h], ROWS[0]) + ROWS[h] @ ROWS[1] + (ROWS @ ROWS[h])[b],
    "matmul and einsum": lambda s, b, h, q, k: s + (ROWS @ ROWS.T)[h, b] + torch.einsum("d,d->", ROWS[h], ROWS[b]),
    "half precision sum": lambda s, b, h, q, k: s + HALF.sum() + INTEGERS.sum() + FLAGS.sum(),
    "cumulative sum": lambda s, b, h, q, k: s + ROWS[h].cumsum(0)[q],
    "softmax of a row": lambda s, b, h, q, k: s + ROWS[h].softmax(-1)[q] + ROWS[h].logsumexp(0),
    "stacked values": lambda s, b, h, q, k: torch.stack([s, s * 2, q.float()])[h],
    "iteration over a table": lambda s, b, h, q, k: s + sum(row[q] for row in ROWS),
    "views of scalars": lambda s, b, h, q, k: s.view(1)[0] + s.unsqueeze(0).expand(4).sum() + s.reshape(()),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_lookup_means_what_torch_means(name: str) -> None:
    assert_same_meaning(LOOKUPS[name])


def _mask(mod: Mod) -> Graph:
    graph = LiveMods(mask_mod=mod).current().captured.mods.mask
    assert graph is not None
    return graph


def test_index_that_cannot_be_negative_is_not_wrapped() -> None:
    graph = _mask(lambda b, h, q, k: FLAGS[(q + k) % 4] & FLAGS[q // 2 + 1])
    assert not [node for node in topological(graph.root) if node.op == "where"]


def test_wrapping_reads_the_run_time_size_and_leaves_it_free() -> None:
    graph = _mask(lambda b, h, q, k: FLAGS[q - k])
    assert graph.buffers[0].sizes == (None,)
    assert any(node.attr == "FLAGS.size(0)" for node in topological(graph.root))


@pytest.mark.parametrize(
    ("mod", "sizes"),
    [
        (lambda b, h, q, k: FLAGS[q % FLAGS.shape[0]], (9,)),
        (lambda b, h, q, k: FLAGS[q % len(FLAGS)], (9,)),
        (lambda b, h, q, k: (ROWS[h] > 0).any(), (None, 9)),
        (lambda b, h, q, k: ROWS[h, q % ROWS.size(1)] > 0, (None, 9)),
    ],
)
def test_size_that_the_mod_reads_is_guarded(mod: Mod, sizes: tuple[int | None, ...]) -> None:
    assert _mask(mod).buffers[0].sizes == sizes


def test_reduction_of_64_terms_is_unrolled_and_one_more_is_refused() -> None:
    short, long = rand(3, 64), rand(3, 65)
    LiveMods(lambda s, b, h, q, k: s + (short[h] * short[h]).sum()).current()
    with pytest.raises(CaptureError, match="reduction of size 65 not supported in score_mod"):
        LiveMods(lambda s, b, h, q, k: s + (long[h] * long[h]).sum()).current()


def test_elements_computed_twice_are_built_once() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        row = ROWS[h]
        for _ in range(40):
            row = row * 0.5 + row * 0.25
        return score + row[q_idx]

    graph = LiveMods(mod).current().captured.mods.score
    assert graph is not None
    assert sum(1 for _ in topological(graph.root)) < 300

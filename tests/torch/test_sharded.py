"""DTensors: shared-out batches, heads and rows give what one process gives, with the mods' own indices."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flexgen
from tests.torch.layer import Layer, seeded, trained
from tests.torch.models import assert_same
from tests.torch.ranks import WORLD

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

LENGTH, HEAD_DIM = 12, 16
REPLICATED = (Replicate(),)


class Mods(nn.Module):
    """Mods that read every index: a learned bias per head and distance, fixed slopes per head, a shift per batch."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.bias = nn.Parameter(torch.randn(heads, 2 * LENGTH, generator=generator))
        self.register_buffer("slopes", torch.randn(heads, generator=generator))
        self.register_buffer("reach", torch.tensor([3, 7]))

    def score(self, score, b, h, q_idx, kv_idx):
        return score * (1 + b) + self.bias[h, q_idx - kv_idx + LENGTH] + self.slopes[h] * kv_idx + h

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= self.reach[b] + h)


def drawn(heads: int, kv_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, count, LENGTH, HEAD_DIM) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def mesh_of(*shape: int):
    return init_device_mesh("cpu", shape or (WORLD,))


def distributed(tensor: Tensor, mesh, placements) -> Tensor:
    return distribute_tensor(tensor.detach(), mesh, placements).requires_grad_()


def whole(tensors) -> list[Tensor]:
    return [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]


def results(attend, tensors, also=()) -> list[Tensor]:
    """Return what a call returns, and the gradients of a function of it."""
    output, aux = attend(*tensors)
    found = [output, aux.lse]
    loss = (output * output.sin()).sum() + aux.lse.cos().sum()
    return [*found, *torch.autograd.grad(loss, [*tensors, *also])]


def check(placements, *, heads=4, kv_heads=2, bias=REPLICATED, key=None, mesh_shape=(), layout="bhsd", compiled=False):
    """Compare a call on DTensors with one on plain tensors."""
    mesh, request = mesh_of(*mesh_shape), flexgen.AuxRequest(lse=True)
    mods, tensors = Mods(heads), drawn(heads, kv_heads)
    if layout == "bshd":
        tensors = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in tensors]
    attention = flexgen.compile(mods.score, mods.mask, {"layout": layout})

    def attend(*tensors):
        return attention(*tensors, return_aux=request)

    expected = results(attend, tensors, [mods.bias])
    mods.bias = nn.Parameter(distribute_tensor(mods.bias.detach(), mesh, bias))
    key = placements if key is None else key
    torch._dynamo.reset()
    parts = [distributed(one, mesh, where) for one, where in zip(tensors, (placements, key, key), strict=True)]
    traced = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    found = results(traced, parts, [mods.bias])
    assert found[0].placements == tuple(placements)
    assert found[-1].placements == tuple(bias)
    assert all(one.stride() == other.stride() for one, other in zip(found[:2], expected, strict=False))
    assert_same(whole(found), expected)


CASES = {
    "replicated": {"placements": REPLICATED},
    "heads": {"placements": (Shard(1),)},
    "heads, bias sharded too": {"placements": (Shard(1),), "bias": (Shard(0),)},
    "heads, one key head": {"placements": (Shard(1),), "kv_heads": 1, "key": REPLICATED},
    "heads, key replicated": {"placements": (Shard(1),), "key": REPLICATED},
    "heads, unevenly": {"placements": (Shard(1),), "heads": 3, "kv_heads": 3},
    "batches": {"placements": (Shard(0),)},
    "batches, bias sharded": {"placements": (Shard(0),), "bias": (Shard(1),)},
    "rows": {"placements": (Shard(2),), "key": REPLICATED},
    "rows, key sharded too": {"placements": (Shard(2),)},
    "two dimensions": {"placements": (Shard(0), Shard(1)), "mesh_shape": (WORLD, 1), "bias": (Replicate(), Shard(0))},
    "layout bshd": {"placements": (Shard(2),), "layout": "bshd"},
}


@pytest.mark.parametrize("case", list(CASES))
def test_dtensors_give_what_one_process_gives(ranks, case):
    ranks.run(_check_case, case, False)


@pytest.mark.parametrize("case", ["heads", pytest.param("batches", marks=pytest.mark.slow)])
def test_compiled_calls_of_dtensors(ranks, case):
    ranks.run(_check_case, case, True)


def _check_case(case, compiled):
    check(**CASES[case], compiled=compiled)


def test_sinks_max_scores_and_the_drop_in(ranks):
    ranks.run(_check_other_calls)


def _check_other_calls():
    mesh, mods, tensors = mesh_of(), Mods(4), [tensor.detach() for tensor in drawn(4, 2)]
    parts = [distribute_tensor(tensor, mesh, [Shard(1)]) for tensor in tensors]
    attention, request = flexgen.compile(mods.score, mods.mask), flexgen.AuxRequest(max_scores=True)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        expected, aux = attention(*tensors, return_aux=request)
        found, found_aux = attention(*parts, return_aux=request)
        assert_same(whole([found, found_aux.max_scores]), [expected, aux.max_scores])
        for where in (REPLICATED, (Shard(0),)):
            found = attention(*parts, sinks=distribute_tensor(sinks, mesh, where))
            assert_same(whole([found]), [attention(*tensors, sinks=sinks)])
        with pytest.raises(flexgen.UnsupportedProblemError, match="not all tensors of the call are"):
            attention(*parts, sinks=sinks)
        blocks = flexgen.create_block_mask(mods.mask, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)
        arguments = {"score_mod": mods.score, "block_mask": blocks, "enable_gqa": True}
        found = flexgen.flex_attention(*parts, **arguments)
        assert_same(whole([found]), [flexgen.flex_attention(*tensors, **arguments)])


def test_tensor_parallel_layer(ranks):
    ranks.run(_check_tensor_parallel)


def _check_tensor_parallel():
    mesh, x = mesh_of(), torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(2))
    expected = trained(seeded(Layer), x)
    layer = seeded(Layer)
    sharded = {name: ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")}
    parallelize_module(layer, mesh, {**sharded, "out": RowwiseParallel()})
    layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh, [Shard(0)]))
    order = [name for name, _ in seeded(Layer).named_parameters()]
    output, *_ = trained(layer, x)
    grads = [dict(layer.named_parameters())[name].grad for name in order]
    assert_same(whole([output, *grads]), expected)


def test_local_tensors_with_the_first_head_captured_as_a_number(ranks):
    ranks.run(_check_local_map)


def _check_local_map():
    mesh, mods, tensors = mesh_of(), Mods(4), [tensor.detach() for tensor in drawn(4, 4)]
    first_head = mesh.get_local_rank() * 4 // WORLD

    def score(score, b, h, q_idx, kv_idx):
        return mods.score(score, b, h + first_head, q_idx, kv_idx)

    def mask(b, h, q_idx, kv_idx):
        return mods.mask(b, h + first_head, q_idx, kv_idx)

    heads = [Shard(1)]
    attend = local_map(flexgen.compile(score, mask), out_placements=heads, in_placements=(heads,) * 3)
    parts = [distribute_tensor(tensor, mesh, heads) for tensor in tensors]
    assert_same(whole([attend(*parts)]), [flexgen.compile(mods.score, mods.mask)(*tensors)])


def test_what_is_not_computed_is_refused_by_name(ranks):
    ranks.run(_check_refusals)


def _check_refusals():
    mesh, mods = mesh_of(), Mods(4)
    attention = flexgen.compile(mods.score, mods.mask)

    def refused(match, placements, *, heads=4, kv_heads=4, key=None, **options):
        tensors = [tensor.detach() for tensor in drawn(heads, kv_heads)]
        key = placements if key is None else key
        parts = [distribute_tensor(t, mesh, where) for t, where in zip(tensors, (placements, key, key), strict=True)]
        with pytest.raises(flexgen.UnsupportedProblemError, match=match):
            attention(*parts, **options)

    refused("requires grad and is no DTensor", [Shard(1)])
    refused("query is placed as", [Shard(3)])
    refused("dropout_p was passed with query, key and value that are DTensors", [Shard(1)], dropout_p=0.5)
    pages = {"kv_lengths": torch.tensor([3, 4]), "page_table": torch.zeros(2, 1, dtype=torch.int32)}
    for sides in ({"kv_lengths": pages["kv_lengths"]}, pages, {"k_scale": 2.0}, {"v_scale": torch.ones(4)}):
        refused(f"{next(iter(sides))} was passed to a call .* made of DTensors", [Shard(1)], **sides)
    refused("3 query heads cannot be shared by 2 key heads", [Shard(1)], heads=3, kv_heads=2)
    plain = drawn(4, 4)
    partial = [DTensor.from_local(tensor, mesh, [Partial()]) for tensor in plain]
    with pytest.raises(flexgen.UnsupportedProblemError, match="query is placed as"):
        attention(*partial)
    parts = [distribute_tensor(tensor.detach(), mesh, [Shard(1)]) for tensor in plain]
    for mixed in ([parts[0], *plain[1:]], [plain[0], *parts[1:]]):
        with pytest.raises(flexgen.UnsupportedProblemError, match="some are plain tensors"):
            attention(*mixed)
    mods.bias = nn.Parameter(distribute_tensor(mods.bias.detach(), mesh, [Replicate()]))
    refused("the heads of a rank must be whole groups", [Shard(1)], heads=6, kv_heads=3, key=[Replicate()])
    blocks = flexgen.create_block_mask(mods.mask, 2, 4, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=4)
    refused("rows are sharded", [Shard(2)], block_table=blocks)
    with pytest.raises(flexgen.UnsupportedProblemError, match="a captured tensor is a DTensor"):
        attention(*plain)

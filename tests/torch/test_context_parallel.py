"""Sequences sharded over ranks give what one process gives, and only what is live travels."""

from __future__ import annotations

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

import flexgen
from flexgen.distributed import plan as plans
from flexgen.distributed.exchange import Pending
from tests.torch import context_cases
from tests.torch.context_cases import CASES, compile_case, results
from tests.torch.models import assert_same

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

TOLERANCE = {torch.float32: 3e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2}
SEQUENCE_DIM = {"bhsd": 2, "bshd": 1}


def mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def compare(name: str, grain: int) -> None:
    """Compare a case with one process; ranges of rows are rounded to multiples of the grain."""
    case = CASES[name]
    attention, captured = compile_case(case)
    sinks = torch.linspace(-1, 1, case.heads[0]).requires_grad_() if case.sinks else None
    also = [*captured, *([sinks] if case.sinks else [])]
    request = flexgen.AuxRequest(lse=True)
    whole = case.tensors()
    expected = None
    if dist.get_rank() == 0:
        expected = results(lambda *t: attention(*t, return_aux=request, sinks=sinks), whole, also)
    told = [expected]
    dist.broadcast_object_list(told)
    with mock.patch.object(plans, "GRAIN", grain):
        parallel = flexgen.context_parallel(attention, mesh(), assignment=case.assignment)
        parts = [parallel.shard(tensor.detach()).requires_grad_() for tensor in whole]
        found = results(lambda *t: parallel(*t, return_aux=request, sinks=sinks), parts, also)
    dim = SEQUENCE_DIM[case.layout]
    assert found[0].is_contiguous() and found[0].dtype == case.dtype
    dims = [dim, 2, dim, dim, dim]
    joined = [parallel.unshard(one, at) for one, at in zip(found[:5], dims, strict=True)] + found[5:]
    for one, other in zip(joined, told[0], strict=True):
        tolerance = TOLERANCE[case.dtype]
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=lambda text: f"{name}: {text}")


# Cases that another one nearly covers, for the slow tests.
SLOW = {"causal, contiguous", "bfloat16"}


def compare_all(names: list[str], grain: int) -> None:
    for name in names:
        compare(name, grain)


def test_two_ranks_give_what_one_process_gives(ranks):
    ranks.run(compare_all, [name for name in CASES if name not in SLOW], 16)


def test_four_ranks_give_what_one_process_gives(four_ranks):
    four_ranks.run(compare_all, ["causal", "window", "documents", "soft cap, learned bias"], 1)


@pytest.mark.slow
def test_two_ranks_give_what_one_process_gives_in_other_cases(ranks):
    ranks.run(compare_all, sorted(SLOW), 16)


@pytest.mark.slow
def test_four_ranks_give_what_one_process_gives_in_all_cases(four_ranks):
    four_ranks.run(compare_all, list(CASES), 1)


# What travels.


class Counted:
    """Counts the messages of this rank, by kind and peer, and their elements."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.received: list[tuple[int, int]] = []
        self._post = dist.batch_isend_irecv

    def __call__(self, operations):
        for one in operations:
            (self.sent if one.op is dist.isend else self.received).append((one.peer, one.tensor.numel()))
        return self._post(operations)


def count_messages(mask, grain: int, length: int):
    """Return what a rank posted in a forward and in a backward, and its part of the plan."""
    parallel = flexgen.context_parallel(flexgen.compile(mask_mod=mask), mesh())
    tensors = [torch.ones(1, 2, length // dist.get_world_size(), 16, requires_grad=True) for _ in range(3)]
    with mock.patch.object(plans, "GRAIN", grain):
        plan = parallel.plan(*tensors)
        with mock.patch.object(dist, "batch_isend_irecv", Counted()) as forward:
            output = parallel(*tensors)
        with mock.patch.object(dist, "batch_isend_irecv", Counted()) as backward:
            output.sum().backward()
    return forward, backward, plan.of_rank(parallel.rank)


def check_messages_of_a_window():
    rank = dist.get_rank()
    forward, backward, own = count_messages(context_cases.window, 1, 128)
    window_rows = 10 * 2 * (16 + 16)  # of one chunk that is seen from the next, of both heads, keys and values
    neighbours = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < 4]
    assert sorted(peer for peer, _ in forward.sent) == neighbours == list(own.read_by)
    assert sorted(peer for peer, _ in forward.received) == neighbours == list(own.reads)
    assert all(elements == window_rows for _, elements in forward.sent + forward.received)
    # In the backward the same again, and gradients the other way.
    assert sorted(backward.sent) == sorted(2 * [(peer, window_rows) for peer in neighbours])
    assert sorted(backward.received) == sorted(backward.sent)


def check_messages_of_all_masks():
    """Bytes are those of the plan, and nothing is sent where nothing is seen."""
    for mask in (context_cases.causal, context_cases.upside_down, None):
        forward, backward, own = count_messages(mask, 1, 64)
        assert sum(elements for _, elements in forward.sent) * 4 == own.sent
        assert sum(elements for _, elements in forward.received) * 4 == own.received
        assert sum(elements for _, elements in backward.sent) * 4 == own.sent_backward
        assert sum(elements for _, elements in backward.received) * 4 == own.received_backward
    own_block = torch.arange(64) // 8

    def block_diagonal(b, h, q_idx, kv_idx):
        return own_block[q_idx] == own_block[kv_idx]

    forward, backward, _ = count_messages(block_diagonal, 1, 64)
    assert forward.sent == forward.received == backward.sent == backward.received == []


def check_order():
    """The next exchange is posted before the kernels of the present keys, and waited for after them."""
    attention = flexgen.compile(mask_mod=context_cases.causal)
    parallel = flexgen.context_parallel(attention, mesh())
    tensors = [torch.ones(1, 1, 16, 16, requires_grad=True) for _ in range(3)]
    parallel(*tensors)
    happened = []

    def noting(name, call):
        def noted(*arguments, **keywords):
            happened.append(name)
            return call(*arguments, **keywords)

        return noted

    with (
        mock.patch.object(dist, "batch_isend_irecv", noting("post", dist.batch_isend_irecv)),
        mock.patch.object(Pending, "wait", noting("wait", Pending.wait)),
        mock.patch.object(attention, "run", noting("run", attention.run)),
        mock.patch.object(attention, "gradients", noting("run", attention.gradients)),
    ):
        output = parallel(*tensors)
        forward = [name for name, _ in itertools.groupby(happened)]
        happened.clear()
        output.sum().backward()
    # Distances 0 to 3 are all live for each of the 4 ranks.
    assert forward == ["post", "run", "wait", "post", "run", "wait", "post", "run", "wait", "run"]
    # Gradients of distance 1 are posted after its kernels, and waited for after those of distance 2.
    backward = ["post", "run", "wait", "post", "run", "post", "wait", "post", "run", "wait", "post", "wait", "run"]
    assert [name for name, _ in itertools.groupby(happened)] == [*backward, "wait", "post", "wait"]


def test_messages_travel_while_kernels_run(four_ranks):
    four_ranks.run(check_order)


def test_a_window_talks_to_neighbours_alone(four_ranks):
    four_ranks.run(check_messages_of_a_window)


def test_messages_are_those_of_the_plan(four_ranks):
    four_ranks.run(check_messages_of_all_masks)


# Calls of other kinds.


def check_other_calls():
    case = CASES["soft cap, learned bias"]
    attention, (bias,) = compile_case(case)
    parallel = flexgen.context_parallel(attention, mesh())
    whole = case.tensors()
    parts = [parallel.shard(tensor.detach()) for tensor in whole]
    request = flexgen.AuxRequest(lse=True, max_scores=True)
    with torch.no_grad():
        expected, aux = attention(*whole, return_aux=request)
        found, own = parallel(*parts, return_aux=request)
        assert_same(map(parallel.unshard, (found, own.lse, own.max_scores)), (expected, aux.lse, aux.max_scores))
        assert isinstance(parallel(*parts), torch.Tensor)
        scaled = parallel.unshard(parallel(*parts, scale=0.7))
        assert_same([scaled], [attention(*whole, scale=0.7)])

    # Some gradients alone; a captured tensor's is the same on each rank.
    query = parts[0].requires_grad_()
    (grad,) = torch.autograd.grad(parallel(*parts).sum(), query)
    assert_same([parallel.unshard(grad)], torch.autograd.grad(attention(*whole).sum(), whole[0]))
    query.requires_grad_(False)
    (grad,) = torch.autograd.grad(parallel(*parts).sum(), bias)
    assert_same([grad], torch.autograd.grad(attention(*whole).sum(), bias))

    # Recomputed in the backward, which exchanges the keys once more.
    again = checkpoint(parallel, *parts, use_reentrant=False)
    (grad,) = torch.autograd.grad(again.sum(), bias)
    assert_same([grad], torch.autograd.grad(attention(*whole).sum(), bias))

    # Between compiled regions.
    compiled = torch.compile(lambda *t: parallel(*t).sin() + 1, backend="eager")
    with torch.no_grad():
        assert_same([parallel.unshard(compiled(*parts))], [attention(*whole).sin() + 1])
    assert parallel.unshard(parallel.positions(64), 0).tolist() == list(range(64))
    (grad,) = torch.autograd.grad(parallel(query.requires_grad_(), *parts[1:]).sum(), query, create_graph=True)
    refused("a gradient of flexgen's gradients", grad.sum().backward)


def check_that_one_kernel_serves_all():
    """What differs between chunks and ranks are numbers that a kernel is given."""
    attention = flexgen.compile(mask_mod=context_cases.causal)
    parallel = flexgen.context_parallel(attention, mesh())
    tensors = [torch.ones(1, 1, 256, 16, requires_grad=True) for _ in range(3)]
    parallel(*tensors).sum().backward()
    assert len(parallel.plan(*tensors).blocks(parallel.rank, parallel.rank)) == 3
    assert len(attention._kernels) <= 2  # with and without a proof that each query sees a key
    assert len(attention._training._kernels) <= 2


def check_changed_captures():
    """A plan follows what the mask captured."""
    mods = context_cases.Documents(64)
    attention = flexgen.compile(mask_mod=mods.mask)
    parallel = flexgen.context_parallel(attention, mesh())
    whole = CASES["causal, contiguous"].tensors()
    with torch.no_grad():
        for number in (mods.number, torch.zeros(64, dtype=torch.long), torch.arange(64) // 4):
            mods.number = number
            found = [parallel(*map(parallel.shard, whole)) for _ in range(2)]
            assert_same(map(parallel.unshard, found), [attention(*whole)] * 2)
        mods.number.zero_()
        assert_same([parallel.unshard(parallel(*map(parallel.shard, whole)))], [attention(*whole)])
        mods.number = torch.arange(64) // (4 + 28 * dist.get_rank())
        with pytest.raises(flexgen.UnsupportedProblemError, match="do not plan the same attention"):
            parallel(*map(parallel.shard, whole))


def test_other_calls(ranks):
    ranks.run(check_other_calls)


def test_one_kernel_serves_all_chunks(ranks):
    ranks.run(check_that_one_kernel_serves_all)


def test_captured_tensors_may_change(ranks):
    ranks.run(check_changed_captures)


def check_refusals():
    attention = flexgen.compile(mask_mod=context_cases.causal)
    parallel = flexgen.context_parallel(attention, mesh())
    tensors = [torch.ones(1, 2, 32, 16) for _ in range(3)]
    given = {
        "block_table": object(),
        "kv_lengths": torch.tensor([3]),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "k_scale": 2.0,
        "v_scale": 2.0,
        "cu_seqlens_q": torch.tensor([0, 3]),
        "cu_seqlens_k": torch.tensor([0, 3]),
        "dropout_p": 0.5,
        "generator": torch.Generator(),
        "validate": True,
    }
    for name, argument in given.items():
        refused(f"{name} was passed to a context parallel attention", parallel, *tensors, **{name: argument})
    parallel(*tensors, dropout_p=0, block_table=None, validate=False)
    with pytest.raises(TypeError, match="takes no argument 'kv_length'"):
        parallel(*tensors, kv_length=3)
    refused("query has 31 rows on this rank, which cannot be cut in 2", parallel, tensors[0][:, :, 1:], *tensors[1:])
    refused("a sequence of 66 tokens cannot be cut in 4 equal chunks", parallel.shard, torch.ones(1, 1, 66, 16))
    sharded = distribute_tensor(torch.ones(1, 2, 64, 16), mesh(), [Shard(2)])
    refused("query is a DTensor", parallel, sharded, *tensors[1:])
    refused("query is a meta tensor", parallel, *(tensor.to("meta") for tensor in tensors))
    narrow = [tensor.to(torch.float8_e4m3fn) for tensor in tensors[1:]]
    refused("key is stored in torch.float8_e4m3fn", parallel, tensors[0].half(), *narrow)
    refused("not an Attention", flexgen.context_parallel, context_cases.causal, mesh())
    refused("mesh is int, not a DeviceMesh", flexgen.context_parallel, attention, 2)
    refused("the mesh has 2 dimensions", flexgen.context_parallel, attention, init_device_mesh("cpu", (1, 2)))
    tuned = flexgen.compile(options={"autotune": True})
    refused("autotune=True is set", flexgen.context_parallel, tuned, mesh())
    refused("assignment='ring' is none", flexgen.context_parallel, attention, mesh(), assignment="ring")


def refused(match, call, *arguments, **keywords):
    with pytest.raises(flexgen.FlexgenError, match=match) as raised:
        call(*arguments, **keywords)
    assert raised.value.fix


def test_what_is_not_computed_is_refused_by_name(ranks):
    ranks.run(check_refusals)


def check_one_dimension_of_a_mesh():
    """Two groups of ranks, each with a sequence of its own."""
    parallel_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    case = CASES["causal"]
    attention, _ = compile_case(case)
    parallel = flexgen.context_parallel(attention, parallel_mesh["context"])
    with torch.no_grad():
        whole = [tensor * (1 + parallel_mesh.get_local_rank("data")) for tensor in case.tensors()]
        found = parallel.unshard(parallel(*map(parallel.shard, whole)))
        assert_same([found], [attention(*whole)])


def test_a_mesh_of_two_dimensions(four_ranks):
    four_ranks.run(check_one_dimension_of_a_mesh)


@pytest.mark.parametrize("name", ["causal", "window", "documents", "bfloat16, learned bias"])
def test_two_chunks_of_one_rank(device, name):
    """A rank alone holds two chunks, whose kernels are those of many ranks: also on a GPU, at sizes for one."""
    on_gpu = device.type == "cuda"
    case = CASES[name]
    if on_gpu:
        case = replace(case, length=2048, dtype=torch.bfloat16, head_dim=128)
    attention, captured = compile_case(case, device)
    whole = [tensor.detach().to(device).requires_grad_() for tensor in case.tensors()]
    request = flexgen.AuxRequest(lse=True)
    expected = results(lambda *t: attention(*t, return_aux=request), whole, captured)
    if dist.is_initialized():  # by a document's example, in the same process
        dist.destroy_process_group()
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallel = flexgen.context_parallel(attention, init_device_mesh(device.type, (1,)))
        assert len(parallel.plan(*whole).blocks(0, 0)) == 3
        found = results(lambda *t: parallel(*t, return_aux=request), whole, captured)
    finally:
        dist.destroy_process_group()
    for one, other in zip(found, expected, strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < (2e-2 if case.dtype == torch.bfloat16 else 1e-5)

"""The drop-in and the makers of masks inside torch.compile(fullgraph=True)."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

import flexgen
from tests.clients.test_drop_in import causal, causal_blocks, draw
from tests.clients.versions import HAS_2_13, WRITE_ORDER


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


def attend(query, key, value, block_mask):
    return flexgen.flex_attention(query, key, value, block_mask=block_mask)


@pytest.mark.parametrize("keywords", [{}, WRITE_ORDER, {"separate_full_blocks": False}])
def test_block_mask_as_an_argument(keywords):
    traced, _ = compiled(attend)
    block_mask = flexgen.create_block_mask(causal, 2, 2, 64, 64, device="cpu", BLOCK_SIZE=16, **keywords)
    assert torch.equal(traced(*draw(), block_mask), attend(*draw(), block_mask))


def test_block_masks_in_a_pytree_argument():
    offset = torch.tensor([0, 8])

    def shifted(b, h, q_idx, kv_idx):
        return q_idx + offset[b] >= kv_idx

    masks = {"full": causal_blocks(), "others": [flexgen.create_block_mask(shifted, 2, 2, 64, 64, device="cpu")]}

    def both(inputs, masks):
        return attend(*inputs, masks["full"]) + attend(*inputs, masks["others"][0])

    traced, _ = compiled(both)
    assert torch.equal(traced(draw(), masks), both(draw(), masks))


def test_export_of_a_function_of_a_block_mask():
    """Torch exports inputs of registered classes alone, and leaves it to the user to register this one."""

    class Attend(torch.nn.Module):
        def forward(self, query, key, value, block_mask):
            return attend(query, key, value, block_mask)

    block_mask, inputs = causal_blocks(), draw()
    keys = BlockMask._flatten_with_keys
    pytree.register_pytree_node(BlockMask, BlockMask._flatten, BlockMask._unflatten, flatten_with_keys_fn=keys)
    try:
        exported = torch.export.export(Attend(), (*inputs, block_mask), strict=True)
        assert torch.equal(exported.module()(*inputs, block_mask), attend(*inputs, block_mask))
    finally:
        pytree._deregister_pytree_node(BlockMask)


def test_output_keeps_the_strides_order():
    traced, _ = compiled(lambda query, key: flexgen.flex_attention(query, key, key))
    key = torch.randn(2, 3, 5, 8)
    for order in ((0, 2, 1, 3), (3, 0, 2, 1)):
        places = [order.index(dim) for dim in range(4)]
        query = torch.randn([key.shape[dim] for dim in order]).permute(places).requires_grad_()
        out = traced(query, key)
        assert sorted(range(4), key=out.stride) == sorted(range(4), key=lambda dim: (dim != 3, query.stride(dim)))
        plain = flexgen.flex_attention(query.contiguous(), key, key)
        assert torch.equal(out, plain)
        found, expected = (torch.autograd.grad(it.sin().sum(), query)[0] for it in (out, plain))
        torch.testing.assert_close(found, expected)


# Masks made inside.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("make", [flexgen.create_block_mask, torch_flex.create_block_mask])
def test_block_mask_made_inside(make, backend):
    def function(query, key, value):
        return attend(query, key, value, make(causal, 2, None, 64, 64, device="cpu", BLOCK_SIZE=16))

    traced, counter = compiled(function, backend)
    assert torch.equal(traced(*draw()), function(*draw()))
    assert counter.frame_count == 1


def test_block_mask_over_tensors_of_the_graph_and_symbolic_lengths():
    def function(query, key, value, starts, ratio):
        documents = starts.cumsum(0)
        length = query.shape[2]

        def mask(b, h, q_idx, kv_idx):
            same = documents[q_idx] == documents[kv_idx]
            return (q_idx >= kv_idx) & (same | (kv_idx < length // ratio))

        block_mask = flexgen.create_block_mask(
            mask, None, None, length, key.shape[2], device="cpu", BLOCK_SIZE=(16, 32)
        )
        return attend(query, key, value, block_mask), block_mask.kv_num_blocks, block_mask.full_kv_num_blocks

    traced, counter = compiled(function, dynamic=True)
    for length in (64, 48):
        arguments = (*draw(length=length), (torch.arange(length) % 13 == 0).int(), 4)
        for found, expected in zip(traced(*arguments), function(*arguments), strict=True):
            assert torch.equal(found, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize("keywords", [{}, {"separate_full_blocks": False}, WRITE_ORDER])
def test_lists_made_inside_are_those_made_outside(keywords):
    def make(table):
        def mask(b, h, q_idx, kv_idx):
            return ((q_idx - kv_idx).abs() < 20 + 10 * b) & table[h, kv_idx]

        return flexgen.create_block_mask(mask, 2, 2, 100, 150, device="cpu", BLOCK_SIZE=32, **keywords).as_tuple()[:-1]

    traced, _ = compiled(make)
    table = torch.arange(300).view(2, 150) % 7 != 0
    for found, expected in zip(traced(table), make(table), strict=True):
        assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected


def only_below(score, b, h, q_idx, kv_idx):
    return torch.where(q_idx >= kv_idx + h, score, -float("inf"))


class Window:
    def __init__(self, size):
        self.size = size

    def mask(self, b, h, q_idx, kv_idx):
        return (q_idx - kv_idx).abs() < self.size


def closer(b, h, q_idx, kv_idx, limit=4, *, offset=0):
    return (q_idx - kv_idx + offset).abs() < limit


MASKS = {
    "mask": causal,
    "score": only_below,
    "method": Window(5).mask,
    "default": closer,
    "partial": functools.partial(closer, limit=7, offset=2),
}


@pytest.mark.parametrize("mod", MASKS.values(), ids=MASKS)
def test_whole_mask_made_inside(mod):
    make = lambda length: flexgen.create_mask(mod, 2, 2, 20, length, device="cpu")  # noqa: E731
    traced, _ = compiled(make)
    assert torch.equal(traced(33), make(33))


def test_combined_masks_made_inside():
    def make(window):
        near = lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window  # noqa: E731
        mask = flexgen.and_masks(causal, flexgen.or_masks(near, lambda b, h, q_idx, kv_idx: kv_idx < 4))
        return flexgen.create_mask(mask, 1, 1, 40, 40, device="cpu")

    traced, counter = compiled(make)
    for window in (5, 9, 17):
        assert torch.equal(traced(window), make(window))
    assert counter.frame_count == 2  # a number, then a symbol


@pytest.mark.parametrize("make", [flexgen.create_block_mask, flexgen.create_mask])
def test_sizes_that_a_mask_reads_are_guarded(make):
    """torch.compile makes a symbol of a size that changes, of which the captured mask holds the value."""
    traced = torch.compile(make, backend="eager")
    for length in (20, 21, 22, 23):
        documents = torch.arange(length) // 7

        def mask(b, h, q_idx, kv_idx, documents=documents):
            return documents[q_idx.clamp(0, documents.shape[0] - 1)] == documents[kv_idx]

        found, expected = (function(mask, 1, 1, length, length, device="cpu") for function in (traced, make))
        if make is flexgen.create_block_mask:
            found, expected = found.to_dense(), expected.to_dense()
        assert torch.equal(found, expected)


# Symbols of the graph in mods.


def test_sizes_without_a_hint():
    """Unbacked ones, of which torch.compile may not ask whether they are 1 or equal."""
    whole = flexgen.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)

    def function(query, key, value):
        half = query.shape[0] // 2
        parts = [(tensor[:half], tensor[half:]) for tensor in (query, key, value)]
        return sum(attend(*part, whole).sin().sum() for part in zip(*parts, strict=True))

    inputs = [tensor.requires_grad_() for tensor in draw(batch=4)]
    for tensor in inputs:
        for dim in (0, 2):
            torch._dynamo.decorators.mark_unbacked(tensor, dim)
    traced, _ = compiled(function, dynamic=True)
    found, expected = (torch.autograd.grad(it(*inputs), inputs) for it in (traced, function))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backward", [False, True])
def test_mods_over_symbols_share_one_graph(backward):
    def function(query, key, value):
        batch, length = query.shape[0], query.shape[2]

        def score(score, b, h, q_idx, kv_idx):
            return score + (b * length + kv_idx) / (batch * length)

        return flexgen.flex_attention(query, key, value, score)

    traced, counter = compiled(function, dynamic=True)
    for length in (64, 48, 33):
        inputs = [tensor.requires_grad_() for tensor in draw(length=length)]
        found, expected = traced(*inputs), function(*inputs)
        torch.testing.assert_close(found, expected)
        if backward:
            gradients = [torch.autograd.grad(it.sin().sum(), inputs) for it in (found, expected)]
            torch.testing.assert_close(*gradients)
    assert counter.frame_count == 1


def test_symbol_that_python_needs_is_guarded():
    def function(query, key, value, bias):
        length = query.shape[2]

        def score(score, b, h, q_idx, kv_idx):
            return score + bias.view(length)[kv_idx] + (1 if length > 50 else 2) * q_idx

        return flexgen.flex_attention(query, key, value, score)

    traced, _ = compiled(function, dynamic=True)
    for length in (64, 48):
        arguments = (*draw(length=length), torch.randn(length))
        assert torch.equal(traced(*arguments), function(*arguments))


@pytest.mark.parametrize("approx", [False, True])
def test_soft_cap_of_attn_gym(approx):
    """The approximation is a method of an autograd.Function, of which torch.compile shows no function."""
    softcap = pytest.importorskip("attn_gym.mods").generate_tanh_softcap(20, approx=approx)
    traced, _ = compiled(flexgen.flex_attention)
    assert torch.equal(traced(*draw(), softcap), flexgen.flex_attention(*draw(), softcap))


def test_slices_among_the_indices_of_a_mod_made_inside():
    def function(query, key, value, bias):
        def score(score, b, h, q_idx, kv_idx):
            return score + bias[..., kv_idx][b, h, q_idx] + bias[b, h, q_idx, :][kv_idx] + bias[b, :, 3][h, kv_idx]

        return flexgen.flex_attention(query, key, value, score)

    traced, _ = compiled(function)
    arguments = (*draw(), torch.randn(2, 2, 64, 64))
    assert torch.equal(traced(*arguments), function(*arguments))


def test_two_symbols_are_told_apart():
    def function(query, key, value):
        rows, columns = query.shape[2], key.shape[2]
        mask = lambda b, h, q_idx, kv_idx: q_idx * columns >= kv_idx * rows  # noqa: E731
        block_mask = flexgen.create_block_mask(mask, None, None, rows, columns, device="cpu", BLOCK_SIZE=16)
        return attend(query, key, value, block_mask)

    traced, counter = compiled(function, dynamic=True)
    for rows, columns in itertools.pairwise((40, 64, 33)):
        query, (_, key, value) = draw(length=rows)[0], draw(length=columns)
        assert torch.equal(traced(query, key, value), function(query, key, value))
    assert counter.frame_count == 1


@pytest.mark.gpu
def test_block_mask_made_inside_a_cuda_graph():
    inputs = [tensor.cuda().half() for tensor in draw(length=512)]
    limit = torch.tensor(300, device="cuda")

    def function(query, key, value):
        mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx < limit)  # noqa: E731
        block_mask = flexgen.create_block_mask(mask, None, None, 512, 512, device="cuda")
        return attend(query, key, value, block_mask)

    traced = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    for count in (300, 100, 512, 7):
        limit.fill_(count)
        found = traced(*inputs).clone()  # by another kernel, maybe: what is known of lists differs
        torch.testing.assert_close(found, function(*inputs), rtol=0, atol=4e-3)


def test_a_whole_graph_that_cannot_be_says_what_is_wrong():
    query, key, value = draw()
    traced = torch.compile(flexgen.flex_attention, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match="heads and key" if HAS_2_13 else "UnsupportedProblemError"):
        traced(query[:, :1].expand(-1, 3, -1, -1), key, value)
    traced = torch.compile(flexgen.flex_attention, backend="eager")
    with pytest.raises(flexgen.UnsupportedProblemError, match="pass enable_gqa"):
        traced(query[:, :1].expand(-1, 3, -1, -1), key, value)


LIMIT = torch.tensor(40)


def test_a_mask_made_inside_reads_a_global_tensor():
    def function(query, key, value):
        mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (kv_idx < LIMIT)  # noqa: E731
        return attend(query, key, value, flexgen.create_block_mask(mask, None, None, 64, 64, device="cpu"))

    traced, counter = compiled(function)
    for count in (40, 7, 64):
        LIMIT.fill_(count)
        assert torch.equal(traced(*draw()), function(*draw()))
    assert counter.frame_count == 1

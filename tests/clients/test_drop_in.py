"""Calls as code written for torch's flex_attention makes them, through the drop-in."""

from __future__ import annotations

import functools
import itertools
import warnings

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils import _pytree as pytree

import flexgen
from flexgen import api
from tests.clients.versions import HAS_2_13, needs_2_13
from tests.reference import dense_attention


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def draw(batch: int = 2, heads: int = 2, length: int = 64, head_dim: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, heads, length, head_dim, generator=generator) for _ in range(3)]


def causal_blocks(**keywords: object) -> BlockMask:
    return torch_flex.create_block_mask(causal, 2, 2, 64, 64, device="cpu", BLOCK_SIZE=16, **keywords)


@functools.cache
def causal_output() -> torch.Tensor:
    return dense_attention(*draw(), None, causal).out.float()


def assert_is_causal(block_mask: BlockMask, rows: slice = slice(None)) -> None:
    query, key, value = draw()
    out = flexgen.flex_attention(query[:, :, rows], key, value, block_mask=block_mask)
    torch.testing.assert_close(out, causal_output()[:, :, rows], atol=2e-6, rtol=1e-5)


# torch's BlockMask, in each of its forms.


def test_lists_expanded_over_batch_and_heads():
    one = torch_flex.create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    lists = [getattr(one, name) for name in names]
    expanded = [it.expand(2, 2, *it.shape[2:]) for it in lists]
    assert expanded[0].stride(0) == 0
    assert_is_causal(BlockMask.from_kv_blocks(*expanded, BLOCK_SIZE=16, mask_mod=causal))


def test_lists_longer_than_the_number_of_blocks_with_garbage_behind_the_used_entries():
    made = causal_blocks()
    lists = []
    for counts, indices in ((made.kv_num_blocks, made.kv_indices), (made.full_kv_num_blocks, made.full_kv_indices)):
        longer = torch.full((2, 2, 4, 9), -(1 << 30), dtype=torch.int32)
        longer[..., :4] = torch.where(torch.arange(4) < counts[..., None], indices, 1 << 30)
        lists += [counts, longer]
    keywords = {"BLOCK_SIZE": 16, "mask_mod": causal, "seq_lengths": (64, 64), "compute_q_blocks": False}
    assert_is_causal(BlockMask.from_kv_blocks(*lists, **keywords))


def test_gradients_do_not_need_the_lists_by_columns():
    made = causal_blocks()
    lists = (made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices)
    without = BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=causal, compute_q_blocks=False)
    assert without.q_indices is None
    inputs = [tensor.requires_grad_() for tensor in draw()]
    found, expected = (
        torch.autograd.grad(flexgen.flex_attention(*inputs, block_mask=it).sin().sum(), inputs)
        for it in (without, made)
    )
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("index", [0, slice(0, 1), (slice(None), 1), (slice(None), slice(1, 2)), (torch.tensor([1]),)])
def test_slices_of_batch_and_heads(index):
    sliced = causal_blocks()[index]
    sliced.mask_mod = causal
    assert_is_causal(sliced)


@pytest.mark.parametrize("rows", [slice(2, 3), slice(1, 3), torch.tensor([2])])
def test_slices_of_query_blocks(rows):
    sliced = causal_blocks()[:, :, rows]
    first = 16 * (rows.start if isinstance(rows, slice) else int(rows[0]))
    count = 16 * sliced.kv_indices.shape[2]
    sliced.mask_mod = lambda b, h, q_idx, kv_idx: q_idx + first >= kv_idx
    sliced.seq_lengths = (count, 64)
    assert_is_causal(sliced, slice(first, first + count))


@needs_2_13
def test_write_order_is_carried_along():
    assert_is_causal(causal_blocks(compute_dq_write_order=True))
    assert_is_causal(causal_blocks(compute_dq_write_order=True, dq_kv_order=False))


def test_sparsity_of_its_own():
    """Listed blocks are visited and no others, whatever mask_mod says: here the diagonal ones of a causal mask."""
    counts = torch.ones(1, 1, 4, dtype=torch.int32)
    diagonal = torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1)
    block_mask = BlockMask.from_kv_blocks(
        counts, diagonal, BLOCK_SIZE=16, mask_mod=causal, seq_lengths=(64, 64), compute_q_blocks=False
    )
    inputs = draw()
    expected = dense_attention(*inputs, None, lambda b, h, q, k: (q >= k) & (q // 16 == k // 16)).out.float()
    torch.testing.assert_close(flexgen.flex_attention(*inputs, block_mask=block_mask), expected, atol=2e-6, rtol=1e-5)


def test_methods_and_properties_are_torchs():
    ours = flexgen.create_block_mask(causal, 2, 2, 64, 64, device="cpu", BLOCK_SIZE=16)
    theirs = causal_blocks()
    assert type(ours) is BlockMask
    for name in ("shape", "BLOCK_SIZE", "seq_lengths", "mask_mod"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("numel", "sparsity", "to_string", "__str__", "__repr__"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for mine, other in zip(ours.as_tuple(), theirs.as_tuple(), strict=True):
        assert torch.equal(mine, other) if isinstance(mine, torch.Tensor) else mine == other
    assert_is_causal(ours.to("cpu"))
    query, key, value = (tensor[:, :, :40] for tensor in draw())
    if HAS_2_13:  # before, it set lengths that are multiples of the blocks'
        cropped = flexgen.flex_attention(query, key, value, block_mask=ours._adjust(40, 40))
        torch.testing.assert_close(cropped, causal_output()[:, :, :40], atol=2e-6, rtol=1e-5)


@needs_2_13
def test_a_pytree_of_masks_whose_closures_are_leaves():
    offset = torch.tensor([0, 8])

    def shifted(b, h, q_idx, kv_idx):
        return q_idx + offset[b] >= kv_idx

    block_mask = torch_flex.create_block_mask(shifted, 2, 2, 64, 64, device="cpu", BLOCK_SIZE=16)
    leaves, context = block_mask._flatten()
    assert any(leaf is offset for leaf in leaves)
    again = BlockMask._unflatten(tuple(leaf.clone() for leaf in leaves), context)
    kept = pytree.tree_map(lambda leaf: leaf, {"full": [again]})["full"][0]
    inputs = draw()
    found, expected = (flexgen.flex_attention(*inputs, block_mask=it) for it in (kept, block_mask))
    assert torch.equal(found, expected)


# What a call returns.


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_output_has_the_strides_order_of_the_query_with_columns_innermost(order):
    shape = (2, 3, 5, 8)
    places = [order.index(dim) for dim in range(4)]
    query = torch.randn([shape[dim] for dim in order]).permute(places).requires_grad_()
    key = torch.randn(shape)
    out = flexgen.flex_attention(query, key, key)
    assert sorted(range(4), key=out.stride) == sorted(range(4), key=lambda dim: (dim != 3, query.stride(dim)))
    assert out.stride(3) == 1
    plain = flexgen.flex_attention(query.contiguous(), key, key)
    assert torch.equal(out, plain)
    found, expected = (torch.autograd.grad(it.sin().sum(), query)[0] for it in (out, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("shape", [(2, 1, 8, 16), (4, 2, 1, 16), (1, 2, 8, 16)])
def test_order_of_dimensions_of_size_one(shape):
    for order in itertools.permutations(range(3)):
        places = [order.index(dim) for dim in range(3)] + [3]
        query = torch.randn([shape[dim] for dim in (*order, 3)]).permute(places)
        out = flexgen.flex_attention(query, query, query)
        kept = [dim for dim in range(4) if shape[dim] > 1]
        assert sorted(kept, key=out.stride) == sorted(kept, key=query.stride)


def test_expanded_query_gives_a_dense_output():
    query = torch.randn(1, 2, 5, 8).expand(3, -1, -1, -1)
    out = flexgen.flex_attention(query, query, query)
    assert out.is_contiguous()


def test_auxiliary_outputs_are_a_tuple_as_torchs():
    inputs = draw()
    out, (lse, max_scores) = flexgen.flex_attention(*inputs, return_aux=torch_flex.AuxRequest(lse=True))
    assert max_scores is None
    assert lse.shape == out.shape[:3]
    assert (flexgen.AuxOutput, flexgen.AuxRequest) == (torch_flex.AuxOutput, torch_flex.AuxRequest)
    assert [type(leaf) for leaf in pytree.tree_leaves(flexgen.AuxOutput(lse, lse))] == [torch.Tensor] * 2
    again, also = flexgen.flex_attention(*inputs, return_lse=True)
    assert torch.equal(again, out)
    assert torch.equal(also, lse)


# What a call takes.


class Doubled:
    def __call__(self, score, b, h, q_idx, kv_idx):
        return score * 2

    def method(self, score, b, h, q_idx, kv_idx):
        return score * 2


def times(factor, score, b, h, q_idx, kv_idx):
    return score * factor


@pytest.mark.parametrize("score_mod", [Doubled(), Doubled().method, functools.partial(times, 2)])
def test_mods_of_every_kind(score_mod):
    inputs = draw()
    expected = flexgen.flex_attention(*inputs, lambda score, b, h, q_idx, kv_idx: score * 2)
    assert torch.equal(flexgen.flex_attention(*inputs, score_mod), expected)


def test_positions_of_the_arguments_are_torchs():
    query, key, value = draw()
    block_mask = causal_blocks()
    given = (query, key[:, :1], value[:, :1], Doubled(), block_mask, 0.3, True, True, {"BLOCK_M": 16})
    out, lse = flexgen.flex_attention(*given)
    dense = dense_attention(
        query, *(tensor[:, :1].expand(-1, 2, -1, -1) for tensor in (key, value)), Doubled(), causal, scale=0.3
    )
    torch.testing.assert_close(out, dense.out.float(), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, dense.lse.float(), atol=2e-6, rtol=1e-5)


def test_keys_of_one_batch_under_a_mask_for_each():
    query, key, value = draw()
    block_mask = causal_blocks()
    shared = flexgen.flex_attention(query, key[:1], value[:1], block_mask=block_mask)
    expanded = (tensor[:1].expand(2, -1, -1, -1) for tensor in (key, value))
    assert torch.equal(shared, flexgen.flex_attention(query, *expanded, block_mask=block_mask))


@pytest.mark.parametrize(
    "given", [{"BACKEND": "TRITON"}, {"BACKEND": "AUTO"}, {"PRESCALE_QK": True}, {"num_stages": 1}]
)
def test_kernel_options_keep_their_names(given):
    query, key, value = draw()
    out = flexgen.flex_attention(query, key, value, block_mask=causal_blocks(), kernel_options=given)
    torch.testing.assert_close(out, causal_output(), atol=2e-6, rtol=1e-5)


def test_flash_is_taken_for_auto_with_one_warning(monkeypatch):
    monkeypatch.setattr(api, "_told", set())
    inputs = draw()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            flexgen.flex_attention(*inputs, kernel_options={"BACKEND": "FLASH"})
    assert len([it for it in caught if "FLASH" in str(it.message)]) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize(("length", "masked"), [(20, False), (64, False), (4, True)])
def test_decoding_that_only_torch_has_is_taken_for_auto_with_one_warning(monkeypatch, length, masked):
    monkeypatch.setattr(api, "_told", set())
    query, key, value = draw()
    query = query[:, :, :length]
    block_mask = flexgen.create_block_mask(causal, None, None, length, 64, device="cpu") if masked else None
    decode = functools.partial(
        flexgen.flex_attention, query, key, value, block_mask=block_mask, kernel_options={"BACKEND": "TRITON_DECODE"}
    )
    with pytest.warns(UserWarning, match="up to 16 queries") as caught:
        outputs = [decode(), decode()]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert torch.equal(outputs[0], flexgen.flex_attention(query, key, value, block_mask=block_mask))


def test_decoding_that_torch_refuses_too_is_refused():
    inputs = draw(length=128)
    with pytest.raises(RuntimeError, match="BACKEND='TRITON_DECODE' cannot be honoured"):
        flexgen.flex_attention(*inputs, kernel_options={"BACKEND": "TRITON_DECODE"})


def sliced_blocks() -> BlockMask:
    return causal_blocks()[:, :, 1]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kernel_options": {"BACKEND": "TRITON", "FORCE_USE_FLEX_ATTENTION": True}}, "were both given"),
        ({"block_mask": sliced_blocks()}, "was sliced and has no mask_mod"),
        ({"block_mask": causal_blocks()._adjust(32, 32)}, "was made for 32 queries and 32 keys"),
        ({"return_lse": True, "return_aux": torch_flex.AuxRequest()}, "were both given"),
    ],
)
def test_errors_are_of_both_kinds_that_torch_raises(keywords, message, traced):
    function = torch.compile(flexgen.flex_attention, backend="eager") if traced else flexgen.flex_attention
    with pytest.raises(flexgen.FlexgenError, match=message) as caught:
        function(*draw(), **keywords)
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError)


def test_names_that_torchs_users_import_are_here():
    """Torch's public names but the kernel options, which are torch's own; the class of masks is the same."""
    missing = [name for name in torch_flex.__all__ if not hasattr(flexgen, name)]
    assert missing == ["FlexKernelOptions"]
    assert flexgen.BlockMask is torch_flex.BlockMask

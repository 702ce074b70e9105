"""Nested tensors of the jagged layout are packed sequences that bring their offsets along."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import draw
from tests.forward.run import EVERYTHING, refusal
from tests.reference import assert_near, dense_attention
from tests.varlen.run import SMALL_TILES, of_sequence, offsets_of

LENGTHS, KEY_LENGTHS = (5, 0, 21, 1), (9, 3, 2, 1)
PROBLEM, KIND = flexgen.UnsupportedProblemError, flexgen.ProblemTypeError


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def ragged(lengths=LENGTHS, heads=2, head_dim=16, seed=0, *, like=None):
    """Return a nested leaf [B, j, H, D]; with `like`, of its ragged structure."""
    values = draw(sum(lengths), heads, head_dim, seed=seed).detach()
    offsets = offsets_of(lengths, dtype=torch.int64) if like is None else like.offsets()
    return torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()


def triple(q_lengths=LENGTHS, kv_lengths=LENGTHS):
    query, key = ragged(q_lengths), ragged(kv_lengths, seed=1)
    return query, key, ragged(kv_lengths, seed=2, like=key)


def compiled(layout="bhsd", score=None):
    return flexgen.compile(score, causal, {**SMALL_TILES, "layout": layout})


def arranged(tensors, layout):
    return [tensor.transpose(1, 2) if layout == "bhsd" else tensor for tensor in tensors]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kv_lengths", [LENGTHS, KEY_LENGTHS])
def test_outputs_and_gradients(layout, kv_lengths):
    slope = draw(4)

    def score(score, b, h, q_idx, kv_idx):
        return score + slope[b] * (q_idx - kv_idx)

    leaves = triple(LENGTHS, kv_lengths)
    given = arranged(leaves, layout)
    out, aux = compiled(layout, score)(*given, return_aux=EVERYTHING)
    assert out.shape == given[0].shape and out.layout is torch.jagged
    assert (out + given[0]).shape == out.shape  # the same ragged structure, as torch sees it
    assert aux.lse.dim() == aux.max_scores.dim() == 3

    expected = []
    for number, parts in enumerate(zip(*(leaf.unbind() for leaf in leaves), strict=True)):
        batch = [part.transpose(0, 1)[None] for part in parts]
        dense = dense_attention(*batch, of_sequence(score, number, 1), causal)
        expected.append(dense.out[0])
        assert_near("out", out[number] if layout == "bhsd" else out[number].transpose(0, 1), dense.out[0], 1e-5)
        assert_near("lse", aux.lse[number], dense.lse[0], 1e-5)
        assert_near("max_scores", aux.max_scores[number], dense.max_scores[0], 1e-5)
    found = torch.autograd.grad(out.values().square().sum(), [*leaves, slope])
    exact = torch.autograd.grad(sum(part.square().sum() for part in expected), [*leaves, slope])
    for grad, other in zip(found, exact, strict=True):
        assert grad.is_nested == other.is_nested
        assert_near("gradient", *(t.values() if t.is_nested else t for t in (grad, other)), 1e-4)


def test_lowering_takes_them_too():
    lowered = compiled().lower(*arranged(triple(), "bhsd"), target="sm_90")
    assert "cu_seqlens_q_ptr" in lowered.source["forward"] and "backward_dq" in lowered.source


def test_under_torch_compile():
    attention, leaf = compiled(), ragged()

    def step(nested):
        query = nested.transpose(1, 2)
        return attention(query, query * 2, query + 1).transpose(1, 2)

    expected = step(leaf)
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(leaf)
    assert_near("out", found.values(), expected.values(), 1e-6)
    grads = [torch.autograd.grad(out.values().square().sum(), leaf)[0].values() for out in (expected, found)]
    assert_near("gradient", grads[1], grads[0], 1e-6)


def test_the_drop_in_takes_them():
    def softcap(score, b, h, q_idx, kv_idx):
        return 5.0 * torch.tanh(score / 5.0)

    query, key, value = arranged(triple(), "bhsd")
    expected = flexgen.compile(softcap)(query, key, value).values()
    assert_near("out", flexgen.flex_attention(query, key, value, softcap).values(), expected, 1e-6)
    traced = torch.compile(flexgen.flex_attention, backend="eager", fullgraph=True)
    assert_near("traced", traced(query, key, value, softcap).values(), expected, 1e-6)
    table = flexgen.create_block_mask(causal, 1, 1, 21, 21, device="cpu", BLOCK_SIZE=16)
    refusal(
        lambda: flexgen.flex_attention(query, key, value, block_mask=table), PROBLEM, "nested tensors", "block mask"
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_is_no_jagged_problem_is_refused():
    attention = compiled()
    query, key, value = arranged(triple(), "bhsd")
    dense = torch.randn(4, 2, 21, 16)
    refusal(lambda: attention(query, dense, dense), KIND, "key is not a nested tensor", "layout=torch.jagged")
    refusal(lambda: attention(dense, key, value), KIND, "query is not a nested tensor")
    refusal(lambda: attention(*triple()), PROBLEM, "[B, H, j, D]", "transpose(1, 2)")
    refusal(lambda: attention(query, key, ragged(seed=3).transpose(1, 2)), PROBLEM, "different ragged", "key.offsets()")
    few = ragged((5, 27)).transpose(1, 2)
    refusal(lambda: attention(few, key, value), PROBLEM, "query holds 2 sequences and key 4")
    refusal(lambda: attention(query, key, value, cu_seqlens_q=query.offsets()), PROBLEM, "bring the offsets")
    strided = torch.nested.nested_tensor([torch.randn(2, n, 16) for n in (3, 4)])
    refusal(lambda: attention(strided, strided, strided), KIND, "layout strided", "torch.jagged")
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1])
    holes = torch.nested.narrow(torch.randn(3, 6, 2, 16), 1, starts, lengths, layout=torch.jagged)
    refusal(lambda: attention(*[holes.transpose(1, 2)] * 3), PROBLEM, "holes", "contiguous()")
    filled = holes.contiguous().transpose(1, 2)
    assert attention(filled, filled, filled).shape == filled.shape

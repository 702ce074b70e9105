"""Checkpointing, autocast, and the transforms of torch.func."""

from __future__ import annotations

import functools
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flexgen
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients, softcap


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_gradients(use_reentrant):
    module, inputs = BiasedAttention(), draw()
    expected = run_with_gradients(module, inputs, [module.bias])

    def backward(call):
        tensors = [tensor.detach().requires_grad_() for tensor in inputs]
        module.bias.grad = None
        out = call(*tensors)
        (out * out.sin()).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in tensors), module.bias.grad]

    assert_same(backward(lambda *tensors: checkpoint(module, *tensors, use_reentrant=use_reentrant)), expected)


def test_selective_checkpointing_saves_what_it_is_told_to():
    attention, inputs, seen = flexgen.compile(softcap, causal), draw(), []

    def policy(context, operator, *args, **kwargs):
        if operator.namespace == "flexgen":
            seen.append((str(operator), context.is_recompute))
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(*tensors):
        return checkpoint(lambda *t: attention(*t).exp(), *tensors, use_reentrant=False, context_fn=contexts)

    expected = run_with_gradients(lambda *tensors: attention(*tensors).exp(), inputs)
    assert_same(run_with_gradients(call, inputs), expected)
    assert ("flexgen.attention.default", False) in seen


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "compiled"])
def test_autocast_picks_the_dtype(traced):
    attention, inputs = flexgen.compile(softcap, causal), draw()
    call = torch.compile(lambda *t: attention(*t), fullgraph=True, backend="eager") if traced else attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = call(*inputs)
        kept = call(*[tensor.detach().double() for tensor in inputs])
    assert out.dtype == torch.bfloat16 and kept.dtype == torch.float64
    assert torch.equal(out, attention(*[tensor.bfloat16() for tensor in inputs]))
    out.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in inputs)


def test_autocast_brings_mixed_dtypes_together():
    query, key, value = draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flexgen.compile(softcap)(query.bfloat16(), key, value.bfloat16())
    assert out.dtype == torch.bfloat16


def _one_transformed():
    """Return an attention with a learned bias, and inputs without grad."""
    module = BiasedAttention()
    return module, [tensor.detach() for tensor in draw()]


def test_vmap_maps_every_input():
    module, (query, key, value) = _one_transformed()
    queries, values = torch.stack([query, query * 2, -query]), torch.stack([value, value + 1, value * 3], dim=2)
    found = torch.vmap(lambda q, v: module(q, key, v), in_dims=(0, 2))(queries, values)
    assert_same([found], [torch.stack([module(queries[i], key, values[:, :, i]) for i in range(3)])])


def test_vmap_maps_captured_tensors():
    _, inputs = _one_transformed()
    biases = torch.randn(3, 2)

    def call(bias):
        return flexgen.compile(lambda score, b, h, q_idx, kv_idx: score + bias[h] * q_idx, causal)(*inputs)

    assert_same([torch.vmap(call)(biases)], [torch.stack([call(bias) for bias in biases])])


def test_func_grad_and_vjp_agree_with_autograd():
    module, (query, key, value) = _one_transformed()

    def loss(query):
        return module(query, key, value).sin().sum()

    leaf = query.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaf), leaf)[0]
    _, pull_back = torch.func.vjp(loss, query)
    assert_same([torch.func.grad(loss)(query), pull_back(torch.ones(()))[0]], [expected, expected])


def test_func_grad_reaches_captured_tensors():
    module, inputs = _one_transformed()

    def loss(bias):
        return torch.func.functional_call(module, {"bias": bias}, tuple(inputs)).sin().sum()

    leaf = module.bias.detach().clone().requires_grad_()
    assert_same([torch.func.grad(loss)(leaf.detach())], torch.autograd.grad(loss(leaf), leaf))


def test_per_sample_gradients_and_jacrev():
    module, (query, key, value) = _one_transformed()
    queries = torch.stack([query, query * 2])

    def loss(query):
        return module(query, key, value).sin().sum()

    found = torch.vmap(torch.func.grad(loss))(queries)
    assert_same([found], [torch.stack([torch.func.grad(loss)(query) for query in queries])])
    rows = torch.func.jacrev(lambda query: module(query, key, value)[0, 0, 3, :2])(query)
    single = torch.func.grad(lambda query: module(query, key, value)[0, 0, 3, 1])(query)
    assert_same([rows[1]], [single])


def test_forward_mode_is_refused_by_name():
    module, (query, key, value) = _one_transformed()
    with pytest.raises(flexgen.UnsupportedProblemError, match="jvp"):
        torch.func.jvp(lambda query: module(query, key, value), (query,), (query,))
    with forward_ad.dual_level(), pytest.raises(flexgen.UnsupportedProblemError, match="forward_ad"):
        module(forward_ad.make_dual(query, query), key, value)
    with pytest.raises(flexgen.UnsupportedProblemError, match="jacfwd"):
        torch.func.jacfwd(lambda query: module(query, key, value))(query)


@pytest.mark.parametrize("how", ["eager", "compiled", "func"])
def test_second_derivatives_are_refused(how):
    attention, inputs = flexgen.compile(softcap, causal), draw()
    if how == "func":
        query, key, value = (tensor.detach() for tensor in inputs)
        twice = torch.func.grad(lambda q: torch.func.grad(lambda p: attention(p, key, value).sum())(q).sum())
        with pytest.raises(flexgen.UnsupportedProblemError, match="gradient of flexgen's gradients"):
            twice(query)
        return
    call = torch.compile(lambda *t: attention(*t), backend="eager") if how == "compiled" else attention
    grad = torch.autograd.grad(call(*inputs).sum(), inputs[0], create_graph=True)[0]
    with pytest.raises(flexgen.UnsupportedProblemError, match="gradient of flexgen's gradients"):
        (grad.square().sum() + inputs[0].sum()).backward()


def test_saved_tensor_hooks_may_free_the_inputs():
    attention, kept = flexgen.compile(softcap, causal), []
    inputs = draw()
    product = inputs[0] * 2
    seen = weakref.ref(product)

    def pack(tensor):
        kept.append(tensor.detach().clone())
        return len(kept) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, kept.__getitem__):
        out = attention(product, inputs[1], inputs[2])
    del product
    assert seen() is None
    out.sum().backward()

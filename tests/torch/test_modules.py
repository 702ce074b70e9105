"""Modules that hold an Attention: copies, replaced parameters, pickling, and threads."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch

import flexgen
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients, softcap


def _detached():
    return [tensor.detach() for tensor in draw()]


def test_deep_copy_reads_its_own_parameters():
    module, inputs = BiasedAttention(), _detached()
    before = module(*inputs)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.bias.add_(1)
        other.bias[0].mul_(3)
    assert other.attention.score_mod.__self__ is other
    assert_same([module(*inputs)], [before])
    fresh = BiasedAttention()
    fresh.load_state_dict(other.state_dict())
    assert_same([other(*inputs)], [fresh(*inputs)])
    assert not torch.allclose(other(*inputs), before)


def test_functional_call_uses_the_given_parameters():
    module, inputs = BiasedAttention(), _detached()
    before, bias = module(*inputs), torch.randn(2, 64, requires_grad=True)
    out = torch.func.functional_call(module, {"bias": bias}, tuple(inputs))
    assert torch.autograd.grad(out.sum(), bias)[0].abs().sum() > 0
    assert not torch.allclose(out, before)
    assert_same([module(*inputs)], [before])


def test_reassigned_parameter_is_seen():
    module, inputs = BiasedAttention(), _detached()
    module(*inputs)
    module.bias = torch.nn.Parameter(torch.randn(2, 64))
    fresh = BiasedAttention()
    fresh.bias = module.bias
    assert_same([module(*inputs)], [fresh(*inputs)])


def test_moving_to_another_dtype_is_seen():
    module, inputs = BiasedAttention().double(), [tensor.double() for tensor in _detached()]
    assert module(*inputs).dtype == torch.float64


def test_pickles_as_its_module_level_mods():
    attention, inputs = flexgen.compile(softcap, causal, {"BLOCK_M": 32}), _detached()
    other = pickle.loads(pickle.dumps(attention))
    assert other.options == attention.options
    assert_same([other(*inputs)], [attention(*inputs)])


def test_local_mod_does_not_pickle_and_is_named():
    def local_mod(score, b, h, q_idx, kv_idx):
        return score

    with pytest.raises((AttributeError, pickle.PicklingError), match="local_mod"):
        pickle.dumps(flexgen.compile(local_mod))


def test_eight_threads_call_one_attention_at_once():
    module, inputs = BiasedAttention(), draw()
    also, found, start = [module.bias], {}, threading.Barrier(8)
    shapes = {
        index: [tensor[:, :, : 12 + index % 4].detach().requires_grad_() for tensor in inputs] for index in range(8)
    }

    def work(index: int) -> None:
        start.wait()
        found[index] = run_with_gradients(module, shapes[index], also)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(8))
    for index in range(8):
        assert_same(found[index], run_with_gradients(module, shapes[index], also))

"""Modules that hold an Attention: copies, replaced parameters, pickling, and threads."""

from __future__ import annotations

import copy
import functools
import io
import marshal
import pickle
import threading
import types

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


def _local_mod():
    def local_mod(score, b, h, q_idx, kv_idx):
        return score

    return local_mod


def _with_slopes(slopes, score, b, h, q_idx, kv_idx):
    return score + slopes[h]


@pytest.mark.parametrize(
    ("mod", "kind"),
    [
        (_local_mod(), "the mod _local_mod.<locals>.local_mod of tests.torch.test_modules cannot be pickled"),
        (lambda score, b, h, q_idx, kv_idx: score, "it is a lambda"),
        (functools.partial(_local_mod()), "top level of a module"),
    ],
)
def test_mod_that_has_no_name_to_pickle_by_is_refused_with_a_way_out(mod, kind):
    attention, inputs = flexgen.compile(mod), _detached()
    with pytest.raises(flexgen.ModPicklingError, match=kind) as caught:
        pickle.dumps({"layer": attention})
    assert isinstance(caught.value, pickle.PicklingError)
    assert "why:" in str(caught.value) and "state_dict" in str(caught.value)
    for copied in (copy.copy(attention), copy.deepcopy(attention)):
        assert_same([copied(*inputs)], [attention(*inputs)])


def test_pickles_as_a_partial_and_as_a_method_of_a_module():
    attention, inputs = flexgen.compile(functools.partial(_with_slopes, torch.randn(2))), _detached()
    assert_same([pickle.loads(pickle.dumps(attention))(*inputs)], [attention(*inputs)])
    module = BiasedAttention()
    other = pickle.loads(pickle.dumps(module))
    assert other.attention.score_mod.__self__ is other
    assert_same([other(*inputs)], [module(*inputs)])


def test_picklers_that_write_functions_by_value_are_let_through():
    """Stands in for cloudpickle, which overrides how functions are reduced."""

    class ByValue(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__:
                return _restored, (marshal.dumps(value.__code__),)
            return NotImplemented

    file, attention, inputs = io.BytesIO(), flexgen.compile(_local_mod()), _detached()
    pickler = ByValue(file)
    exec("def dump(pickler, value): pickler.dump(value)", namespace := {"__name__": "cloudpickle.cloudpickle"})
    namespace["dump"](pickler, attention)
    assert_same([pickle.loads(file.getvalue())(*inputs)], [attention(*inputs)])


def _restored(code: bytes):
    return types.FunctionType(marshal.loads(code), {})


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

"""`patch_torch`: which calls it reaches, and that it is undone whatever happens."""

from __future__ import annotations

import functools
import inspect
import threading
import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as module
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import flexgen
from flexgen import patch
from tests.clients.test_drop_in import causal, draw

ALIAS = functools.partial(flex_attention)  # as a module that was imported before holds it
CODE = (flex_attention.__code__, create_block_mask.__code__)


@pytest.fixture(autouse=True)
def quiet_and_undone(monkeypatch):
    monkeypatch.setattr(patch, "_told", {"interpreter"})
    yield
    assert (flex_attention.__code__, create_block_mask.__code__) == CODE
    torch._dynamo.reset()


@pytest.fixture
def calls(monkeypatch):
    """The calls that reach flexgen."""
    seen = []
    for name in ("flex_attention", "create_block_mask"):
        original = getattr(patch, name)

        def counted(*args, _name=name, _original=original, **keywords):
            seen.append(_name)
            return _original(*args, **keywords)

        monkeypatch.setattr(patch, name, counted)
    return seen


def masked(query, key, value):
    block_mask = create_block_mask(causal, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    return flex_attention(query, key, value, block_mask=block_mask, scale=0.3)


def test_every_name_is_reached(calls):
    inputs = draw()
    with flexgen.patch_torch():
        from torch.nn.attention.flex_attention import flex_attention as imported_after

        for name in (flex_attention, module.flex_attention, ALIAS, imported_after):
            name(*inputs)
        assert calls == ["flex_attention"] * 4
        found = masked(*inputs)
        assert calls[4:] == ["create_block_mask", "flex_attention"]
        lists = create_block_mask(causal, None, None, 64, 64, device="cpu", _compile=True).kv_indices
        assert calls[6:] == ["create_block_mask"]
    expected = flexgen.compile(None, causal)(*inputs, 0.3)
    torch.testing.assert_close(found, expected)
    assert torch.equal(lists, create_block_mask(causal, None, None, 64, 64, device="cpu").kv_indices)


def test_arguments_arrive_as_torch_means_them():
    query, key, value = draw()
    double = lambda score, b, h, q_idx, kv_idx: score * 2  # noqa: E731
    with flexgen.patch_torch():
        arguments = (query, key[:, :1], value[:, :1], double, None, 0.3, True, True, {"BLOCK_M": 16})
        out, lse = flex_attention(*arguments)
        again, aux = flex_attention(*arguments[:7], return_aux=module.AuxRequest(lse=True))
        with pytest.raises(flexgen.OptionError, match="BLOCK_MM"):
            flex_attention(query, key, value, kernel_options={"BLOCK_MM": 16})
    expected, expected_lse = flexgen.flex_attention(*arguments)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    torch.testing.assert_close((again, aux.lse), (out, lse))


def test_gradients_on_the_cpu_which_torch_has_not():
    inputs = [tensor.requires_grad_() for tensor in draw()]
    with pytest.raises(NotImplementedError):
        masked(*inputs)
    with flexgen.patch_torch():
        found = torch.autograd.grad(masked(*inputs).sin().sum(), inputs)
    expected = torch.autograd.grad(flexgen.compile(None, causal)(*inputs, 0.3).sin().sum(), inputs)
    torch.testing.assert_close(found, expected)


def test_signatures_stay_torchs():
    before = [inspect.signature(it) for it in (flex_attention, create_block_mask)]
    with flexgen.patch_torch():
        assert [inspect.signature(it) for it in (flex_attention, create_block_mask)] == before
    assert not hasattr(flex_attention, "__signature__")


def test_undone_by_exceptions_and_by_hand_in_any_order():
    with pytest.raises(ZeroDivisionError), flexgen.patch_torch():
        raise ZeroDivisionError
    assert flex_attention.__code__ is CODE[0]
    first, second = flexgen.patch_torch(), flexgen.patch_torch()
    first.undo()
    first.undo()
    assert flex_attention.__code__ is not CODE[0]
    with flexgen.patch_torch():
        second.undo()
        assert flex_attention.__code__ is not CODE[0]
    assert flex_attention.__code__ is CODE[0]


def test_threads_share_one_patch():
    start, failures = threading.Barrier(4), []
    inputs = draw(length=16)

    def work():
        start.wait()
        for _ in range(20):
            with flexgen.patch_torch():
                if flex_attention.__code__ is CODE[0]:
                    failures.append("torch's own inside of a patch")
                flex_attention(*inputs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_compiled_regions_follow():
    inputs = draw()
    counter = CompileCounterWithBackend("aot_eager")
    traced = torch.compile(masked, fullgraph=True, backend=counter)
    wrapped = torch.compile(flex_attention, backend="aot_eager")
    own = traced(*inputs)
    wrapped(*inputs)
    assert not holds_flexgen(counter.graphs[-1])
    with flexgen.patch_torch():
        torch.testing.assert_close(traced(*inputs), own)
        assert holds_flexgen(counter.graphs[-1])
        torch.testing.assert_close(wrapped(*inputs), flexgen.flex_attention(*inputs))
    frames = counter.frame_count
    torch.testing.assert_close(traced(*inputs), own)
    assert not holds_flexgen(counter.graphs[-1]) or counter.frame_count == frames


def holds_flexgen(graph):
    return any("flexgen" in str(node.target) for node in graph.graph.nodes)


def test_one_warning_with_an_estimate_on_the_cpu(monkeypatch):
    monkeypatch.setattr(patch, "_told", set())
    inputs = draw(length=512)
    with warnings.catch_warnings(record=True) as caught, flexgen.patch_torch():
        warnings.simplefilter("always")
        for _ in range(2):
            flex_attention(*inputs)
    (told,) = [it for it in caught if "interprets" in str(it.message)]
    assert "up to 0.1 s for this call" in str(told.message)  # 2 x 2 x 512 x 512 pairs
    assert told.filename == __file__


def test_tensors_of_any_kind_reach_the_call():
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 5)], layout=torch.jagged).transpose(1, 2)
    with flexgen.patch_torch():
        out = flex_attention(nested, nested, nested)
        for wrong in (None, torch.randn(8), torch.randn(2, 3, 8)):
            with pytest.raises(flexgen.UnsupportedProblemError):
                flex_attention(wrong, wrong, wrong)
    torch.testing.assert_close(out.values(), flexgen.flex_attention(nested, nested, nested).values())


def test_a_replaced_function_is_refused(monkeypatch):
    monkeypatch.setattr(module, "flex_attention", ALIAS)
    with pytest.raises(flexgen.UnsupportedProblemError, match="replaced"):
        flexgen.patch_torch()

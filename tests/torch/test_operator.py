"""The operators by themselves: what torch.library checks, what exported programs hold, and fake tensors."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode

import flexgen
from flexgen.capture.live import LiveMods
from flexgen.options import KERNEL_OPTION_NAMES, Options
from flexgen.torch_library.spec import captured_of, parse_options, print_options, spec_of
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients, softcap


class _Recorder(TorchDispatchMode):
    """Notes the calls of flexgen's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flexgen":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def _calls(*, blocks: bool = False, layout: str = "bhsd", aux: bool = False):
    """Return a forward and a backward call of the operators, as a module makes them."""
    module, inputs = BiasedAttention({"layout": layout}), draw(32)
    if layout == "bshd":
        inputs = [tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in inputs]
    table = create_block_mask(causal, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16) if blocks else None
    request = flexgen.AuxRequest(lse=True, max_scores=True) if aux else None
    with _Recorder() as recorder:
        result = module.attention(*inputs, block_table=table, return_aux=request)
        (result[0] if aux else result).sum().backward()
    forward, backward = recorder.calls
    assert (str(forward[0]), str(backward[0])) == ("flexgen.attention.default", "flexgen.attention_backward.default")
    return forward, backward


@pytest.mark.parametrize(
    "options", [{}, {"blocks": True}, {"layout": "bshd"}, {"aux": True}], ids=["plain", "blocks", "bshd", "aux"]
)
def test_forward_operator_passes_opcheck(options):
    """With max_scores its backward refuses the loss that torch's check of compiled gradients makes of all outputs."""
    operator, arguments = _calls(**options)[0]
    all_checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=all_checks[:3] if "aux" in options else all_checks)


@pytest.mark.parametrize("options", [{}, {"blocks": True}, {"layout": "bshd"}], ids=["plain", "blocks", "bshd"])
def test_backward_operator_passes_opcheck(options):
    operator, arguments = _calls(**options)[1]
    torch.library.opcheck(operator, _detached(arguments))


def _detached(argument):
    if isinstance(argument, tuple | list):
        return type(argument)(map(_detached, argument))
    return argument.detach() if isinstance(argument, torch.Tensor) else argument


def test_an_eager_call_is_no_operator_call():
    module, inputs = BiasedAttention(), draw()
    with torch.profiler.profile() as profile:
        module(*inputs)
    assert not [event for event in profile.events() if event.name.startswith("flexgen::")]


def test_spec_is_text_that_means_the_same_mods():
    module = BiasedAttention()
    mods = LiveMods(module.score, module.mask)
    captured = mods.current().captured
    spec = spec_of(captured)
    assert captured_of(spec, torch.float32, [module.bias]).mods == captured.mods
    assert "buffers: bias" in spec and "scalars" not in spec  # a number is a constant until it changes
    module.window = 9
    assert "scalars: window int64" in spec_of(mods.current().captured)


def test_spec_refuses_other_tensors():
    module = BiasedAttention()
    spec = spec_of(LiveMods(module.score, module.mask).current().captured)
    with pytest.raises(flexgen.UnsupportedProblemError, match="captured tensor bias"):
        captured_of(spec, torch.float32, [module.bias.double()])
    with pytest.raises(flexgen.UnsupportedProblemError, match="0 captured tensors"):
        captured_of(spec, torch.float32, [])


def test_options_text_names_every_option_and_reads_back():
    options = Options.of({"USE_SUBTILING": True, "bwd_BLOCK_M1": 32, "layout": "bshd"})
    text = print_options(options)
    assert parse_options(text) == options
    assert all(f'"{name}"' in text for name in KERNEL_OPTION_NAMES)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_exported_program_shows_all_options_and_runs(strict):
    module, inputs = BiasedAttention({"PRESCALE_QK": True}), [tensor.detach() for tensor in draw(24)]
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(module, tuple(inputs), strict=strict, dynamic_shapes=({2: length},) * 3)
    calls = [node for node in program.graph.nodes if "flexgen" in str(node.target)]
    text = calls[0].args[-1]
    assert len(calls) == 1 and all(f'"{name}"' in text for name in KERNEL_OPTION_NAMES)
    assert '"PRESCALE_QK": true' in text and '"USE_SUBTILING": null' in text
    assert program.graph_signature.parameters == ("bias",)
    for size in (24, 31):
        inputs = [tensor.detach() for tensor in draw(size)]
        assert_same([program.module()(*inputs)], [module(*inputs)])


def test_saved_program_runs_in_another_process(tmp_path):
    module, inputs = BiasedAttention(), [tensor.detach() for tensor in draw()]
    torch.export.save(torch.export.export(module, tuple(inputs)), tmp_path / "attention.pt2")
    torch.save((inputs, module(*inputs).detach()), tmp_path / "expected.pt")
    program = (
        "import sys, torch, flexgen.torch_library.ops\n"
        "inputs, expected = torch.load(sys.argv[1] + '/expected.pt')\n"
        "found = torch.export.load(sys.argv[1] + '/attention.pt2').module()(*inputs)\n"
        "assert torch.allclose(found, expected, atol=1e-5)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_program_survives_saving():
    module, inputs = BiasedAttention(), [tensor.detach() for tensor in draw()]
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, tuple(inputs)), file)
    file.seek(0)
    assert_same([torch.export.load(file).module()(*inputs)], [module(*inputs)])


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_forward_and_backward(mode):
    attention, inputs = flexgen.compile(softcap, causal), draw()

    def step(*tensors):
        return run_with_gradients(attention, tensors)

    graph = make_fx(step, tracing_mode=mode)(*inputs)
    targets = [str(node.target) for node in graph.graph.nodes if "flexgen" in str(node.target)]
    assert targets == ["flexgen.attention.default", "flexgen.attention_backward.default"]
    assert_same(graph(*inputs), step(*inputs))


def test_fake_tensors_have_the_shapes_and_strides_of_real_ones():
    attention = flexgen.compile(softcap, causal)
    request = flexgen.AuxRequest(lse=True, max_scores=True)

    def described(seed):
        query, key, value = draw(seed=seed)
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        out, aux = attention(query, key, value, return_aux=request)
        return [(t.shape, t.stride(), t.dtype, t.device) for t in (out, aux.lse, aux.max_scores)]

    expected = described(0)
    with FakeTensorMode():
        assert described(0) == expected


def test_wrong_shapes_are_refused_while_tracing():
    attention, (query, key, value) = flexgen.compile(softcap, causal), draw()
    with pytest.raises(Exception, match="different head dims"):
        torch.compile(lambda *t: attention(*t), fullgraph=True, backend="eager")(query, key[..., :8], value)

"""Dropout in torch's machinery: generators, checkpointing, compiled and exported programs, transforms, errors."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import flexgen
from tests.dropout.dense import seeded
from tests.torch.models import BiasedAttention, assert_same, causal, draw, run_with_gradients, softcap

P = 0.4


class Dropping(BiasedAttention):
    """The module with dropout."""

    def forward(self, query, key, value):
        return self.attention(query, key, value, dropout_p=P)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def seeded_run(call, inputs, also=(), seed: int = 3):
    torch.manual_seed(seed)
    return run_with_gradients(call, inputs, also)


# What is drawn.


def test_calls_differ_and_a_seed_repeats_them():
    module, inputs = Dropping(), draw()
    torch.manual_seed(1)
    first, second = module(*inputs), module(*inputs)
    torch.manual_seed(1)
    assert torch.equal(module(*inputs), first) and torch.equal(module(*inputs), second)
    assert not torch.equal(first, second)


def test_state_of_the_generator_repeats_them():
    module, inputs = Dropping(), draw()
    state = torch.get_rng_state()
    first = module(*inputs)
    torch.set_rng_state(state)
    assert torch.equal(module(*inputs), first)


def test_generator_is_used_and_no_other():
    attention, inputs = flexgen.compile(softcap, causal), draw()
    before, (generator, _) = torch.get_rng_state(), seeded(torch.device("cpu"), 4)
    first, second = (attention(*inputs, dropout_p=P, generator=generator) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before) and not torch.equal(first, second)
    assert torch.equal(attention(*inputs, dropout_p=P, generator=generator.manual_seed(4)), first)


def test_without_dropout_nothing_is_drawn():
    attention, inputs = flexgen.compile(softcap, causal), draw()
    before = torch.get_rng_state()
    assert torch.equal(attention(*inputs, dropout_p=0), attention(*inputs))
    assert torch.equal(torch.get_rng_state(), before)


# Recomputation.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_drops_the_same(use_reentrant):
    module, inputs = Dropping(), draw()
    expected = seeded_run(module, inputs, [module.bias])

    def backward(call):
        tensors = [tensor.detach().requires_grad_() for tensor in inputs]
        module.bias.grad = None
        torch.manual_seed(3)
        out = call(*tensors)
        torch.rand(5)  # what the generator does meanwhile does not matter
        (out * out.sin()).sum().backward()
        return [out.detach(), *(tensor.grad for tensor in tensors), module.bias.grad]

    assert_same(backward(lambda *tensors: checkpoint(module, *tensors, use_reentrant=use_reentrant)), expected)


def test_saved_tensor_hooks_see_the_seed():
    attention, inputs, packed = flexgen.compile(softcap, causal), draw(), []

    def pack(tensor):
        packed.append(tensor.dtype)
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*inputs, dropout_p=P).sum().backward()
    assert packed.count(torch.int64) == 1


# Graphs.


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_module_is_one_graph(backend):
    module, inputs = Dropping(), draw()
    traced = torch.compile(module, fullgraph=True, backend=backend)
    found = [seeded_run(traced, inputs, [module.bias], seed) for seed in (3, 3, 4)]
    assert_same(found[0], found[1])
    assert not torch.equal(found[0][0], found[2][0])
    if backend != "inductor":  # it draws by a generator of its own
        assert_same(found[0], seeded_run(module, inputs, [module.bias]))


def test_compiled_checkpointing_drops_the_same():
    module, inputs = Dropping(), draw()
    traced = torch.compile(
        lambda *tensors: checkpoint(lambda *t: module(*t).exp(), *tensors, use_reentrant=False),
        fullgraph=True,
        backend="aot_eager",
    )
    expected = seeded_run(lambda *t: module(*t).exp(), inputs, [module.bias])
    assert_same(seeded_run(traced, inputs, [module.bias]), expected)


@pytest.mark.parametrize("strict", [False, True], ids=["non_strict", "strict"])
def test_exported_program_draws_at_each_run(strict):
    module, inputs = Dropping(), [tensor.detach() for tensor in draw()]
    program = torch.export.export(module, tuple(inputs), strict=strict)
    assert [str(node.target) for node in program.graph.nodes if "rand" in str(node.target)]
    run = program.module()
    torch.manual_seed(3)
    first, second = run(*inputs), run(*inputs)
    torch.manual_seed(3)
    assert_same([first, second], [module(*inputs), module(*inputs)])
    assert not torch.equal(first, second)


def test_operators_pass_opcheck():
    module, inputs = Dropping(), draw()
    graph = make_fx(lambda *tensors: run_with_gradients(module, tensors, [module.bias]))(*inputs)
    forward = next(node for node in graph.graph.nodes if node.target is torch.ops.flexgen.attention.default)
    assert str(forward.args[6]).startswith("randint")  # the seed is an operand that the graph draws
    seed, bias = torch.tensor([5, 6]), module.bias
    texts = forward.args[-2:]
    arguments = (*inputs, [bias], [], [], seed, [], [], [], None, False, P, *texts)
    torch.library.opcheck(torch.ops.flexgen.attention.default, arguments)
    made = torch.ops.flexgen.attention(*arguments)
    plain = (*(tensor.detach() for tensor in inputs), [bias.detach()], *arguments[4:])
    saved = (made[0].detach(), made[1].detach(), made[3].detach(), torch.ones_like(made[0]), None, None)
    torch.library.opcheck(torch.ops.flexgen.attention_backward.default, (*plain, *saved, [True] * 4))


# Transforms.


def test_vmap_follows_its_randomness():
    module, (query, key, value) = Dropping(), [tensor.detach() for tensor in draw()]
    queries = query.expand(3, *query.shape)
    mapped = functools.partial(torch.vmap, lambda q: module(q, key, value))
    with pytest.raises(RuntimeError, match="randomness"):
        mapped()(queries)
    torch.manual_seed(3)
    same = mapped(randomness="same")(queries)
    torch.manual_seed(3)
    assert_same([same], [module(query, key, value).detach().expand(3, *query.shape)])
    different = mapped(randomness="different")(queries)
    assert not torch.equal(different[0], different[1]) and not torch.equal(different[1], different[2])


def test_func_grad_agrees_with_autograd():
    module, (query, key, value) = Dropping(), [tensor.detach() for tensor in draw()]

    def loss(query):
        torch.manual_seed(3)
        return module(query, key, value).sin().sum()

    leaf = query.clone().requires_grad_()
    assert_same([torch.func.grad(loss)(query)], torch.autograd.grad(loss(leaf), leaf))
    with pytest.raises(flexgen.UnsupportedProblemError, match="jvp"):
        torch.func.jvp(loss, (query,), (query,))


def test_autocast_drops_the_same_pairs():
    attention, inputs = flexgen.compile(softcap, causal), draw()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.manual_seed(3)
        out = attention(*inputs, dropout_p=P)
    torch.manual_seed(3)
    assert torch.equal(out, attention(*[tensor.bfloat16() for tensor in inputs], dropout_p=P))


# Errors.


@pytest.mark.parametrize(
    ("p", "kind", "message"),
    [
        (True, flexgen.ProblemTypeError, "dropout_p=True is bool, not a number"),
        ("0.1", flexgen.ProblemTypeError, "dropout_p='0.1' is str"),
        (None, flexgen.ProblemTypeError, "is NoneType"),
        (torch.tensor(0.1), flexgen.ProblemTypeError, "is Tensor, not a number"),
        (float("nan"), flexgen.UnsupportedProblemError, "dropout_p=nan is not a probability"),
        (-0.1, flexgen.UnsupportedProblemError, "dropout_p=-0.1 is not a probability"),
        (1.5, flexgen.UnsupportedProblemError, "fix: pass a float from 0 to 1"),
    ],
    ids=str,
)
def test_what_is_no_probability_is_refused(p, kind, message):
    attention, inputs = flexgen.compile(softcap, causal), draw()
    for call in (attention, attention.lower):
        with pytest.raises(kind) as raised:
            call(*inputs, dropout_p=p)
        assert message in str(raised.value)


def test_what_is_no_generator_of_the_device_is_refused():
    attention, inputs = flexgen.compile(softcap, causal), draw()
    with pytest.raises(flexgen.ProblemTypeError, match="generator is int, not a"):
        attention(*inputs, dropout_p=P, generator=3)
    with pytest.raises(flexgen.UnsupportedProblemError, match="generator is one of cpu, query is on meta"):
        attention(*[tensor.to("meta") for tensor in inputs], dropout_p=P, generator=torch.Generator("cpu"))


def test_errors_while_tracing_say_the_same():
    attention, inputs, generator = flexgen.compile(softcap, causal), draw(), torch.Generator()
    with pytest.raises(Exception, match="is not a probability"):
        torch.compile(lambda *t: attention(*t, dropout_p=1.5), fullgraph=True, backend="eager")(*inputs)
    with pytest.raises(Exception, match="leave generator out, and seed torch's default one"):
        torch.compile(lambda *t: attention(*t, dropout_p=P, generator=generator), fullgraph=True, backend="eager")(
            *inputs
        )


def test_dropout_inside_a_mod_names_the_argument():
    def dropping(score, b, h, q_idx, kv_idx):
        return torch.nn.functional.dropout(score, P)

    with pytest.raises(flexgen.CaptureError, match="dropout_p= of the call"):
        flexgen.compile(dropping)(*draw())


def test_gluon_is_refused_with_a_reason():
    query = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta")
    report = flexgen.compile(None, causal).lower(query, query, query, target="sm_90", dropout_p=P).explain()
    assert "rejected GLUON: dropout is computed by plain Triton alone" in report
    with pytest.raises(flexgen.OptionError, match="dropout is computed by plain Triton alone"):
        flexgen.compile(None, causal, {"BACKEND": "GLUON"}).lower(query, query, query, target="sm_90", dropout_p=P)

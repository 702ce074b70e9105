"""Backward as autograd sees it: what is saved, when it runs, how often, and what is refused."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, draw, leaf, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import Inputs, refusal, square


def causal(b, h, q, k):
    return q >= k


def loss(attention, inputs, **keywords):
    return (attention(*inputs, **keywords) ** 2).sum()


def grads_of(attention, inputs):
    return torch.autograd.grad(loss(attention, inputs), list(inputs))


def test_two_calls_before_one_backward(device):
    """Each backward uses its own call's tensors, kernels and captured values."""
    table = draw(24, device=device)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[k], causal)
    first = training_inputs(square(24), device)
    second = training_inputs(Shape(2, 4, 2, 17, 24), device, seed=1)
    expected = [torch.autograd.grad(loss(attention, inputs), [*inputs, table]) for inputs in (first, second)]
    (loss(attention, first) + loss(attention, second)).backward()
    for inputs, grads in zip((first, second), expected, strict=True):
        for tensor, grad in zip(inputs, grads, strict=False):
            assert torch.equal(tensor.grad, grad)
    torch.testing.assert_close(table.grad, expected[0][3] + expected[1][3], rtol=1e-6, atol=1e-6)


def test_two_mods_in_one_backward(device):
    inputs = training_inputs(square(24), device)
    doubled = flexgen.compile(lambda score, b, h, q, k: score * 2)
    tripled = flexgen.compile(lambda score, b, h, q, k: score * 3)
    expected = [a + b for a, b in zip(grads_of(doubled, inputs), grads_of(tripled, inputs), strict=True)]
    (loss(doubled, inputs) + loss(tripled, inputs)).backward()
    for tensor, grad in zip(inputs, expected, strict=True):
        torch.testing.assert_close(tensor.grad, grad, rtol=1e-6, atol=1e-6)


def test_backward_twice_through_a_kept_graph(device):
    inputs = training_inputs(square(24), device)
    value = loss(flexgen.compile(None, causal), inputs)
    first = torch.autograd.grad(value, list(inputs), retain_graph=True)
    second = torch.autograd.grad(value, list(inputs))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(value, list(inputs))


def test_second_derivative_is_refused(device):
    inputs = training_inputs(square(16), device)
    first = torch.autograd.grad(loss(flexgen.compile(None, causal), inputs), list(inputs), create_graph=True)
    with pytest.raises(flexgen.UnsupportedProblemError, match="gradient of flexgen's gradients"):
        first[0].sum().backward()


def test_no_graph_without_grad_mode(device):
    inputs = training_inputs(square(16), device)
    attention = flexgen.compile(None, causal)
    with torch.no_grad():
        out = attention(*inputs)
    assert not out.requires_grad
    with torch.inference_mode():
        assert torch.equal(attention(*inputs), out)
    assert torch.equal(attention(*inputs), out)


def test_nothing_requires_grad(device):
    inputs = training_inputs(square(16), device)
    out = flexgen.compile(None, causal)(*(tensor.detach() for tensor in inputs))
    assert out.grad_fn is None


def test_captured_number_that_changes_before_backward(device):
    """The backward is that of the forward that ran, not of the mod as it is now."""
    slope, width = 0.5, 5

    def mod(score, b, h, q, k):
        return score + slope * (k - q) * score

    def mask(b, h, q, k):
        return (q - k).abs() < width

    inputs = training_inputs(square(30), device)
    attention = flexgen.compile(mod, mask)
    for slope, width in ((0.1, 4), (0.2, 9), (0.3, 2)):  # noqa: B007
        check_backward(inputs, mod, mask, attention=attention)
    expected = grads_of(attention, inputs)
    value = loss(attention, inputs)
    slope, width = -3.0, 29
    for one, other in zip(torch.autograd.grad(value, list(inputs)), expected, strict=True):
        assert torch.equal(one, other)


def test_captured_tensor_that_is_replaced_before_backward(device):
    table = draw(24, device=device)
    kept = table
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[k])
    inputs = training_inputs(square(24), device)
    expected = torch.autograd.grad(loss(attention, inputs), [*inputs, kept])
    value = loss(attention, inputs)
    table = draw(24, seed=5, device=device)
    for one, other in zip(torch.autograd.grad(value, [*inputs, kept]), expected, strict=True):
        assert torch.equal(one, other)
    assert loss(attention, inputs) != value


@pytest.mark.parametrize("which", ["query", "table", "index", "output"])
def test_change_in_place_of_what_backward_needs_is_an_error(device, which):
    table, index = torch.randn(24, device=device), torch.arange(24, device=device)
    inputs = training_inputs(square(24), device)
    attended = Inputs(*(tensor * 1.0 for tensor in inputs))
    out = flexgen.compile(lambda score, b, h, q, k: score * table[index[k]])(*attended)
    value = out.sum()
    {"query": attended.query, "table": table, "index": index, "output": out}[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(value, list(inputs))


def test_optimiser_step_after_backward(device):
    table = draw(24, device=device)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[k])
    inputs = training_inputs(square(24), device)
    optimiser = torch.optim.SGD([table, *inputs], lr=0.1)
    values = []
    for _ in range(3):
        optimiser.zero_grad()
        value = loss(attention, inputs)
        value.backward()
        optimiser.step()
        values.append(value.item())
    assert values[0] > values[1] > values[2]


def test_attention_of_attention(device):
    """Gradients pass through a stack, with one tensor as query, key and value."""
    attention = flexgen.compile(None, causal)
    inputs = training_inputs(square(20), device)

    def stacked(x, attend):
        return attend(*[attend(x, x, x)] * 3)

    def dense(query, key, value):
        score = (query @ key.mT * 0.25).masked_fill(torch.ones(20, 20, device=device).tril() == 0, -torch.inf)
        return torch.softmax(score, -1) @ value

    exact = leaf(inputs.query.detach().double())
    (expected,) = torch.autograd.grad(stacked(exact, dense).pow(2).sum(), exact)
    (grad,) = torch.autograd.grad(stacked(inputs.query, attention).pow(2).sum(), inputs.query)
    torch.testing.assert_close(grad.double(), expected, rtol=1e-4, atol=1e-5)


def test_captured_tensor_in_half_the_calls_requires_grad(device):
    table = torch.randn(24, device=device)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[k])
    inputs = training_inputs(square(24), device)
    plain = grads_of(attention, inputs)
    table.requires_grad_()
    grads = torch.autograd.grad(loss(attention, inputs), [*inputs, table])
    assert all(torch.equal(one, other) for one, other in zip(grads, plain, strict=False))
    assert grads[3].any()


def test_gradient_of_a_tensor_that_only_the_mask_reads_is_zero(device):
    threshold = draw(24, device=device)
    inputs = training_inputs(square(24), device)
    out = flexgen.compile(None, lambda b, h, q, k: threshold[k] > 0)(*inputs)
    grad = torch.autograd.grad(out.sum(), [*inputs, threshold], allow_unused=True)[3]
    assert grad is None or not grad.any()


def test_hooks_and_accumulation(device):
    inputs = training_inputs(square(20), device)
    seen = []
    inputs.query.register_hook(lambda grad: seen.append(grad.clone()))
    attention = flexgen.compile(None, causal)
    loss(attention, inputs).backward()
    loss(attention, inputs).backward()
    assert len(seen) == 2
    torch.testing.assert_close(inputs.query.grad, seen[0] + seen[1])


def test_small_problem_against_finite_differences():
    """torch's own gradcheck, in float64."""
    inputs = training_inputs(Shape(1, 2, 1, 5, 6), torch.device("cpu"), dtype=torch.float64, head_dim=3)
    table = leaf(torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))

    def attend(query, key, value, table):
        mod = lambda score, b, h, q, k: torch.tanh(score) * 2 + table[k] * score  # noqa: E731
        out, aux = flexgen.compile(mod, lambda b, h, q, k: q + 1 >= k)(
            query, key, value, return_aux=flexgen.AuxRequest(lse=True)
        )
        return out, aux.lse

    assert torch.autograd.gradcheck(attend, (*inputs, table), fast_mode=True)


def test_refused_mods_say_so_at_the_forward(device):
    inputs = training_inputs(square(16), device)
    refusal(
        lambda: flexgen.compile(lambda score, b, h, q, k: torch.special.bessel_j0(score))(*inputs),
        flexgen.UnsupportedOpError,
        "bessel_j0",
    )


def test_learned_bias_and_mask_together_match_after_many_lengths(device):
    """One Attention for lengths that come and go."""
    table = draw(64, device=device)
    score = learned(lambda t: lambda score, b, h, q, k: score + t[k], table)
    attention = flexgen.compile(score.mod, causal)
    for length in (5, 40, 17, 40):
        check_backward(training_inputs(square(length), device), score, causal, attention=attention)

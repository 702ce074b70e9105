"""Gradients of captured tensors: ranks, strides, dtypes, and many pairs that meet in one element."""

from __future__ import annotations

import pytest
import torch

import flexgen
from tests.backward.run import check_backward, draw, fixed, learned, training_inputs
from tests.corpus.case import Shape
from tests.forward.run import square

SHAPE = Shape(2, 4, 2, 33, 41)
TILES = {"BLOCK_M1": 16, "BLOCK_N1": 32, "BLOCK_M2": 32, "BLOCK_N2": 16}


def causal(b, h, q, k):
    return q >= k


def added(table, *axes):
    """Return a mod that adds the element of a table at some of b, h, q and k."""

    def mod(score, b, h, q, k):
        at = {"b": b, "h": h, "q": q, "k": k}
        return score + table[tuple(at[axis] for axis in axes)]

    return mod


SIZES = {"b": SHAPE.B, "h": SHAPE.Hq, "q": SHAPE.Lq, "k": SHAPE.Lk}
SUBSETS = ["b", "h", "q", "k", "bh", "bq", "bk", "hq", "hk", "qk", "bhq", "bhk", "bqk", "hqk", "bhqk"]


@pytest.mark.parametrize("axes", SUBSETS)
def test_table_over_any_axes(device, axes):
    table = draw(*(SIZES[axis] for axis in axes), device=device)
    check_backward(training_inputs(SHAPE, device), learned(lambda t: added(t, *axes), table), causal, options=TILES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_zero_dimensional_tensor(device, dtype):
    """A temperature that scales and shifts."""

    def make(t):
        return lambda score, b, h, q, k: score * t + t

    inputs = training_inputs(Shape(1, 2, 2, 16, 16), device, dtype=dtype)
    (*_, grad) = check_backward(inputs, learned(make, torch.tensor(0.7, device=device, requires_grad=True)))
    assert grad.shape == ()


def test_captured_and_unused(device):
    """A parameter that is read and dropped."""
    weights, used = draw(4, device=device), draw(4, seed=1, device=device)

    def mod(score, b, h, q, k):
        weights[h]
        return score * used[h]

    inputs = training_inputs(SHAPE, device)
    out = flexgen.compile(mod)(*inputs)
    grads = torch.autograd.grad(out.sum(), [*inputs, weights, used], allow_unused=True)
    assert grads[3] is None or not grads[3].any()
    assert grads[4].any()


def test_gradient_that_reaches_no_element(device):
    """The table's only use is a comparison: its gradient is zero, not missing."""

    def make(table):
        return lambda score, b, h, q, k: torch.where(table[h] > 0, score, score * 0.5)

    check_backward(training_inputs(SHAPE, device), learned(make, draw(4, device=device)))


@pytest.mark.parametrize("kind", ["bool", "int", "captured"])
def test_score_mod_that_does_not_read_the_score(device, kind):
    """The result is a bool, an int or a table's entry; query and key get zeros."""
    table = draw(41, device=device)
    mods = {
        "bool": fixed(lambda score, b, h, q, k: q >= k),
        "int": fixed(lambda score, b, h, q, k: k),
        "captured": learned(lambda t: lambda score, b, h, q, k: t[k], table),
    }
    inputs = training_inputs(SHAPE, device)
    grads = check_backward(inputs, mods[kind])
    assert not grads[0].any()
    assert not grads[1].any()
    assert grads[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_gradient_has_the_dtype_of_the_tensor(device, dtype):
    """Accumulated in float32, returned in the tensor's dtype."""
    inputs = training_inputs(SHAPE, device, dtype=torch.bfloat16)
    if dtype == torch.float64 and device.type == "cuda":
        pytest.skip("float64 tables are for the interpreter")
    bias = draw(41, dtype=dtype, device=device)
    (*_, grad) = check_backward(inputs, learned(lambda t: added(t, "k"), bias))
    assert grad.dtype == dtype


def test_narrow_gradient_is_accumulated_wide(device):
    """4000 pairs add about equal amounts to one element: a bfloat16 sum would stop growing."""
    inputs = training_inputs(Shape(2, 2, 2, 40, 25), device)
    bias = draw(1, dtype=torch.bfloat16, device=device)

    def make(t):
        return lambda score, b, h, q, k: score * t[0]

    check_backward(inputs, learned(make, bias))


# Many pairs in one element.


@pytest.mark.parametrize("tiles", [{}, TILES])
def test_relative_positions_head_scales_and_one_slot(device, tiles):
    """A table of 2S - 1 by distance, one of heads, and a constant slot; lanes past the lengths add nothing."""
    length = 50
    relative, heads, slot = draw(2 * length - 1, device=device), draw(3, seed=1, device=device), draw(2, device=device)

    def make(relative, heads, slot):
        return lambda score, b, h, q, k: score * heads[h] + relative[q - k + length - 1] + slot[0]

    grads = check_backward(
        training_inputs(Shape(2, 3, 3, length, length), device), learned(make, relative, heads, slot), options=tiles
    )
    assert not grads[-1][1]


def test_gather_through_an_index_table(device):
    buckets = torch.randint(0, 5, (33, 41), generator=torch.Generator().manual_seed(3)).to(device)
    table = draw(5, 4, device=device)
    make = lambda t: lambda score, b, h, q, k: score + t[buckets[q, k], h]  # noqa: E731
    check_backward(training_inputs(SHAPE, device), learned(make, table), causal)


def test_indices_out_of_reach_of_the_mask_add_nothing(device):
    """The mask forbids the key that lies past the table's end."""
    table = draw(31, device=device)
    mask = lambda b, h, q, k: (k < 31) & (q >= k)  # noqa: E731
    check_masked_table(training_inputs(square(32), device), table, mask)


def check_masked_table(inputs, table, mask):
    """The reference cannot index past the end: it reads the last entry there, where no gradient flows."""
    clamped = learned(lambda t: lambda score, b, h, q, k: score + t[k.clamp(max=30)], table)
    expected = check_backward(inputs, clamped, mask)
    attention = flexgen.compile(lambda score, b, h, q, k: score + table[k], mask)
    weights = torch.randn(1, 1, 32, 16, generator=torch.Generator().manual_seed(99)).to(table.device)
    found = torch.autograd.grad((attention(*inputs) * weights).sum(), [*inputs, table])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_negative_indices_count_from_the_end(device):
    table = draw(60, device=device)
    make = lambda t: lambda score, b, h, q, k: score + t[q - k] + t[-1]  # noqa: E731
    check_backward(training_inputs(SHAPE, device), learned(make, table))


def test_table_read_at_two_places(device):
    table = draw(41, device=device)
    make = lambda t: lambda score, b, h, q, k: score * t[k] + t[q] * t[k]  # noqa: E731
    check_backward(training_inputs(SHAPE, device), learned(make, table), causal, options=TILES)


def test_one_tensor_under_two_names(device):
    table = draw(41, device=device)

    def make(one):
        other = one
        return lambda score, b, h, q, k: score + one[k] - 0.3 * other[q]

    check_backward(training_inputs(SHAPE, device), learned(make, table))


def test_tensor_captured_by_score_and_mask(device):
    table = draw(41, device=device)
    mask = lambda b, h, q, k: table[k] > -0.5  # noqa: E731
    inputs = training_inputs(SHAPE, device)
    score = lambda score, b, h, q, k: score + table[k]  # noqa: E731
    check_backward(inputs, learned(lambda t: lambda s, b, h, q, k: s + t[k], table), mask)
    out = flexgen.compile(score, mask)(*inputs)
    assert torch.autograd.grad(out.sum(), table)[0].any()


@pytest.mark.parametrize("terms", [4, 64])
def test_dot_of_captured_rows(device, terms):
    """Score plus a sum of products of two captured rows."""
    shape = Shape(1, 4, 2, 9, 11)
    rows = draw(1, 4, 9, terms, device=device)
    columns = draw(1, 2, 11, terms, seed=1, device=device)

    def make(rows, columns):
        return lambda score, b, h, q, k: score + (rows[b, h, q] * columns[b, h // 2, k]).sum()

    check_backward(training_inputs(shape, device), learned(make, rows, columns))


# Views and strides.


VIEWS = {
    "sliced": ((90,), lambda t: t[3:44]),
    "stepped": ((82,), lambda t: t[::2]),
    "transposed": ((4, 41), lambda t: t.t()[:, 2]),
    "expanded": ((1,), lambda t: t.expand(41)),
    "flipped": ((41,), lambda t: t.flip(0)),
    "computed": ((41,), lambda t: t.sin() * 2),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_give_gradients_to_their_base(device, view):
    size, of = VIEWS[view]
    base = draw(*size, device=device)
    check_backward(training_inputs(SHAPE, device), learned(lambda t: added(of(t), "k"), base), causal)


def test_leaf_of_strange_strides(device):
    table = torch.randn(41, 8, device=device).t()[::2].requires_grad_()
    assert not table.is_contiguous()
    check_backward(training_inputs(SHAPE, device), learned(lambda t: added(t, "h", "k"), table), causal)


def test_expanded_leaf_gets_a_gradient_for_each_element(device):
    table = torch.randn(4, 1, device=device).expand(4, 41).detach().requires_grad_()
    (*_, grad) = check_backward(training_inputs(SHAPE, device), learned(lambda t: added(t, "h", "k"), table), causal)
    assert grad.shape == (4, 41)


class Bias(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.slope = torch.nn.Parameter(draw(4, device=device).detach())
        self.cap = torch.nn.Parameter(torch.tensor(3.0, device=device))

    def forward(self, score, b, h, q, k):
        return self.cap * torch.tanh((score + self.slope[h] * (q - k)) / self.cap)


def test_parameters_of_a_module(device):
    module = Bias(device)
    inputs = training_inputs(SHAPE, device)

    def make(slope, cap):
        return lambda score, b, h, q, k: cap * torch.tanh((score + slope[h] * (q - k)) / cap)

    expected = check_backward(inputs, learned(make, module.slope, module.cap), causal)
    weights = torch.randn(2, 4, 33, 16, generator=torch.Generator().manual_seed(99)).to(device)
    (flexgen.compile(module, causal)(*inputs) * weights).sum().backward()
    torch.testing.assert_close(module.slope.grad, expected[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(module.cap.grad, expected[4], rtol=1e-5, atol=1e-5)


# Derivatives that a formula gets wrong.


@pytest.mark.parametrize("table", [torch.zeros(41), torch.full((41,), -1.0)])
def test_relu_at_and_below_zero_has_no_slope(device, table):
    leaf = table.to(device).requires_grad_()
    make = lambda t: lambda score, b, h, q, k: score + torch.relu(t[k])  # noqa: E731
    (*_, grad) = check_backward(training_inputs(SHAPE, device), learned(make, leaf))
    assert not grad.any()

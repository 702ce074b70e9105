"""What a mod captures: scalars, tables, parameters; and what flexgen remembers of a mod between calls."""

from __future__ import annotations

import copy

import pytest
import torch

import flexgen
from tests.corpus.case import Shape
from tests.forward.run import check_forward, random_inputs, refusal, square


def draw(*size, device, seed=0, dtype=torch.float32):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scalar_tensor(device, dtype):
    inputs = random_inputs(square(16, heads=2), device, dtype=dtype)
    temperature = torch.tensor(0.7, device=device)
    check_forward(inputs, lambda score, b, h, q, k: score * temperature + temperature)


def test_scalar_tensor_that_requires_grad(device):
    inputs = random_inputs(square(16, heads=2), device)
    temperature = torch.tensor(0.7, device=device, requires_grad=True)
    with torch.no_grad():
        check_forward(inputs, lambda score, b, h, q, k: score * temperature + temperature)


def test_captured_but_unused_parameter(device):
    inputs = random_inputs(square(20, heads=2), device)
    weight = torch.nn.Parameter(draw(2, device=device))

    def mod(score, b, h, q, k):
        weight[h]
        return score

    with torch.no_grad():
        check_forward(inputs, mod)


def test_scores_that_are_no_floats(device):
    inputs = random_inputs(square(24), device)
    entries = draw(24, device=device)
    whole = torch.arange(24, device=device) % 5
    for mod in (
        lambda score, b, h, q, k: q >= k,
        lambda score, b, h, q, k: k,
        lambda score, b, h, q, k: entries[k],
        lambda score, b, h, q, k: whole[k],
        lambda score, b, h, q, k: torch.ones_like(score, dtype=torch.bool),
    ):
        check_forward(inputs, mod)


@pytest.mark.parametrize("table_dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8])
def test_table_of_another_dtype_than_the_inputs(device, table_dtype):
    inputs = random_inputs(square(40), device, dtype=torch.bfloat16)
    bias = (3 * draw(40, device=device)).abs().to(table_dtype)
    check_forward(inputs, lambda score, b, h, q, k: score + bias[k])


def test_relative_table_head_scale_and_constant_slot(device):
    length = 100
    inputs = random_inputs(square(length, batch=2, heads=3), device)
    relative, scale = draw(2 * length - 1, device=device), draw(3, device=device, seed=1)
    check_forward(inputs, lambda score, b, h, q, k: score + relative[q - k + length - 1])
    check_forward(inputs, lambda score, b, h, q, k: score * scale[h] + relative[0])


def test_one_tensor_captured_under_two_names(device):
    inputs = random_inputs(square(20), device)
    row = draw(20, device=device)
    column = row
    check_forward(inputs, lambda score, b, h, q, k: score + row[q] * column[k])


@pytest.mark.parametrize("terms", [1, 4, 64])
def test_dot_of_captured_rows(device, terms):
    shape = Shape(1, 2, 1, 18, 20)
    inputs = random_inputs(shape, device)
    query_rows = draw(1, 2, shape.Lq, terms, device=device, seed=1)
    key_rows = draw(1, 1, shape.Lk, terms, device=device, seed=2)

    def mod(score, b, h, q, k):
        return score + (query_rows[b, h, q] * key_rows[b, h // 2, k]).sum(-1)

    check_forward(inputs, mod)


def test_dot_of_too_many_terms_is_refused_with_its_size(device):
    inputs = random_inputs(square(16), device)
    rows = draw(16, 300, device=device)

    def mod(score, b, h, q, k):
        return score + (rows[q] * rows[k]).sum(-1)

    error = refusal(lambda: flexgen.compile(mod)(*inputs), flexgen.UnsupportedOpError, "300")
    assert ".sum(-1)" in str(error)


def test_two_mods_in_turn(device):
    inputs = random_inputs(square(24), device)
    table = draw(24, device=device)
    doubled = lambda score, b, h, q, k: score * 2  # noqa: E731
    biased = lambda score, b, h, q, k: score + table[k]  # noqa: E731
    first = check_forward(inputs, doubled)
    check_forward(inputs, biased)
    assert torch.equal(check_forward(inputs, doubled), first)


def scaled_by(factor):
    return lambda score, b, h, q, k: score * factor


def windowed(width):
    return lambda b, h, q, k: (q - k).abs() < width


def test_one_source_with_different_captured_numbers(device):
    inputs = random_inputs(square(24), device)
    for factor in (1, 2, 2.5, -1.0, 0, True, 3):
        check_forward(inputs, scaled_by(factor))
    for width in (1, 2, 16, 17, 1000, 0):
        check_forward(inputs, mask_mod=windowed(width))


def test_one_source_with_different_operators(device):
    inputs = random_inputs(square(24), device)
    for operator in (torch.add, torch.sub, torch.mul, torch.maximum):
        check_forward(inputs, lambda score, b, h, q, k, operator=operator: operator(score, score * 0.5))


def test_attention_sees_a_changed_closure_cell(device):
    inputs = random_inputs(square(24), device)
    width, bias = 3, draw(24, device=device)

    def mod(score, b, h, q, k):
        return score + bias[k]

    def mask(b, h, q, k):
        return (q - k).abs() < width

    attention = flexgen.compile(mod, mask)
    for width, seed in [(3, 0), (7, 0), (7, 1), (1, 2), (30, 2)]:  # noqa: B007
        bias = draw(24, device=device, seed=seed)
        check_forward(inputs, mod, mask, attention=attention)
    bias.mul_(-2.0)
    check_forward(inputs, mod, mask, attention=attention)


class Shifted:
    def __init__(self, shift, table):
        self.shift = shift
        self.table = table

    def __call__(self, score, b, h, q, k):
        return score + self.table[k] * self.shift


def test_attention_sees_a_changed_attribute(device):
    inputs = random_inputs(square(24), device)
    mod = Shifted(1.0, draw(24, device=device))
    attention = flexgen.compile(mod)
    check_forward(inputs, mod, attention=attention)
    mod.shift = -2.0
    check_forward(inputs, mod, attention=attention)
    mod.table = draw(24, device=device, seed=9).to(torch.float16)
    check_forward(inputs, mod, attention=attention)
    mod.shift = 4  # a power of two: no rounding, in whatever dtype the product is taken
    check_forward(inputs, mod, attention=attention)


def test_captured_table_that_changes_its_strides(device):
    inputs = random_inputs(square(24), device)
    mod = Shifted(1.0, draw(24, device=device))
    attention = flexgen.compile(mod)
    check_forward(inputs, mod, attention=attention)
    mod.table = draw(72, device=device, seed=1)[::3]
    check_forward(inputs, mod, attention=attention)
    mod.table = draw(1, device=device, seed=2).expand(24)
    check_forward(inputs, mod, attention=attention)
    mod.table = draw(25, device=device, seed=3)[1:]
    check_forward(inputs, mod, attention=attention)


GLOBAL_WIDTH = 4


def test_attention_sees_a_changed_global(device, monkeypatch):
    def mask(b, h, q, k):
        return (q - k).abs() < GLOBAL_WIDTH

    inputs = random_inputs(square(24), device)
    attention = flexgen.compile(mask_mod=mask)
    check_forward(inputs, mask_mod=mask, attention=attention)
    monkeypatch.setitem(globals(), "GLOBAL_WIDTH", 9)
    check_forward(inputs, mask_mod=mask, attention=attention)


def test_copied_module_uses_its_own_parameter(device):
    class Bias(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(draw(24, device=device), requires_grad=False)

        def forward(self, score, b, h, q, k):
            return score + self.bias[k]

    inputs = random_inputs(square(24), device)
    module = Bias()
    check_forward(inputs, module.forward)
    copied = copy.deepcopy(module)
    copied.bias.mul_(3.0)
    check_forward(inputs, copied.forward)
    check_forward(inputs, module.forward)


class EqualToAll(Shifted):
    """Equal and unhashable, as a dataclass with equality is: flexgen must tell such mods apart by identity."""

    __hash__ = None

    def __eq__(self, other):
        return True


def test_equal_but_distinct_callables(device):
    inputs = random_inputs(square(24), device)
    for seed in (0, 1, 2):
        mod = EqualToAll(float(seed), draw(24, device=device, seed=seed))
        expected = check_forward(inputs, mod)
        assert torch.equal(flexgen.flex_attention(*inputs, score_mod=mod), expected)


def test_mods_without_source(device):
    inputs = random_inputs(square(24), device)
    scope = {"torch": torch}
    exec("def mod(score, b, h, q, k):\n    return torch.tanh(score) + (q - k) * 0.1", scope)
    check_forward(inputs, scope["mod"], eval("lambda b, h, q, k: q >= k"))


def test_captured_table_on_another_device_is_refused(device):
    table = torch.empty(24, device="meta")
    inputs = random_inputs(square(24), device)
    call = lambda: flexgen.compile(lambda score, b, h, q, k: score + table[k])(*inputs)  # noqa: E731
    refusal(call, flexgen.FlexgenError, "table", "meta")


def test_captured_large_integers_keep_all_bits(device):
    inputs = random_inputs(square(24), device)
    stamps = torch.arange(24, device=device) * (2**33) + 5
    border = 10 * 2**33 + 4
    check_forward(inputs, mask_mod=lambda b, h, q, k: (stamps[k] <= stamps[q]) & (stamps[k] > border - 2**34))


def test_infinite_and_huge_captured_floats(device):
    inputs = random_inputs(square(24), device)
    for bound in (float("inf"), 1e30, -1e30):
        check_forward(inputs, lambda score, b, h, q, k, bound=bound: score.clamp(max=bound) + q)

"""What a mod cannot hold is refused with the user's line, the reason and the fix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.errors import CaptureError, FlexgenError, UnsupportedOpError

Mod = Callable[..., object]
TABLE = torch.zeros(8)


def refuse(score_mod: Mod | None = None, mask_mod: Mod | None = None) -> FlexgenError:
    with pytest.raises(CaptureError) as caught:
        LiveMods(score_mod, mask_mod).current()
    return caught.value


BRANCHES: dict[str, tuple[Mod, str, str]] = {
    "if": (lambda b, h, q, k: True if q >= k else False, "if", "torch.where"),  # noqa: SIM210
    "and": (lambda b, h, q, k: (q >= k) and (k > 2), "and", "`&`"),
    "or": (lambda b, h, q, k: (q >= k) or (k > 2), "or", "`|`"),
    "not": (lambda b, h, q, k: not (q >= k), "not", "`~"),
    "in": (lambda b, h, q, k: q in (1, 2), "in", "(x == a) | (x == b)"),
    "chain": (lambda b, h, q, k: 0 <= q - k < 8, "chained", "(a <= x) & (x < b)"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_python_branch_on_a_traced_value_names_the_construct_and_the_fix(name: str) -> None:
    mod, construct, fix = BRANCHES[name]
    error = refuse(mask_mod=mod)
    assert construct in error.what
    assert fix in str(error.fix)
    assert error.where is not None
    assert error.where.file == __file__
    assert "lambda" in error.where.text


@pytest.mark.parametrize(
    ("mod", "text"),
    [
        (lambda s, b, h, q, k: s + int(q), "int(q)"),
        (lambda s, b, h, q, k: s + q.item(), "q.item()"),
        (lambda s, b, h, q, k: s + sum(range(k)), "range(k)"),
        (lambda s, b, h, q, k: s + TABLE[0].item(), "TABLE[0].item()"),
        (lambda s, b, h, q, k: print(s) or s, "print(s)"),
        (lambda s, b, h, q, k: TABLE.add_(1)[0] + s, "TABLE.add_(1)"),
        (lambda s, b, h, q, k: TABLE.__setitem__(0, s) or s, "TABLE.__setitem__(0, s)"),
        (lambda s, b, h, q, k: s + torch.rand(()), "torch.rand(())"),
        (lambda s, b, h, q, k: torch.atan(s), "torch.atan(s)"),
        (lambda s, b, h, q, k: TABLE.sort().values[q], "TABLE.sort()"),
        (lambda s, b, h, q, k: s + TABLE[q > k].sum(), "TABLE[q > k]"),
        (lambda s, b, h, q, k: s + TABLE[s], "TABLE[s]"),
        (lambda s, b, h, q, k: s.detach() + s, "s.detach()"),
        (lambda s, b, h, q, k: s + TABLE[9], "TABLE[9]"),
        (lambda s, b, h, q, k: s + 1 / 0, "1 / 0"),
        (lambda s, b, h, q, k: s + missing, "missing"),  # noqa: F821
    ],
)
def test_refused_expression_is_located(mod: Mod, text: str) -> None:
    error = refuse(mod)
    assert error.where is not None
    assert error.where.text[error.where.column : error.where.end_column] == text


def test_all_unsupported_operations_are_listed_at_once() -> None:
    error = refuse(lambda s, b, h, q, k: torch.atan(s) + torch.lgamma(s) + torch.atan(s))
    assert isinstance(error, UnsupportedOpError)
    assert len(error.problems) == 3
    assert "3 operations" in str(error)


def test_branch_after_an_unsupported_operation_reports_both() -> None:
    error = refuse(lambda s, b, h, q, k: s if torch.atan(s) > 0 else -s)
    assert isinstance(error, UnsupportedOpError)
    assert len(error.problems) == 2


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "None"),
        ((1, 2), "a tuple"),
        (torch.zeros(3), "a tensor of shape (3,)"),
        (1, "the number 1, not bool"),
        (torch.tensor(1.0), "torch.float32, not bool"),
    ],
)
def test_wrong_result_of_a_mask_is_named(returned: object, what: str) -> None:
    assert what in refuse(mask_mod=lambda b, h, q, k: returned).what


@pytest.mark.parametrize("mod", [lambda s, b, h, q: s, lambda b, h, q, k, x, y: q, 3])
def test_wrong_signature_is_named(mod: Mod) -> None:
    assert "score_mod" in refuse(mod).what


def test_error_in_a_nested_helper_is_located_in_the_helper() -> None:
    def helper(x):
        return bool(x > 1)

    error = refuse(lambda s, b, h, q, k: helper(q))
    assert error.where is not None
    assert error.where.text.strip() == "return bool(x > 1)"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_custom_autograd_function_is_refused_in_a_score_and_traced_in_a_mask() -> None:
    assert "_StraightThrough" in refuse(lambda s, b, h, q, k: _StraightThrough.apply(s)).what
    LiveMods(mask_mod=lambda b, h, q, k: _StraightThrough.apply(q / 2) > 1).current()


def test_stopped_gradient_is_refused_only_where_one_would_flow() -> None:
    weight = torch.zeros(8, requires_grad=True)
    assert "gradient" in refuse(lambda s, b, h, q, k: s + weight.detach()[q]).what
    LiveMods(lambda s, b, h, q, k: s + TABLE.detach()[q] + q.detach()).current()

    def no_grad(score, b, h, q_idx, kv_idx):
        with torch.no_grad():
            return score + weight[q_idx]

    assert "gradient" in refuse(no_grad).what


def test_outer_no_grad_changes_nothing() -> None:
    weight = torch.zeros(8, requires_grad=True)
    with torch.no_grad():
        assert LiveMods(lambda s, b, h, q, k: s + weight[q]).current().buffers[0] is weight


def test_mod_without_source_degrades_to_an_error_without_a_line() -> None:
    namespace: dict[str, Mod] = {}
    exec("def mod(b, h, q, k):\n    return q >= k and k > 2", namespace)
    assert "truth" in refuse(mask_mod=namespace["mod"]).what


def test_mask_gets_no_score_and_complex_tables_are_refused() -> None:
    table = torch.zeros(8, dtype=torch.complex64)
    assert "complex64" in refuse(lambda s, b, h, q, k: s + table[q].real).what


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_captured_nested_tensor_is_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)], layout=layout)
    error = refuse(lambda score, b, h, q, k: score + nested[b, k])
    assert "`nested` is a nested tensor" in error.what
    assert ".values()" in str(error.fix)

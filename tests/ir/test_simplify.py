"""The simplifier's rules, one line each, and that all of them keep every bit."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from flexgen.errors import InternalError, SourceSpan
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Mods, Node, const, input_node, make
from flexgen.ir.identities import IDENTITIES
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.parse import parse_graph, parse_mods
from flexgen.ir.patterns import Call, Literal, Pattern, Variable, parse_rule
from flexgen.ir.ranges import Ranges
from flexgen.ir.rule import Rule
from flexgen.ir.rules import RULES
from flexgen.ir.simplify import Simplified, simplify
from tests.ir import random_graphs

HEADER = (
    "score mod(score, b, h, q_idx, kv_idx)"
    "  buffers: flag bool[*](1), ids int32[*](1), small int8[*](1), half float16[*](1)"
    "  scalars: n int64, x float32"
)
I32, I8, F16, CONDITION = "load(ids, n)", "load(small, n)", "load(half, n)", "load(flag, kv_idx)"
X, Y = "load(ids, q_idx)", "load(ids, kv_idx)"  # 32-bit integers of any value

ONE_LINERS = [
    ("constant folding", "add(1.5, mul(2.0, 0.25))", "2.0"),
    ("constant folding", "add(0.1, 0.2)", "0.3"),
    ("constant folding", "floordiv(-7, 2)", "-4"),
    ("constant folding", "mod(-7, 3)", "2"),
    ("constant folding", "truncdiv(-7, 2)", "-3"),
    ("constant folding", "add(2147483647:int32, 1:int32)", "-2147483648:int32"),
    ("constant folding", "div(1.0, 0.0)", "inf"),
    ("constant folding", "neg(0.0)", "-0.0"),
    ("constant folding", "cast(cast(2.5, int64), float32)", "2.0"),
    ("constant folding", "shl(1, 5)", "32"),
    ("constant right", "mul(2.0, score)", "mul(score, 2.0)"),
    ("constant right", "lt(3, n)", "gt(n, 3)"),
    ("constant right", "max(0, n)", "max(n, 0)"),
    ("neutral element", "add(n, 0)", "n"),
    ("neutral element", "mul(score, 1.0)", "score"),
    ("neutral element", "add(score, -0.0)", "score"),
    ("neutral element", "sub(score, 0.0)", "score"),
    ("neutral element", "floordiv(n, 1)", "n"),
    ("neutral element", "and(n, -1)", "n"),
    ("neutral element", f"or({CONDITION}, False)", CONDITION),
    ("absorbing element", "mul(n, 0)", "0"),
    ("absorbing element", "mod(n, 1)", "0"),
    ("absorbing element", f"and(False, {CONDITION})", "False"),
    ("absorbing element", f"or({CONDITION}, True)", "True"),
    ("double negation", "neg(neg(score))", "score"),
    ("double negation", f"not(not({CONDITION}))", CONDITION),
    ("negation", "add(score, neg(x))", "sub(score, x)"),
    ("negation", "sub(0, n)", "neg(n)"),
    ("negation", "neg(mul(score, 2.0))", "mul(score, -2.0)"),
    ("same operands", "sub(n, n)", "0"),
    ("same operands", "sub(add(n, q_idx), q_idx)", "n"),
    ("same operands", f"and({CONDITION}, {CONDITION})", CONDITION),
    ("same operands", "min(score, score)", "score"),
    ("self comparison", "le(n, n)", "True"),
    ("self comparison", "lt(score, score)", "False"),
    ("complement", f"and({CONDITION}, not({CONDITION}))", "False"),
    ("absorption", f"or({CONDITION}, and(gt(n, 1), {CONDITION}))", CONDITION),
    ("absorption", f"and({CONDITION}, and(gt(n, 1), {CONDITION}))", f"and({CONDITION}, gt(n, 1))"),
    ("inverse comparison", "not(lt(n, q_idx))", "ge(n, q_idx)"),
    ("inverse comparison", "not(eq(score, x))", "ne(score, x)"),
    ("compare with bool", f"eq({CONDITION}, False)", f"not({CONDITION})"),
    ("select by constant", "where(lt(q_idx, 0), add(q_idx, n), q_idx)", "q_idx"),
    ("select of equals", f"where({CONDITION}, n, n)", "n"),
    ("select by negation", f"where(not({CONDITION}), score, x)", f"where({CONDITION}, x, score)"),
    ("select in select", f"where({CONDITION}, where({CONDITION}, n, 1), 2)", f"where({CONDITION}, n, 2)"),
    ("select of bools", f"where({CONDITION}, gt(n, 1), False)", f"and({CONDITION}, gt(n, 1))"),
    ("join constants", "add(add(n, 3), 4)", "add(n, 7)"),
    ("join constants", "sub(add(n, 3), 4)", "sub(n, 1)"),
    ("join constants", "mul(mul(n, 3), 4)", "mul(n, 12)"),
    ("quotient and remainder", "sub(n, mod(n, 8))", "mul(floordiv(n, 8), 8)"),
    ("quotient and remainder", "add(mod(n, 8), mul(floordiv(n, 8), 8))", "n"),
    ("absolute value", "abs(neg(score))", "abs(score)"),
    ("power", "pow(score, 2.0)", "mul(score, score)"),
    ("power", "pow(score, 0.5)", "sqrt(score)"),
    ("exact reciprocal", "div(score, 8.0)", "mul(score, 0.125)"),
    ("positive offset", "add(n, -3)", "sub(n, 3)"),
    ("decided comparison", "ge(q_idx, 0)", "True"),
    ("decided comparison", "lt(kv_idx, 0)", "False"),
    ("decided comparison", "lt(mod(n, 4), 4)", "True"),
    ("decided bound", "max(q_idx, -1)", "q_idx"),
    ("same offset", "ge(add(q_idx, 3), add(kv_idx, 3))", "ge(q_idx, kv_idx)"),
    ("same offset", "le(sub(q_idx, 3), 5)", "le(q_idx, 8)"),
    ("nested quotient", "floordiv(floordiv(n, 4), 8)", "floordiv(n, 32)"),
    ("nested remainder", "mod(mod(n, 12), 4)", "mod(n, 4)"),
    ("divided multiple", "floordiv(mul(q_idx, 12), 4)", "mul(q_idx, 3)"),
    ("divided multiple", "mod(mul(q_idx, 12), 4)", "0"),
    ("small dividend", "floordiv(mod(n, 8), 8)", "0"),
    ("small dividend", "mod(mod(n, 8), 16)", "mod(n, 8)"),
    ("flooring division", "truncdiv(q_idx, 4)", "floordiv(q_idx, 4)"),
    ("non-negative", "abs(q_idx)", "q_idx"),
    ("whole number", "floor(cast(n, float32))", "cast(n, float32)"),
    ("same cast", "cast(score, float32)", "score"),
    ("cast of cast", "cast(cast(q_idx, int32), int64)", "q_idx"),
    ("cast of cast", f"cast(cast({I32}, int64), float32)", f"cast({I32}, float32)"),
    ("cast of cast", "cast(cast(n, int32), int8)", "cast(n, int8)"),
    ("cast of choice", f"cast(where({CONDITION}, 1, 0), float32)", f"where({CONDITION}, 1.0, 0.0)"),
    ("compared choice", f"ne(where({CONDITION}, 1, 0), 0)", CONDITION),
    ("compared casts", f"eq(cast({I32}, int64), cast({X}, int64))", f"eq({I32}, {X})"),
    ("compared casts", f"gt(cast({I32}, int64), 5)", f"gt({I32}, 5:int32)"),
    ("compared casts", f"ne(cast({CONDITION}, int64), 0)", CONDITION),
]

UNTOUCHED = [
    "add(score, 0.0)",  # -0.0 + 0.0 is 0.0
    "mul(score, 0.0)",  # NaN, infinities, -0.0
    "sub(score, score)",
    "eq(score, score)",  # False for NaN
    "not(lt(score, x))",  # True for NaN, where ge is False
    "neg(sub(score, x))",  # 0.0 - 0.0 is 0.0 both ways round
    "add(add(score, 1.0), 2.0)",
    "div(score, 3.0)",
    "div(score, 5e-324)",
    "div(score, 1.1479437019748901e-41)",  # a power of two whose reciprocal overflows float32
    "min(score, x)",
    "ge(add(n, 3), add(q_idx, 3))",  # n + 3 may wrap
    f"le(sub({X}, 3:int32), 5:int32)",
    "floordiv(mul(n, 4), 4)",
    "floordiv(n, 0)",
    "floordiv(5, 0)",
    "truncdiv(n, 4)",
    "shr(q_idx, 4)",
    "and(q_idx, 15)",
    "where(lt(sub(q_idx, 3), 0), add(sub(q_idx, 3), n), sub(q_idx, 3))",
    f"lt(cast({I32}, int64), 0)",
    "abs(n)",
    f"cast(cast({F16}, float32), int32)",  # what overflows differs between dtypes
    "cast(cast(n, int32), int64)",
    f"cast(cast({I8}, float32), uint8)",
    "cast(cast(score, float16), float32)",
    f"gt(cast({I32}, float64), 0.5:float64)",
]


def _mods(expression: str) -> Mods:
    """Return mods that compute the expression where no rule can look at it from outside."""
    root = parse_graph(f"{HEADER} return {expression}").root
    if root.dtype == torch.bool:
        root = make("cast", root, dtype=torch.float32)
    elif not root.dtype.is_floating_point:
        root = make("load", root, attr="half", dtype=torch.float16)
    return Mods(score=_declared(root))


def _declared(root: Node) -> Graph:
    header = parse_graph(f"{HEADER} return score")
    text_names = {str(node.attr) for node in Graph("score", "mod", root).nodes() if node.op in ("load", "scalar")}
    buffers = tuple(buffer for buffer in header.buffers if buffer.name in text_names)
    return Graph("score", "mod", root, buffers, tuple(scalar for scalar in header.scalars if scalar.name in text_names))


@pytest.mark.parametrize(("rule", "before", "after"), ONE_LINERS)
def test_rule_rewrites(rule: str, before: str, after: str) -> None:
    simplified = simplify(_mods(before))
    expected = simplify(_mods(after))  # it is final, but for a constant that folds with what `_mods` put around it
    assert simplified.mods == expected.mods
    assert rule in dict(simplified.fired)
    if after not in ("True", "False"):
        assert expected.fired == ()


@pytest.mark.parametrize(("rule", "before", "after"), ONE_LINERS)
def test_rewritten_expression_keeps_every_bit(rule: str, before: str, after: str) -> None:
    graph = parse_graph(f"{HEADER} return {before}")  # the expression itself, with no wrapper that could hide bits
    result = parse_graph(f"{HEADER} return {after}")
    awkward = random_graphs.awkward_arguments()
    buffers = {
        **{"flag": awkward.buffers["flag"], "ids": awkward.buffers["ids"]},
        **{"small": torch.tensor([-128, 0, 127], dtype=torch.int8), "half": torch.tensor([-0.0, 2.0]).half()},
    }
    for n in random_graphs.INTEGERS:
        old, new = (evaluate(g, awkward.inputs, buffers, {"n": n, "x": -0.0}) for g in (graph, result))
        assert random_graphs.same_bits(old, new), n


@pytest.mark.parametrize("expression", UNTOUCHED)
def test_expression_stays_as_it_is(expression: str) -> None:
    mods = _mods(expression)
    assert simplify(mods).mods == mods


def test_every_rule_has_a_one_liner() -> None:
    assert {rule.name for rule in RULES} == {name for name, _, _ in ONE_LINERS}


def _instances(pattern: Call, dtype: torch.dtype) -> list[Node]:
    """Return the pattern over `dtype` with every small choice of awkward constants for its capital letters."""
    capitals = sorted({letter for letter in _letters(pattern) if letter.isupper()})
    choices = random_graphs.constants(dtype)
    return [_instance(pattern, dtype, dict(zip(capitals, values, strict=True)))
            for values in itertools.islice(itertools.product(choices, repeat=len(capitals)), 120)]  # fmt: skip


def _letters(pattern: Pattern) -> set[str]:
    match pattern:
        case Variable(letter):
            return {letter}
        case Call(_, args):
            return set().union(*(_letters(arg) for arg in args))
    return set()


def _instance(pattern: Pattern, dtype: torch.dtype, constants: dict[str, Node]) -> Node:
    match pattern:
        case Literal(value):
            return const(abs(value) if dtype == torch.uint8 else value, dtype)
        case Variable(letter):
            return constants.get(letter) or _any_value(letter, torch.bool if letter == "c" else dtype)
        case Call(op, args):
            dtypes = [torch.bool if op == "where" and index == 0 else dtype for index in range(len(args))]
            nodes = [_instance(arg, own, constants) for arg, own in zip(args, dtypes, strict=True)]
            compares = op in ("eq", "ne", "lt", "le", "gt", "ge")
            return make(op, *nodes, dtype=torch.bool if compares else nodes[-1].dtype)


def _any_value(letter: str, dtype: torch.dtype) -> Node:
    row = const("xyzc".index(letter), torch.int64)
    return make("load", row, input_node("q_idx"), attr="values", dtype=dtype)


def _awkward_values(dtype: torch.dtype) -> torch.Tensor:
    """Return [4, n] values, each row in another order."""
    values = torch.tensor([node.attr for node in random_graphs.constants(dtype)], dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    return torch.stack([values.repeat(6)[torch.randperm(6 * len(values), generator=generator)] for _ in "xyzc"])


def _evaluate_on_awkward_values(root: Node, dtype: torch.dtype) -> torch.Tensor:
    """Evaluate loads of `values` in the dtype of each load."""
    values = {dtype: _awkward_values(dtype), torch.bool: _awkward_values(torch.bool)}
    nodes = list(Graph("mask", "m", root).nodes())
    renamed: dict[Node, Node] = {}
    for node in nodes:
        attr = f"values_{node.dtype}" if node.op == "load" else node.attr
        renamed[node] = make(node.op, *(renamed[arg] for arg in node.args), attr=attr, dtype=node.dtype)
    columns = max(value.shape[1] for value in values.values())
    buffers = {f"values_{key}": value for key, value in values.items()}
    return evaluate(Graph("mask", "m", renamed[root]), {"q_idx": torch.arange(columns)}, buffers, {})


@pytest.mark.parametrize("rule", IDENTITIES, ids=lambda rule: f"{rule.name}: {rule.text}")
def test_identity_keeps_every_bit(rule: Rule) -> None:
    assert rule.text is not None
    pattern, _ = parse_rule(rule.text)
    applied = 0
    for dtype in random_graphs.DTYPES:
        for before in filter(random_graphs.is_well_typed, _instances(pattern, dtype)):
            after = rule.rewrite(before, Ranges())
            if after is not None:
                applied += 1
                old, new = (_evaluate_on_awkward_values(root, dtype) for root in (before, after))
                assert random_graphs.same_bits(old, new), (before, after)
    assert applied, "the identity applies to no dtype"


@settings(max_examples=300, deadline=None)
@given(random_graphs.mods(exact=True))
def test_simplified_mods_keep_every_bit(mods: Mods) -> None:
    simplified = simplify(mods).mods
    arguments = random_graphs.awkward_arguments()
    for before, after in zip(mods.graphs(), simplified.graphs(), strict=True):
        old, new = (evaluate(g, arguments.inputs, arguments.buffers, arguments.scalars) for g in (before, after))
        assert random_graphs.same_bits(old, new)


@settings(max_examples=50, deadline=None)
@given(random_graphs.mods())
def test_simplifying_twice_changes_nothing(mods: Mods) -> None:
    once = simplify(mods)
    assert simplify(once.mods) == Simplified(once.mods, Origins(), ())


@pytest.mark.parametrize(
    "mode", [FakeTensorMode(), torch.device("meta"), torch.inference_mode()], ids=["fake", "meta", "inference"]
)
def test_constants_fold_under_any_mode_of_the_caller(mode: AbstractContextManager[object]) -> None:
    mods = parse_mods("score m(score) return add(score, mul(0.7, div(1.0, 0.123)))")
    with mode:
        folded = simplify(mods).mods
    assert folded == parse_mods("score m(score) return add(score, 5.6910567)")


def test_captures_that_are_no_longer_used_are_no_longer_declared() -> None:
    text = f"{HEADER.split('  buffers')[0]} buffers: ids int32[*](1) scalars: n int64 "
    mods = parse_mods(text + "return add(score, cast(mul(load(ids, n), 0:int32), float32))")
    graph = simplify(mods).mods.score
    assert graph is not None and (graph.buffers, graph.scalars) == ((), ())


def _origin(variable: str | None, line: int) -> Origin:
    return Origin(variable, SourceSpan("mods.py", line, 0, line, 5, f"line {line}"))


def test_a_replacement_carries_the_origins_of_what_it_replaces() -> None:
    mods = parse_mods("mask m(b, h, q_idx, kv_idx) return not(gt(kv_idx, q_idx))")
    root = mods.graphs()[0].root
    origins = Origins({root: (_origin("causal", 2),), root.args[0]: (_origin("future", 1),)})
    simplified = simplify(mods, origins)
    new_root = simplified.mods.graphs()[0].root
    assert simplified.origins.table == {new_root: (_origin("causal", 2),)}


def test_a_value_that_absorbs_another_keeps_its_own_name_first() -> None:
    mods = parse_mods("mask m(b, h, q_idx, kv_idx) return and(ge(q_idx, kv_idx), ge(q_idx, 0))")
    root = mods.graphs()[0].root
    origins = Origins({root: (_origin("both", 3),), root.args[0]: (_origin("causal", 1),)})
    simplified = simplify(mods, origins)
    assert simplified.origins.of(simplified.mods.graphs()[0].root) == (_origin("causal", 1), _origin("both", 3))


def test_a_node_inside_a_replacement_has_its_place_but_not_its_name() -> None:
    mods = parse_mods("mask m(b, h, q_idx, kv_idx) return lt(kv_idx, sub(q_idx, mod(q_idx, 8)))")
    start = mods.graphs()[0].root.args[1]
    simplified = simplify(mods, Origins({start: (_origin("start", 1),)}))
    product = simplified.mods.graphs()[0].root.args[1]
    assert simplified.origins.variable(product) == "start"
    assert simplified.origins.variable(product.args[0]) is None
    assert simplified.origins.span(product.args[0]) == _origin("start", 1).span


def test_ten_thousand_nested_operations_need_no_recursion() -> None:
    node = input_node("q_idx")
    for number in range(10_000):
        node = make("add" if number % 2 else "mul", node, const(3, torch.int64), dtype=torch.int64)
    root = make("gt", node, const(5, torch.int64), dtype=torch.bool)
    assert simplify(Mods(mask=Graph("mask", "deep", root))).mods.mask is not None


def test_mods_that_break_the_rules_of_the_ir_are_refused() -> None:
    with pytest.raises(InternalError, match="root of a mask is bool"):
        simplify(Mods(mask=Graph("mask", "m", input_node("q_idx"))))

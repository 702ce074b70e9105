"""Masks and score mods drawn from a grammar, on drawn shapes and tiles, against float64."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.corpus.case import Shape, random_ints, random_values
from tests.forward.run import check_forward, random_inputs

Positions = tuple[Tensor, Tensor, Tensor, Tensor]  # b, h, q_idx, kv_idx
TABLE_LENGTH = 24
INT_TABLE = random_ints(-8, 40, TABLE_LENGTH, seed=41, device=torch.device("cpu"))
BOOL_TABLE = random_ints(0, 2, TABLE_LENGTH, TABLE_LENGTH, seed=42, device=torch.device("cpu")) == 1
FLOAT_TABLE = random_values(TABLE_LENGTH, seed=43, device=torch.device("cpu"))


@dataclass(frozen=True, slots=True)
class Term:
    """An expression: its text for the reader of a failure, and its value at a position."""

    text: str
    at: Callable[..., Tensor]

    def __repr__(self) -> str:
        return self.text


def leaf(name: str, place: int) -> Term:
    return Term(name, lambda *positions: positions[place])


def number(value: int) -> Term:
    return Term(str(value), lambda b, h, q, k: q * 0 + value)


def unary(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Term], Term]:
    return lambda x: Term(f"{name}({x})", lambda *p: function(x.at(*p)))


def binary(name: str, function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[tuple[Term, Term]], Term]:
    return lambda pair: Term(f"({pair[0]} {name} {pair[1]})", lambda *p: function(pair[0].at(*p), pair[1].at(*p)))


def by_constant(name: str, function: Callable[[Tensor, int], Tensor]) -> Callable[[tuple[Term, int]], Term]:
    return lambda pair: Term(f"({pair[0]} {name} {pair[1]})", lambda *p: function(pair[0].at(*p), pair[1]))


def select(parts: tuple[Term, Term, Term]) -> Term:
    condition, left, right = parts
    text = f"where({condition}, {left}, {right})"
    return Term(text, lambda *p: torch.where(condition.at(*p), left.at(*p), right.at(*p)))


def lookup(table: Tensor, name: str) -> Callable[[Term], Term]:
    return lambda x: Term(f"{name}[{x} % {TABLE_LENGTH}]", lambda *p: table[x.at(*p) % TABLE_LENGTH])


def lookup_2d(pair: tuple[Term, Term]) -> Term:
    row, column = pair
    text = f"bools[{row} % {TABLE_LENGTH}, {column} % {TABLE_LENGTH}]"
    return Term(text, lambda *p: BOOL_TABLE[row.at(*p) % TABLE_LENGTH, column.at(*p) % TABLE_LENGTH])


INDICES = [leaf(name, place) for place, name in enumerate(("b", "h", "q", "k"))]
COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
EQUALITIES = {"==": operator.eq, "!=": operator.ne}


def compared(ints: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    pairs = st.tuples(ints, ints)
    ordered = st.one_of(*(pairs.map(binary(name, function)) for name, function in COMPARISONS.items()))
    return st.one_of(ordered, ordered, *(pairs.map(binary(name, function)) for name, function in EQUALITIES.items()))


def wider_ints(ints: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    pairs = st.tuples(ints, ints)
    factors, divisors = st.integers(-3, 3), st.sampled_from([-7, -2, 1, 2, 3, 5, 8, 16])
    return st.one_of(
        pairs.map(binary("+", operator.add)),
        pairs.map(binary("-", operator.sub)),
        st.tuples(ints, factors).map(by_constant("*", operator.mul)),
        st.tuples(ints, divisors).map(by_constant("//", operator.floordiv)),
        st.tuples(ints, divisors).map(by_constant("%", operator.mod)),
        st.tuples(ints, st.integers(0, 2)).map(by_constant(">>", operator.rshift)),
        ints.map(unary("abs", torch.abs)),
        pairs.map(binary("min", torch.minimum)),
        pairs.map(binary("max", torch.maximum)),
        ints.map(lookup(INT_TABLE, "ints")),
        st.tuples(compared(ints), ints, ints).map(select),
    )


QUERY_OR_KEY = st.sampled_from(INDICES[2:])
INTS = st.recursive(
    st.one_of(QUERY_OR_KEY, QUERY_OR_KEY, st.sampled_from(INDICES), st.integers(-20, 40).map(number)),
    wider_ints,
    max_leaves=5,
)


def wider_bools(bools: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    pairs = st.tuples(bools, bools)
    return st.one_of(
        pairs.map(binary("&", operator.and_)),
        pairs.map(binary("|", operator.or_)),
        pairs.map(binary("^", operator.xor)),
        bools.map(unary("~", operator.invert)),
    )


MASK_TERMS = st.recursive(
    st.one_of(compared(INTS), compared(INTS), st.tuples(INTS, INTS).map(lookup_2d)), wider_bools, max_leaves=5
)


def mask_of(term: Term) -> Callable[..., Tensor]:
    def mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return term.at(b, h, q, k)

    return mask


def score_of(steps: list[tuple[str, Term]]) -> Callable[..., Tensor]:
    """Return a score mod that applies steps in turn, each with an integer or bool term of the indices."""

    def mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for kind, term in steps:
            score = STEPS[kind](score, term.at(b, h, q, k))
        return score

    return mod


STEPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "bias": lambda score, term: score + 0.05 * term,
    "table": lambda score, term: score + FLOAT_TABLE[term % TABLE_LENGTH],
    "scale": lambda score, term: score * (1 + term % 4) / 2,
    "softcap": lambda score, term: 3 * torch.tanh(score / 3),
    "hide": lambda score, term: torch.where(term % 3 == 1, float("-inf"), score),
    "wrapped": lambda score, term: score - FLOAT_TABLE[term % 7 - 7],
    "sigmoid": lambda score, term: torch.sigmoid(score) * term.sign(),
    "clamp": lambda score, term: score.clamp(-2, 2),
}
SCORE_STEPS = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), INTS), min_size=1, max_size=3)
SHAPES = st.builds(
    lambda batch, heads, group, q_len, kv_len: Shape(batch, heads * group, heads, q_len, kv_len),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    group=st.integers(1, 3),
    q_len=st.integers(1, 50),
    kv_len=st.integers(1, 70),
)
TILES = st.sampled_from([{}, {"BLOCK_M": 16, "BLOCK_N": 16}, {"BLOCK_M": 32, "BLOCK_N": 16}, {"BLOCK_N": 64}])

everyday = settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
thorough = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def check_mask(mask: Term, shape: Shape, tiles: dict[str, int]) -> None:
    note(f"mask: {mask}")
    check_forward(random_inputs(shape, torch.device("cpu")), mask_mod=mask_of(mask), options=tiles)


def check_score(steps: list[tuple[str, Term]], mask: Term | None, shape: Shape, tiles: dict[str, int]) -> None:
    note(f"score: {steps}; mask: {mask}")
    mask_mod = None if mask is None else mask_of(mask)
    check_forward(random_inputs(shape, torch.device("cpu")), score_of(steps), mask_mod, options=tiles)


@everyday
@given(MASK_TERMS, SHAPES, TILES)
def test_drawn_masks(mask, shape, tiles):
    check_mask(mask, shape, tiles)


@everyday
@given(SCORE_STEPS, st.none() | MASK_TERMS, SHAPES, TILES)
def test_drawn_score_mods(steps, mask, shape, tiles):
    check_score(steps, mask, shape, tiles)


@pytest.mark.slow
@thorough
@given(MASK_TERMS, SHAPES, TILES)
def test_many_drawn_masks(mask, shape, tiles):
    check_mask(mask, shape, tiles)


@pytest.mark.slow
@thorough
@given(SCORE_STEPS, st.none() | MASK_TERMS, SHAPES, TILES)
def test_many_drawn_score_mods(steps, mask, shape, tiles):
    check_score(steps, mask, shape, tiles)

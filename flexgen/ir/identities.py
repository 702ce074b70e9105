"""The simplifier's table of identities. Each keeps every value to the last bit.

Floating-point identities hold for NaN, infinities and both zeros; integer ones hold modulo 2**bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flexgen.ir.dtypes import is_integer
from flexgen.ir.graph import Node
from flexgen.ir.patterns import Bindings, Call, Pattern, build, match, parse_rule
from flexgen.ir.ranges import Ranges
from flexgen.ir.rule import Rule

Domain = Callable[[torch.dtype], bool]


def _any(dtype: torch.dtype) -> bool:
    return True


def _bool(dtype: torch.dtype) -> bool:
    return dtype == torch.bool


def _exact(dtype: torch.dtype) -> bool:
    """Bool and integers: no NaN, one zero."""
    return not dtype.is_floating_point


def _signed(dtype: torch.dtype) -> bool:
    return dtype.is_signed


def _wide(dtype: torch.dtype) -> bool:
    """The dtypes in which `pow` is defined by its exact special cases."""
    return dtype in (torch.float32, torch.float64)


def _identities(name: str, domain: Domain, *texts: str) -> Iterator[Rule]:
    """Yield rules that hold where `domain` accepts the dtype of `x` (of the result, if the rule has no `x`)."""
    for text in texts:
        pattern, replacement = parse_rule(text)
        yield Rule(name, frozenset({pattern.op}), _identity(domain, pattern, replacement), text)


def _identity(domain: Domain, pattern: Call, replacement: Pattern) -> Callable[[Node, Ranges], Node | None]:
    def rewrite(node: Node, _: Ranges) -> Node | None:
        for bound in match(pattern, node, {}):
            if domain(bound.get("x", node).dtype) and _divides(bound):
                return build(replacement, bound, node.dtype)
        return None

    return rewrite


def _divides(bound: Bindings) -> bool:
    """In the table `N` is a constant other than zero."""
    return "N" not in bound or bound["N"].attr != 0


IDENTITIES = (
    *_identities("neutral element", _any, "mul(x, 1) -> x", "div(x, 1) -> x", "pow(x, 1) -> x"),
    *_identities("neutral element", _any, "add(x, -0.0) -> x", "sub(x, 0.0) -> x"),
    *_identities("neutral element", is_integer, "add(x, 0) -> x", "sub(x, 0) -> x", "shl(x, 0) -> x", "shr(x, 0) -> x"),
    *_identities("neutral element", is_integer, "floordiv(x, 1) -> x", "truncdiv(x, 1) -> x"),
    *_identities("neutral element", is_integer, "and(x, -1) -> x"),
    *_identities("neutral element", _exact, "or(x, 0) -> x", "xor(x, 0) -> x"),
    *_identities("neutral element", _bool, "and(x, 1) -> x"),
    *_identities("absorbing element", is_integer, "mul(x, 0) -> 0", "mod(x, 1) -> 0", "fmod(x, 1) -> 0"),
    *_identities("absorbing element", is_integer, "or(x, -1) -> -1"),
    *_identities("absorbing element", _exact, "and(x, 0) -> 0"),
    *_identities("absorbing element", _bool, "or(x, 1) -> 1"),
    *_identities("double negation", _any, "neg(neg(x)) -> x", "not(not(x)) -> x"),
    *_identities("negation", _bool, "xor(x, 1) -> not(x)"),
    *_identities("negation", is_integer, "xor(x, -1) -> not(x)", "sub(0, x) -> neg(x)", "neg(sub(x, y)) -> sub(y, x)"),
    *_identities("negation", _any, "mul(x, -1) -> neg(x)", "div(x, -1) -> neg(x)", "sub(-0.0, x) -> neg(x)"),
    *_identities("negation", _any, "add(x, neg(y)) -> sub(x, y)", "sub(x, neg(y)) -> add(x, y)"),
    *_identities("negation", _any, "mul(neg(x), neg(y)) -> mul(x, y)", "mul(neg(x), C) -> mul(x, neg(C))"),
    *_identities("negation", _any, "neg(mul(x, C)) -> mul(x, neg(C))", "div(neg(x), C) -> div(x, neg(C))"),
    *_identities("same operands", is_integer, "sub(x, x) -> 0", "sub(x, sub(x, y)) -> y"),
    *_identities("same operands", is_integer, "sub(add(x, y), y) -> x", "add(sub(x, y), y) -> x"),
    *_identities("same operands", _exact, "and(x, x) -> x", "or(x, x) -> x", "xor(x, x) -> 0"),
    *_identities("same operands", _any, "min(x, x) -> x", "max(x, x) -> x"),
    *_identities("self comparison", _any, "lt(x, x) -> 0", "gt(x, x) -> 0"),
    *_identities("self comparison", _exact, "eq(x, x) -> 1", "le(x, x) -> 1", "ge(x, x) -> 1", "ne(x, x) -> 0"),
    *_identities("complement", _exact, "and(x, not(x)) -> 0"),
    *_identities("complement", _bool, "or(x, not(x)) -> 1", "xor(x, not(x)) -> 1"),
    *_identities("absorption", _exact, "and(x, or(x, y)) -> x", "or(x, and(x, y)) -> x"),
    *_identities("absorption", _exact, "and(x, and(x, y)) -> and(x, y)", "or(x, or(x, y)) -> or(x, y)"),
    *_identities("absorption", is_integer, "min(x, max(x, y)) -> x", "max(x, min(x, y)) -> x"),
    *_identities("inverse comparison", _any, "not(eq(x, y)) -> ne(x, y)", "not(ne(x, y)) -> eq(x, y)"),
    *_identities("inverse comparison", _exact, "not(lt(x, y)) -> ge(x, y)", "not(le(x, y)) -> gt(x, y)"),
    *_identities("inverse comparison", _exact, "not(gt(x, y)) -> le(x, y)", "not(ge(x, y)) -> lt(x, y)"),
    *_identities("constant right", _any, "lt(C, x) -> gt(x, C)", "le(C, x) -> ge(x, C)"),
    *_identities("constant right", _any, "gt(C, x) -> lt(x, C)", "ge(C, x) -> le(x, C)"),
    *_identities(
        "compare with bool", _bool, "eq(x, 1) -> x", "ne(x, 0) -> x", "eq(x, 0) -> not(x)", "ne(x, 1) -> not(x)"
    ),
    *_identities("select by constant", _any, "where(1, x, y) -> x", "where(0, x, y) -> y"),
    *_identities("select of equals", _any, "where(c, x, x) -> x"),
    *_identities("select by negation", _any, "where(not(c), x, y) -> where(c, y, x)"),
    *_identities("select in select", _any, "where(c, where(c, x, y), z) -> where(c, x, z)"),
    *_identities("select in select", _any, "where(c, x, where(c, y, z)) -> where(c, x, z)"),
    *_identities("select of bools", _bool, "where(c, 1, 0) -> c", "where(c, 0, 1) -> not(c)"),
    *_identities("select of bools", _bool, "where(c, x, 0) -> and(c, x)", "where(c, 1, x) -> or(c, x)"),
    *_identities("select of bools", _bool, "where(c, 0, x) -> and(not(c), x)", "where(c, x, 1) -> or(not(c), x)"),
    *_identities("join constants", is_integer, "add(add(x, C), D) -> add(x, add(C, D))"),
    *_identities("join constants", is_integer, "sub(add(x, C), D) -> add(x, sub(C, D))"),
    *_identities("join constants", is_integer, "add(sub(x, C), D) -> add(x, sub(D, C))"),
    *_identities("join constants", is_integer, "sub(sub(x, C), D) -> sub(x, add(C, D))"),
    *_identities("join constants", is_integer, "add(sub(C, x), D) -> sub(add(C, D), x)"),
    *_identities("join constants", is_integer, "sub(sub(C, x), D) -> sub(sub(C, D), x)"),
    *_identities("join constants", is_integer, "sub(C, add(x, D)) -> sub(sub(C, D), x)"),
    *_identities("join constants", is_integer, "sub(C, sub(x, D)) -> sub(add(C, D), x)"),
    *_identities("join constants", is_integer, "sub(C, sub(D, x)) -> add(x, sub(C, D))"),
    *_identities("join constants", is_integer, "mul(mul(x, C), D) -> mul(x, mul(C, D))"),
    *_identities(
        "join constants", _exact, "and(and(x, C), D) -> and(x, and(C, D))", "or(or(x, C), D) -> or(x, or(C, D))"
    ),
    *_identities("join constants", is_integer, "min(min(x, C), D) -> min(x, min(C, D))"),
    *_identities("join constants", is_integer, "max(max(x, C), D) -> max(x, max(C, D))"),
    *_identities("quotient and remainder", is_integer, "sub(x, mod(x, N)) -> mul(floordiv(x, N), N)"),
    *_identities("quotient and remainder", is_integer, "add(mul(floordiv(x, N), N), mod(x, N)) -> x"),
    *_identities("absolute value", _any, "abs(abs(x)) -> abs(x)"),
    *_identities("absolute value", _signed, "abs(neg(x)) -> abs(x)"),
    *_identities("power", _any, "pow(x, 2) -> mul(x, x)", "pow(x, -1) -> div(1, x)", "pow(x, 0.0) -> 1"),
    *_identities(
        "power", _wide, "pow(x, 3) -> mul(mul(x, x), x)", "pow(x, 0.5) -> sqrt(x)", "pow(x, -0.5) -> rsqrt(x)"
    ),
)

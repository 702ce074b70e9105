"""The Triton dialect: dtypes, and one spelling a row for each IR op, for GPUs and for the interpreter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from flexgen.codegen.expression import Expression, Precedence, binary, call, method, negate

# dtype -> name in triton.language
TYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "int1",
    torch.uint8: "uint8",
    torch.uint16: "uint16",
    torch.uint32: "uint32",
    torch.uint64: "uint64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
}


# dtype -> pointer element in a launch signature
SIGNATURE_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}


def pointer_type(dtype: torch.dtype) -> str:
    """Return the signature type of a pointer to `dtype`."""
    return f"*{SIGNATURE_NAMES[dtype]}"


@dataclass(frozen=True, slots=True)
class Operand:
    """A printed argument: its expression, the dtype it is computed in, whether it is provably >= 0, or a literal."""

    expression: Expression
    dtype: torch.dtype
    non_negative: bool
    is_literal: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """A way to spell ops.

    Attributes:
        hardware: libdevice and inline assembly may be used; the interpreter has neither.
        fast_tanh: tanh by the hardware's approximation.
    """

    hardware: bool
    fast_tanh: bool = False


@dataclass(slots=True)
class Spelled:
    """An expression and the prelude functions and imports that it needs."""

    expression: Expression
    prelude: tuple[str, ...] = ()
    libdevice: bool = field(default=False)


def type_name(dtype: torch.dtype) -> str:
    """Return `tl.<name>` of a dtype."""
    return f"tl.{TYPE_NAMES[dtype]}"


Speller = Callable[[Dialect, torch.dtype, list[Operand]], Spelled]


def _infix(operator: str, precedence: Precedence) -> Speller:
    def spell(_: Dialect, __: torch.dtype, args: list[Operand]) -> Spelled:
        return Spelled(binary(operator, precedence, args[0].expression, args[1].expression))

    return spell


def _function(name: str) -> Speller:
    def spell(_: Dialect, __: torch.dtype, args: list[Operand]) -> Spelled:
        return Spelled(call(name, *(arg.expression for arg in args)))

    return spell


def _prelude(name: str) -> Speller:
    def spell(_: Dialect, __: torch.dtype, args: list[Operand]) -> Spelled:
        return Spelled(call(name, *(arg.expression for arg in args)), prelude=(name,))

    return spell


def _libdevice(name: str, portable: str) -> Speller:
    def spell(dialect: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
        if dialect.hardware:
            return Spelled(call(f"libdevice.{name}", *(arg.expression for arg in args)), libdevice=True)
        return _prelude(portable)(dialect, dtype, args)

    return spell


def _floor_division(operator: str, helper: str, float_helper: str) -> Speller:
    """Spell Python's // and %: Triton's own round toward zero, which is the same where both are non-negative."""

    def spell(dialect: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
        if dtype.is_floating_point:
            return _prelude(float_helper)(dialect, dtype, args)
        if all(arg.non_negative for arg in args):
            return _infix(operator, Precedence.MULTIPLY)(dialect, dtype, args)
        return _prelude(helper)(dialect, dtype, args)

    return spell


def _extremum(name: str) -> Speller:
    def spell(_: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
        nan = ("propagate_nan=tl.PropagateNan.ALL",) if dtype.is_floating_point else ()
        return Spelled(call(f"tl.{name}", *(_in_full(arg, dtype) for arg in args), *nan))

    return spell


def _where(_: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
    condition, *choices = args
    literal_alone = all(choice.is_literal for choice in choices)  # then nothing else says in which dtype
    texts = [_in_full(choice, dtype) if literal_alone else choice.expression for choice in choices]
    return Spelled(call("tl.where", condition.expression, *texts))


def _in_full(arg: Operand, dtype: torch.dtype) -> Expression:
    """Return an argument of a function that takes a literal for a float32, where the operation is in float64."""
    if arg.is_literal and dtype == torch.float64:
        return call("tl.full", "()", arg.expression, type_name(dtype))
    return arg.expression


def _tanh(dialect: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
    if dialect.fast_tanh and dtype == torch.float32:
        return _prelude("tanh_approx")(dialect, dtype, args)
    return _libdevice("tanh", "tanh")(dialect, dtype, args)


def _trunc_division(_: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
    if dtype.is_floating_point:
        return Spelled(
            call("truncate", binary("/", Precedence.MULTIPLY, args[0].expression, args[1].expression)), ("truncate",)
        )
    return Spelled(binary("//", Precedence.MULTIPLY, args[0].expression, args[1].expression))


def _cast(_: Dialect, dtype: torch.dtype, args: list[Operand]) -> Spelled:
    source = args[0]
    if dtype == torch.bool:
        return Spelled(binary("!=", Precedence.COMPARE, source.expression, Expression("0")))
    return Spelled(method(source.expression, f"to({type_name(dtype)})"))


def _negate(_: Dialect, __: torch.dtype, args: list[Operand]) -> Spelled:
    return Spelled(negate(args[0].expression))


def _not(_: Dialect, __: torch.dtype, args: list[Operand]) -> Spelled:
    return Spelled(negate(args[0].expression, "~"))


SPELLINGS: Mapping[str, Speller] = {
    "add": _infix("+", Precedence.ADD),
    "sub": _infix("-", Precedence.ADD),
    "mul": _infix("*", Precedence.MULTIPLY),
    "div": _infix("/", Precedence.MULTIPLY),
    "floordiv": _floor_division("//", "floor_div", "float_floor_div"),
    "truncdiv": _trunc_division,
    "mod": _floor_division("%", "floor_mod", "float_floor_mod"),
    "fmod": _infix("%", Precedence.MULTIPLY),
    "neg": _negate,
    "abs": _function("tl.abs"),
    "sign": _prelude("sign"),
    "min": _extremum("minimum"),
    "max": _extremum("maximum"),
    "pow": _libdevice("pow", "power"),
    "sqrt": _function("tl.sqrt"),
    "rsqrt": _function("tl.rsqrt"),
    "exp": _function("tl.exp"),
    "exp2": _function("tl.exp2"),
    "expm1": _libdevice("expm1", "expm1"),
    "log": _function("tl.log"),
    "log2": _function("tl.log2"),
    "log1p": _libdevice("log1p", "log1p"),
    "sin": _function("tl.sin"),
    "cos": _function("tl.cos"),
    "tanh": _tanh,
    "sigmoid": _function("tl.sigmoid"),
    "erf": _function("tl.erf"),
    "floor": _function("tl.floor"),
    "ceil": _function("tl.ceil"),
    "trunc": _prelude("truncate"),
    "round": _libdevice("rint", "round_half_even"),
    "eq": _infix("==", Precedence.COMPARE),
    "ne": _infix("!=", Precedence.COMPARE),
    "lt": _infix("<", Precedence.COMPARE),
    "le": _infix("<=", Precedence.COMPARE),
    "gt": _infix(">", Precedence.COMPARE),
    "ge": _infix(">=", Precedence.COMPARE),
    "and": _infix("&", Precedence.AND),
    "or": _infix("|", Precedence.OR),
    "xor": _infix("^", Precedence.XOR),
    "not": _not,
    "shl": _infix("<<", Precedence.SHIFT),
    "shr": _infix(">>", Precedence.SHIFT),
    "where": _where,
    "cast": _cast,
}

# Ops that the printer spells itself: they need names and layouts that only it knows.
PRINTED_BY_PRINTER = frozenset({"input", "const", "scalar", "load"})


def literal(value: float | int | bool) -> Expression:
    """Return a constant's text, exact and valid inside a kernel."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return Expression(f'float("{value}")')
    text = repr(value)
    return Expression(text, Precedence.UNARY if text.startswith("-") else Precedence.ATOM)

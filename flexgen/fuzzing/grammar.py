"""The statements of drawn mods: templates over values of three kinds, which cover the whole op table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["i", "f", "b"]  # an integer, a floating number, a bool


@dataclass(frozen=True, slots=True)
class Statement:
    """One way to compute a value.

    Attributes:
        kind: of the result.
        template: Python with a hole {0}, {1}, ... for each operand.
        operands: the kind of each: i, f or b for a value; or a constant: n any whole number, d a divisor, s a shift, x
            a floating number.
    """

    kind: Kind
    template: str
    operands: str


def _rows(kind: Kind, operands: str, *templates: str) -> tuple[Statement, ...]:
    return tuple(Statement(kind, template, operands) for template in templates)


INTEGERS = (
    *_rows("i", "ii", "{0} + {1}", "{0} - {1}", "torch.minimum({0}, {1})", "torch.maximum({0}, {1})"),
    *_rows("i", "ii", "{0} * {1}", "{0} & {1}", "{0} | {1}", "{0} ^ {1}"),
    *_rows("i", "in", "{0} + {1}", "{0} - {1}", "{1} - {0}", "{0} * {1}", "{0}.clamp(min={1})", "{0}.clamp(max={1})"),
    *_rows("i", "id", "{0} // {1}", "{0} % {1}", "torch.fmod({0}, {1})"),
    *_rows("i", "id", 'torch.div({0}, {1}, rounding_mode="trunc")', 'torch.div({0}, {1}, rounding_mode="floor")'),
    *_rows("i", "ii", "{0} // ({1}.abs() + 1)", "{0} % ({1}.abs() + 1)", "torch.fmod({0}, {1} * {1} + 1)"),
    *_rows("i", "i", "-{0}", "{0}.abs()", "torch.sign({0})", "~{0}", "{0} ** 2"),
    *_rows("i", "is", "{0} << {1}", "{0} >> {1}"),
    *_rows("i", "i", "{0}.to(torch.int32)", "{0}.to(torch.int8)", "{0}.to(torch.uint8)", "{0}.to(torch.int16)"),
    *_rows("i", "bii", "torch.where({0}, {1}, {2})"),
    *_rows("i", "b", "{0}.long()", "{0}.to(torch.int32)"),
    *_rows("i", "f", "torch.where({0} == {0}, {0}, 0.0).clamp(-99, 99).long()"),
    *_rows("i", "i", "2 ** ({0} % 20)"),
)
BOOLS = (
    *_rows("b", "ii", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}"),
    *_rows("b", "in", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}"),
    *_rows("b", "ff", "{0} < {1}", "{0} <= {1}", "{0} > {1}", "{0} >= {1}"),
    *_rows("b", "fx", "{0} < {1}", "{0} >= {1}", "{0} == {1}", "{0} != {1}"),
    *_rows("b", "bb", "{0} & {1}", "{0} | {1}", "{0} ^ {1}", "{0} == {1}", "{0} <= {1}", "torch.logical_and({0}, {1})"),
    *_rows("b", "b", "~{0}", "torch.logical_not({0})"),
    *_rows("b", "bbb", "torch.where({0}, {1}, {2})"),
    *_rows("b", "i", "{0}.bool()"),
    *_rows("b", "f", "torch.isnan({0})", "torch.isfinite({0})"),
)
FLOATS = (
    *_rows("f", "ff", "{0} + {1}", "{0} - {1}", "{0} * {1}", "{0} / ({1}.abs() + 0.5)", "{0} / {1}"),
    *_rows("f", "ff", "torch.minimum({0}, {1})", "torch.maximum({0}, {1})", "torch.fmin({0}, {1})"),
    *_rows("f", "ff", "torch.fmod({0}, {1}.abs() + 0.5)", "torch.remainder({0}, {1}.abs() + 0.5)"),
    *_rows("f", "ff", "{0} // ({1}.abs() + 0.5)", "torch.pow({0}.abs() + 0.1, {1}.clamp(-2, 2))"),
    *_rows("f", "fx", "{0} + {1}", "{0} * {1}", "{1} - {0}", "{0} % 0.7", "{0}.clamp(max={1})", "{0} / {1}"),
    *_rows("f", "fi", "{0} + {1}", "{0} * {1}", "{0} - 0.05 * {1}", "{0} / ({1} * {1} + 1)"),
    *_rows("f", "f", "-{0}", "{0}.abs()", "torch.sign({0})", "torch.floor({0})", "torch.ceil({0})", "torch.trunc({0})"),
    *_rows("f", "f", "torch.round({0})", "{0} ** 2", "{0} ** 3", "{0}.square()", "torch.relu({0})"),
    *_rows("f", "f", "torch.sqrt({0}.abs())", "torch.sqrt({0}.abs() + 0.1)", "torch.rsqrt({0}.abs() + 0.1)"),
    *_rows("f", "f", "torch.exp({0}.clamp(max=4))", "torch.exp2({0}.clamp(max=4))", "torch.expm1({0}.clamp(max=4))"),
    *_rows("f", "f", "torch.log({0}.abs() + 0.1)", "torch.log2({0}.abs() + 0.1)", "torch.log1p({0}.abs())"),
    *_rows("f", "f", "torch.sin({0})", "torch.cos({0})", "torch.tanh({0})", "3 * torch.tanh({0} / 3)"),
    *_rows("f", "f", "torch.sigmoid({0})", "torch.erf({0})", "{0} ** 1.5", "({0}.abs() + 1) ** -0.5"),
    *_rows("f", "f", "{0}.half().float()", "{0}.to(torch.bfloat16)", "{0}.double()", "{0}.half()"),
    *_rows("f", "bff", "torch.where({0}, {1}, {2})"),
    *_rows("f", "bf", 'torch.where({0}, {1}, -float("inf"))', "{1}.masked_fill({0}, -1e4)", "{1} + {0}"),
    *_rows("f", "i", "{0}.float()", "{0} * 0.1", "{0} / 7", "torch.sqrt({0}.abs())"),
    *_rows("f", "b", "{0}.float()"),
)
# What masks are usually made of; t is an element of a table of integers at an index, of q_idx and of kv_idx in turn.
USUAL_MASKS = (
    *_rows("b", "", "q_idx >= kv_idx", "q_idx <= kv_idx"),
    *_rows("b", "n", "q_idx - kv_idx < {0}", "(q_idx - kv_idx).abs() <= {0}", "q_idx + {0} >= kv_idx", "kv_idx < {0}"),
    *_rows("b", "n", "(q_idx >= kv_idx) & (q_idx - kv_idx <= {0})", "(kv_idx < {0}) | (q_idx >= kv_idx)"),
    *_rows("b", "d", "q_idx // {0} == kv_idx // {0}", "(q_idx - kv_idx) % {0} == 0", "q_idx // {0} >= kv_idx // {0}"),
    *_rows("b", "dn", "(q_idx // {0} - kv_idx // {0}).abs() + (q_idx % {0} - kv_idx % {0}).abs() <= {1}"),
    *_rows(
        "b", "t", "{0[q_idx]} == {0[kv_idx]}", "{0[q_idx]} >= {0[kv_idx]}", "kv_idx < {0[q_idx]}", "kv_idx < {0[b]}"
    ),
    *_rows("b", "t", "(kv_idx < {0[h]}) & (q_idx >= kv_idx)", "{0[kv_idx]} > q_idx", "q_idx - kv_idx < {0[h]}"),
    *_rows("b", "tt", "({0[q_idx]} <= kv_idx) & (kv_idx < {1[q_idx]})", "kv_idx < {0[q_idx]} + {1[b]}"),
)
STATEMENTS: dict[Kind, tuple[Statement, ...]] = {"i": INTEGERS, "b": BOOLS, "f": FLOATS}

"""The text of a case: a small script that computes it and checks it, which is what runs while fuzzing, too."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator

from flexgen.fuzzing.cases import Case, DrawnCall, Placed
from flexgen.fuzzing.mods import CapturedTensor

LINE_LENGTH = 120


def script_of(case: Case, device: str = "cpu", told: str = "A case of `flexgen fuzz`.") -> str:
    """Return a module with one test, which passes where the case is right.

    Args:
        device: where it runs unless a caller says otherwise.
        told: the module's first line.
    """
    body = list(_captured(case))
    body += [line for text in (case.score_mod, case.mask_mod) if text for line in ("", *text.splitlines())]
    mods = [name if text else "None" for name, text in (("score_mod", case.score_mod), ("mask_mod", case.mask_mod))]
    body += ["", *_compiled(mods, dict(case.options))]
    for number, call in enumerate(case.calls):
        body += _numbers(case, number) if number else []
        body += _call(call, case.dtype)
    test = "\n".join([f'def test_case(device="{device}", check=check_call):', *_indented(body)])
    head = ["import torch", ""] if "torch." in test else []
    head += ["import flexgen", "from flexgen.fuzzing.check import check_call"]
    names = [name for name in ("drawn", "lengths", "offsets") if f"{name}(" in test]
    head.append(f"from flexgen.fuzzing.inputs import {', '.join(names)}")
    module = "\n".join(head)
    return f'"""{told}"""\n\n{module}\n\n\n{test}\n\n\nif __name__ == "__main__":\n    test_case()\n'


def _indented(lines: list[str]) -> Iterator[str]:
    while lines and not lines[0]:
        lines = lines[1:]
    for line in lines:
        yield textwrap.indent(line, "    ")


def _compiled(mods: list[str], options: dict[str, object]) -> list[str]:
    settings = [f"{_text(name)}: {_text(value)}" for name, value in options.items()]
    given = f", {{{', '.join(settings)}}}" if settings else ""
    line = f"attention = flexgen.compile({', '.join(mods)}{given})"
    if len(line) < LINE_LENGTH - 4:
        return [line]
    return ["options = {", *(f"    {setting}," for setting in settings), "}", line.replace(given, ", options")]


def _text(value: object) -> str:
    """Return a value as Python, strings in double quotes."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _captured(case: Case) -> Iterator[str]:
    for tensor in case.captures.tensors:
        yield f"{tensor.name} = {_drawn(tensor)}"
    yield from _numbers(case, 0)


def _numbers(case: Case, call: int) -> list[str]:
    return [f"{number.name} = {number.values[call]!r}" for number in case.captures.numbers]


def _drawn(tensor: CapturedTensor) -> str:
    extras = [f"low={tensor.low}, high={tensor.high}"] if tensor.kind == "i" else []
    extras += ["ascending=True"] * tensor.ascending + ["special=True"] * tensor.special
    extras += ["requires_grad=True"] * tensor.requires_grad
    first = (repr(tensor.shape), _text(tensor.dtype), str(tensor.seed), _text(tensor.layout))
    return f"drawn({', '.join([*first, *extras, 'device=device'])})"


def _call(call: DrawnCall, dtype: str) -> list[str]:
    lines = [""]
    kv_dtype = call.kv_dtype or dtype
    for name, placed, kind in (("q", call.query, dtype), ("k", call.key, kv_dtype), ("v", call.value, kv_dtype)):
        lines.append(f"{name} = {_input(placed, kind)}")
    extras = [f"scale={call.scale}"] * (call.scale is not None)
    if call.kv_lengths is not None:
        extras.append(f"kv_lengths=lengths({call.kv_lengths}, device=device)")
    if call.lengths is not None:
        starts = (f"offsets({lengths}, device=device)" for lengths in call.lengths)
        extras.append(f"cu_seqlens=({', '.join(starts)})")
    extras += ["backward=True"] * call.backward
    extras += [f"also=[{', '.join(map(_text, call.ways))}]"] * bool(call.ways)
    arguments = ["attention", "q", "k", "v", *extras]
    line = f"check({', '.join(arguments)})"
    return [*lines, line] if len(line) < LINE_LENGTH - 4 else [*lines, "check(", *(f"    {a}," for a in arguments), ")"]


def _input(placed: Placed, dtype: str) -> str:
    extras = [f"spread={placed.spread}"] * (placed.spread != 1.0) + ["requires_grad=True"] * placed.requires_grad
    parts = [repr(placed.shape), _text(dtype), str(placed.seed), _text(placed.layout), *extras, "device=device"]
    return f"drawn({', '.join(parts)})"

"""Names, source lines and paths of the user's, made to break out of emitted code: it means the same as without them."""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import flexgen

PAYLOAD = "__import__('builtins').flexgen_was_left = True"
HOSTILE = {
    "newline": f"x\n{PAYLOAD}\n",
    "carriage return": f"x\r{PAYLOAD}\r",
    "line separator": f"x\u2028{PAYLOAD}\u2028",
    "next line": f"x\x85{PAYLOAD}\x0c{PAYLOAD}\x1c",
    "end of a docstring": f'"""\n{PAYLOAD}\n"""',
    "end of another": f"'''\n{PAYLOAD}\n'''",
    "backslash": f'\\"""\\\n{PAYLOAD}\\',
    "trailing backslash": "x\\",
    "quotes": '"\'"\'"',
    "template": "{{ 1/0 }}{% raise %}{# x #}%s{0}$x",
    "nothing": "",
    "NUL": f"x\0{PAYLOAD}",
    "surrogate": "x\ud800",
    "right to left": "x\u202e\u2066 = 1",
    "keyword": "return",
    "statement": f"x; {PAYLOAD}; y",
    "comment": f"x # {PAYLOAD}",
    "type comment": "x  # type: ignore[int] # noqa",
    "coding": "# -*- coding: utf-7 -*-",
    "long": "x" * 20_000,
}
QUERY = torch.randn(1, 1, 20, 16, generator=torch.Generator().manual_seed(0))
TARGETS = ("sm_80", "sm_90")


@pytest.fixture(params=HOSTILE.values(), ids=HOSTILE)
def hostile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(builtins, "flexgen_was_left", False, raising=False)
    return request.param


def check(score_mod: Callable[..., Any], mask_mod: Callable[..., Any], plain: flexgen.Attention) -> None:
    """Run and lower mods, and compare with those that differ in their texts alone."""
    attention = flexgen.compile(score_mod, mask_mod)
    query = QUERY.clone().requires_grad_()
    output, expected = attention(query, QUERY, QUERY), plain(query, QUERY, QUERY)
    assert torch.equal(output, expected)
    found, wanted = (torch.autograd.grad(it.square().sum(), query)[0] for it in (output, expected))
    assert torch.equal(found, wanted)
    for target in TARGETS:
        tensors = [torch.empty(1, 1, 256, 64, dtype=torch.bfloat16, device="meta") for _ in range(3)]
        lowered, other = (it.lower(*tensors, target=target) for it in (attention, plain))
        for name, text in lowered.source.items():
            assert done_by(text) == done_by(other.source[name])
            assert "\r" not in text and text.isascii() and max(map(len, text.splitlines())) < 400
        assert lowered.explain()
    assert not builtins.flexgen_was_left  # type: ignore[attr-defined]


def done_by(text: str) -> tuple[int, list[str], Counter[str]]:
    """Return what a module does: how many statements it has at its top, what it imports, what it calls how often."""
    tree = ast.parse(text)
    imports = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    calls = Counter(func.attr if isinstance(func, ast.Attribute) else ast.unparse(func) for func in called)
    return len(tree.body), imports, calls


def mods(left: torch.Tensor, right: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, held: Any = (left, right)) -> Any:
        return score + held[0][q] * held[1][k]

    def mask_mod(b: Any, h: Any, q: Any, k: Any, held: Any = (left, right)) -> Any:
        return (held[0][q] + 2 > held[1][k]) & (q >= k)

    return score_mod, mask_mod


LEFT, RIGHT = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def plain() -> flexgen.Attention:
    return flexgen.compile(*mods(LEFT, RIGHT))


def test_names_of_mods(hostile: str, plain: flexgen.Attention) -> None:
    score_mod, mask_mod = mods(LEFT, RIGHT)
    for mod in (score_mod, mask_mod):
        mod.__name__ = mod.__qualname__ = hostile
    check(score_mod, mask_mod, plain)


def test_keys_of_dictionaries_and_attributes(hostile: str, plain: flexgen.Attention) -> None:
    held = {hostile: LEFT, hostile + "2": RIGHT}

    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        left, right = held.values()
        return score + left[q] * right[k]

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        left, right = held.values()
        return (left[q] + 2 > right[k]) & (q >= k)

    check(score_mod, mask_mod, plain)


def test_names_of_keywords(hostile: str, plain: flexgen.Attention) -> None:
    def score_mod(score: Any, b: Any, h: Any, q: Any, k: Any, **held: Any) -> Any:
        left, right = held.values()
        return score + left[q] * right[k]

    def mask_mod(b: Any, h: Any, q: Any, k: Any, **held: Any) -> Any:
        left, right = held.values()
        return (left[q] + 2 > right[k]) & (q >= k)

    named = {hostile: LEFT, hostile + "2": RIGHT}
    check(functools.partial(score_mod, **named), functools.partial(mask_mod, **named), plain)


SOURCE = """def make(left, right):
    def score_mod(score, b, h, q, k):
        return score + left[q] * right[k]
    def mask_mod(b, h, q, k):
        return (left[q] + 2 > right[k]) & (q >= k)
    return score_mod, mask_mod
"""


def made(path: str, shown: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return mods of a file that does not exist, whose lines Python shows as `shown`."""
    namespace: dict[str, Any] = {}
    exec(compile(SOURCE, path, "exec"), namespace)
    linecache.cache[path] = (len(shown), None, shown.splitlines(keepends=True), path)
    return namespace["make"](LEFT, RIGHT)


def test_paths_of_files(hostile: str, plain: flexgen.Attention) -> None:
    if "\0" in hostile or "\ud800" in hostile:
        pytest.skip("Python compiles no file of such a name")
    path = f"/nowhere/{hostile}.py"
    try:
        check(*made(path, SOURCE), plain)
    finally:
        linecache.cache.pop(path, None)


def test_lines_of_source(hostile: str, plain: flexgen.Attention) -> None:
    path = "/nowhere/lines.py"
    shown = "".join(line.replace("\n", f"  {hostile!s}\n") for line in SOURCE.splitlines(keepends=True))
    try:
        check(*made(path, shown), plain)
        lines = [f"{line.rstrip()}  # {hostile}\n" for line in SOURCE.splitlines()]
        linecache.cache[path] = (len(shown), None, lines, path)
        check(*made(path, SOURCE), plain)
    finally:
        linecache.cache.pop(path, None)


def test_a_comment_in_a_real_file(tmp_path: Path, plain: flexgen.Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "flexgen_was_left", False, raising=False)
    text = SOURCE.replace("right[k]\n", f"right[k]  # \u2028{PAYLOAD} \x0c{PAYLOAD} \x85{PAYLOAD}\n")
    path = tmp_path / 'mods \u2028 it\'s "quoted".py'
    path.write_text(text, encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), namespace)
    check(*namespace["make"](LEFT, RIGHT), plain)

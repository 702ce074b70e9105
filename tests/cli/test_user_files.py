"""How a user's file is loaded, how mods are found in it, and how its errors are told."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen.commands.file_spec import FileSpec, parse_file_spec
from flexgen.commands.user_file import UserFileError, load_user_file
from tests.cli.conftest import Run

Write = Callable[[str, str], Path]


def load(path: Path, *names: str) -> object:
    return load_user_file(FileSpec(path, names))


def test_file_spec_separates_names_from_the_path(tmp_path: Path) -> None:
    assert parse_file_spec("a/b.py") == FileSpec(Path("a/b.py"))
    assert parse_file_spec("b.py:mask") == FileSpec(Path("b.py"), ("mask",))
    assert parse_file_spec("b.py:score, mask") == FileSpec(Path("b.py"), ("score", "mask"))
    assert parse_file_spec("C:/b.py") == FileSpec(Path("C:/b.py"))
    odd = tmp_path / "a:b.py"
    odd.touch()
    assert parse_file_spec(str(odd)) == FileSpec(odd)


def test_names_are_told_apart_by_their_parameters(mods: Path) -> None:
    found = load_user_file(FileSpec(mods, ("causal", "softcap")))
    assert found.score_mod is not None and found.score_mod.__name__ == "softcap"
    assert found.mask_mod is not None and found.mask_mod.__name__ == "causal"
    assert found.shape == (1, 2, 2, 96, 96, 16, 16)


def test_an_attention_brings_its_mods_and_options(write: Write, run: Run) -> None:
    text = (
        "import flexgen\n"
        "attention = flexgen.compile(mask_mod=lambda b, h, q, k: q >= k, options={'BLOCK_M': 32, 'BLOCK_N': 32})\n"
    )
    path = write("attention.py", text)
    said = run("explain", path, "--set", "BLOCK_N=16")
    assert said.code == 0
    assert "BLOCK_M                = 32" in said.out and "BLOCK_N                = 16" in said.out
    assert run("explain", f"{path}:attention").code == 0


def test_a_file_imports_its_neighbours_and_is_not_main(write: Write) -> None:
    write("neighbour_of_mods.py", "WINDOW = 3\n")
    text = (
        "from neighbour_of_mods import WINDOW\n"
        "assert __name__ != '__main__'\n"
        "def mask_mod(b, h, q, k):\n    return q - k < WINDOW\n"
    )
    path = write("imports.py", text)
    before = list(sys.path)
    load(path)
    assert sys.path == before


@pytest.mark.parametrize(
    ("text", "what", "shown"),
    [
        ("x = 1\ndef f(:\n    pass\n", "does not parse", "broken.py:2:7\n      def f(:\n            ^"),
        (
            "import os\nimport missing_module\n",
            "No module named 'missing_module'",
            "broken.py:2:1\n      import missing",
        ),
        (
            "def f():\n    return 1 / 0\nf()\n",
            "ZeroDivisionError: division by zero",
            "broken.py:2:12\n      return 1 / 0",
        ),
        ("raise SystemExit(1)\n", "exits while it is loaded", "broken.py:1"),
        ("import flexgen\nflexgen.compile(options={'NO': 1})\n", "unknown option 'NO'", "broken.py:2:1"),
    ],
)
def test_errors_in_a_file_are_told_at_its_line(write: Write, run: Run, text: str, what: str, shown: str) -> None:
    said = run("explain", write("broken.py", text))
    assert said.code == 2 and said.out == ""
    assert what in said.err and shown in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "mods.py:softcap or "),
        (("softcp",), "did you mean"),
        (("factory",), "takes neither four nor five arguments"),
        (("any_arguments",), "takes both four and five arguments"),
        (("table",), "is not a function"),
        (("causal", "documents"), "names two of mask_mod"),
    ],
)
def test_names_that_are_no_mods_are_refused(mods: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserFileError, match=message):
        load(mods, *names)


def test_a_missing_file_is_told_the_nearest(mods: Path) -> None:
    with pytest.raises(UserFileError, match=r"nearest name in that directory is mods\.py"):
        load(mods.with_name("mod.py"))


def test_a_malformed_shape_is_refused(write: Write, run: Run) -> None:
    said = run("explain", write("odd.py", "SHAPE = (1, 2)\ndef mask_mod(b, h, q, k):\n    return q >= k\n"))
    assert said.code == 2 and "SHAPE of" in said.err and "(1, 2)" in said.err


def test_a_mod_that_cannot_be_captured_is_told_at_its_line(mods: Path, run: Run) -> None:
    said = run("explain", f"{mods}:branches")
    assert said.code == 2 and "return True if q_idx >= kv_idx else False" in said.err and "torch.where" in said.err

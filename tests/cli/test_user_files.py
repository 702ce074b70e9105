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


MASK = "def mask_mod(b, h, q, k):\n    return q >= k\n"
UNREADABLE = "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError('no text')\n"


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("import torch\nmask_mod = torch.ones(4, 4)\n", ["mask_mod of odd.py is Tensor, not a function"]),
        ("score_mod = 5\n", ["score_mod of odd.py is int, not a function"]),
        ("class Stop(BaseException): pass\nraise Stop('enough')\n", ["Stop: enough", "odd.py:2:1"]),
        (UNREADABLE + "raise Odd\n", ["does not load: Odd", "odd.py:4:1"]),
        (UNREADABLE + "def score_mod(s, b, h, q, k):\n    raise Odd\n", ["score_mod raised Odd", "odd.py:5:5"]),
        (b"# coding: klingon\n", ["odd.py does not parse: unknown encoding"]),
        (f"SHAPE = (1, 2, 2, -64, 64, 16, 16)\n{MASK}", ["SHAPE of odd.py is (1, 2, 2, -64", "none is negative"]),
        (f"SHAPE = (1, 2, 2, 2**70, 64, 16, 16)\n{MASK}", ["SHAPE of odd.py is", "tensors can be made"]),
    ],
)
def test_what_is_odd_in_a_file_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run, text: str | bytes, messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    said = run("explain", "odd.py", "--target", "sm_80")
    assert said.code == 2 and said.out == ""
    assert all(message in said.err for message in messages)
    assert ":0:" not in said.err and "Traceback" not in said.err


@pytest.mark.parametrize(
    "text",
    [
        "class Mask:\n    __len__ = lambda self: 0\n    __call__ = lambda _, b, h, q, k: q >= k\nmask_mod = Mask()\n",
        f"def __getattr__(name):\n    raise RuntimeError(name)\n{MASK}",
        f"import torch\ntorch.set_default_device('meta')\n{MASK}",
    ],
    ids=["a callable of length 0", "a module that refuses attributes", "a default device"],
)
def test_what_is_odd_in_a_file_does_not_matter(write: Write, run: Run, text: str) -> None:
    said = run("explain", write("odd.py", text), "--target", "sm_80", "--shape", "1,2,2,64,64,16,16")
    assert said.code == 0 and "[0, q_idx + 1)" in said.out


def test_a_method_of_a_class_is_no_mod(write: Write) -> None:
    path = write("methods.py", "class Mods:\n    def causal(self, b, h, q, k): return q >= k\nmods = Mods()\n")
    with pytest.raises(UserFileError, match="is a method, and of no object"):
        load(path, "Mods.causal")
    assert load(path, "mods.causal")


def test_a_link_to_no_file_is_told(tmp_path: Path) -> None:
    link = tmp_path / "link.py"
    link.symlink_to("nowhere.py")
    with pytest.raises(UserFileError, match="a link that leads to no file"):
        load(link)


def test_of_a_very_long_line_the_place_is_shown(write: Write, run: Run) -> None:
    terms = " + ".join(f"q * {number}" for number in range(500))
    text = f"def score_mod(s, b, h, q, k):\n    return s + {terms} + float(k) + {terms}\n"
    said = run("explain", write("long.py", text), "--target", "sm_80")
    line, carets = said.err.splitlines()[2:4]
    assert said.code == 2 and len(line) < 200
    assert line[carets.index("^") : carets.rindex("^") + 1] == "float(k)"


@pytest.mark.parametrize("shape", ["1,2,2,99999999999,64,16,16", "1,2,2,2147483647,64,16,16,", "2147483647," * 6 + "1"])
def test_a_shape_that_cannot_be_is_refused(write: Write, run: Run, shape: str) -> None:
    said = run("explain", write("mods.py", MASK), "--shape", shape)
    assert said.code == 2 and "is not a shape" in said.err


def test_too_little_memory_is_no_bug(write: Write, run: Run) -> None:
    said = run("explain", write("mods.py", MASK), "--target", "sm_80", "--shape", f"1,1,1,{10**9},{10**9},16,16")
    assert said.code == 2 and "too little memory" in said.err and "smaller --shape" in said.err

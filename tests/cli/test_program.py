"""The program as a whole: help, version, usage errors, exit codes, and how errors are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen import __version__, cli
from flexgen.cli import COMMANDS
from flexgen.commands import explain
from flexgen.errors import InternalError
from tests.cli.conftest import Run


def test_help_names_every_command(run: Run) -> None:
    said = run("--help")
    assert said.code == 0
    assert all(f"\n    {name}" in said.out for name in COMMANDS)
    assert said.out == run().out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples_and_fits_the_screen(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run(command, "--help")
    assert said.code == 0
    assert f"  flexgen {command} " in said.out.partition("examples:")[2]
    assert max(map(len, said.out.splitlines())) <= 100


def test_version(run: Run) -> None:
    assert run("--version").out == f"flexgen {__version__}\n"


def test_misspelt_command_is_told_the_nearest(run: Run) -> None:
    said = run("complie", "x.py")
    assert said.code == 2 and "did you mean compile?" in said.err and said.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "1,2,3"], "'1,2,3' is not a shape: give 7 numbers B,Hq,Hkv,Lq,Lk,Dqk,Dv"),
        (["--dtype", "int8"], "'int8' is not a dtype: choose one of bf16, fp16, fp32, fp64"),
        (["--set", "BLOCK_M"], "'BLOCK_M' is not NAME=VALUE"),
        (["--targt", "sm_80"], "unrecognized arguments: --targt"),
    ],
)
def test_usage_errors_say_what_is_accepted(run: Run, causal: Path, arguments: list[str], message: str) -> None:
    said = run("compile", causal, *arguments)
    assert said.code == 2 and message in said.err and "see flexgen" in said.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "BLOCK_MM=64"], "did you mean 'BLOCK_M'?"),
        (["--set", "num_warps=3"], "num_warps=3 is not a power of two"),
        (["--target", "sm_91"], "unknown target 'sm_91'"),
        (["--shape", "1,3,2,64,64,16,16"], "3 query heads cannot be shared by 2 key heads"),
    ],
)
def test_refusals_are_told_without_a_traceback(run: Run, causal: Path, arguments: list[str], message: str) -> None:
    said = run("explain", causal, *arguments)
    assert said.code == 2 and said.out == ""
    assert message in said.err and "  fix: " in said.err and "Traceback" not in said.err


def test_traceback_is_shown_on_demand(run: Run, causal: Path) -> None:
    said = run("explain", causal, "--set", "BLOCK_MM=64", "--traceback")
    assert said.code == 2 and "Traceback (most recent call last)" in said.err


@pytest.mark.parametrize("error", [InternalError("a rule was broken"), ZeroDivisionError("division by zero")])
def test_what_is_unexpected_is_told_as_a_bug(
    run: Run, causal: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(explain, "run", fail)
    said = run("explain", causal)
    assert said.code == 3 and said.err.startswith("bug in flexgen: ")
    assert str(error).splitlines()[0] in said.err and "please report it" in said.err
    assert "--traceback" in said.err and "Traceback" not in said.err


def test_interruption_has_its_exit_code(run: Run, causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(explain, "run", interrupt)
    said = run("explain", causal)
    assert (said.code, said.out, said.err) == (130, "", "")


def test_a_file_before_which_an_option_stands_is_still_the_file(run: Run, causal: Path) -> None:
    first = run("compile", causal, "--dump-code", "--set", "BLOCK_N=32")
    assert first.code == 0
    assert run("compile", "--set", "BLOCK_N=32", causal, "--dump-code").out == first.out
    assert run("compile", "--set", "BLOCK_N=32", "--dump-code", causal).out == first.out


def test_run_file_checks_without_flags_and_prints_code_with_them(
    causal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = ["--shape", "1,1,1,64,64,16,16"]
    assert cli.run_file(str(causal), shape) == 0
    checked = capsys.readouterr().out
    assert "closed form" in checked and checked.endswith("pass\n")
    assert cli.run_file(str(causal), ["--dump-code", *shape, "--dtype", "bf16", "--target", "sm_80"]) == 0
    assert "for sm_80" in capsys.readouterr().out
    assert cli.run_file(str(causal), ["--set", "NOPE=1"]) == 2

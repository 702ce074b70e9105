"""The command line: `flexgen COMMAND ...`, and `run_file`, which makes a script of a file of mods."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from flexgen import __version__
from flexgen.commands.arguments import add_backward, add_diff, add_dump_code, add_problem, add_traceback, file_first
from flexgen.commands.console import WIDTH, Console, wrapped
from flexgen.commands.file_spec import FileSpec
from flexgen.commands.log import logging_as_asked
from flexgen.errors import FlexgenError, InternalError, first_line

OK, FAILED, REFUSED, BUG, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 3, 130, 141

# A command's module has `configure(parser)`, `run(arguments, console) -> exit code` and EXAMPLES. It is imported when
# the command is used, so that `flexgen --help`, options and cache wait for no torch.
COMMANDS = {
    "compile": "compile a file; --dump-code prints or writes the kernel",
    "explain": "say what was proven, why each decision was made, what bounds the time",
    "check": "compile, run, and compare with float64",
    "export": "write a stand-alone module that needs torch and triton alone",
    "mask": "show what is known about the mask, and the tiles visited",
    "report": "write one page that shows mask, decisions, source, costs",
    "resources": "registers, spills, shared memory, instructions, on any chip",
    "bench": "time the kernels on this GPU beside flex, cuDNN and eager",
    "tune": "search the fastest options on this GPU, and keep them",
    "fuzz": "draw mods, shapes, layouts and options, and check each against float64",
    "options": "list the kernel options",
    "cache": "where emitted sources are kept; list or delete them",
}

_DESCRIPTION = """\
Compile attention, written as two PyTorch functions, into a fused kernel that you can read.

A file of mods is any Python file with one or both of
  def score_mod(score, b, h, q_idx, kv_idx): ...   returns the changed score
  def mask_mod(b, h, q_idx, kv_idx): ...           returns True where a query may see a key"""

_EPILOG = """\
examples:
  flexgen compile causal.py --dump-code              print the kernel
  flexgen explain causal.py --target sm_80           why the kernel is as it is
  flexgen check mods.py:softcap,sliding_window       is it right?
  flexgen resources causal.py --target all           what does it cost?

`flexgen COMMAND --help` says more. FLEXGEN_LOG=info, or debug, shows what happens meanwhile.
Exit codes: 0 success, 1 a check failed, 2 an error in what was asked for, 3 a bug of flexgen,
130 interrupted."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments after the program's name; those of the process by default.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    return _quietly(lambda: _parse_and_run(arguments))


def _parse_and_run(arguments: list[str]) -> int:
    parser = _program()
    if not arguments:
        parser.print_help()
        return OK
    command, rest = arguments[0], arguments[1:]
    try:
        parsed = parser.parse_args([command, *file_first(rest)])
    except SystemExit as leaving:  # --help, --version, or a usage error that has been told
        return _code(leaving)
    return _guarded(parsed.run, parsed)


def run_file(path: str, argv: Sequence[str] | None = None) -> int:
    """Check the mods of a file as `flexgen check` does, or with --dump-code print or write its kernel.

    For use at the end of a file: `raise SystemExit(run_file(__file__))`.

    Returns:
        The exit code: 0 when it is right, 1 when it is not, 2 when it cannot be compiled.
    """
    file = Path(path)
    parser = _Parser(prog=f"python {file.name}", description="Check this attention against float64.")
    add_dump_code(parser)
    add_diff(parser)
    add_backward(parser)
    add_problem(parser, dtype="fp32")
    add_traceback(parser)
    try:
        parsed = parser.parse_args(argv)
    except SystemExit as leaving:
        return _code(leaving)
    parsed.file = FileSpec(file)
    return _quietly(lambda: _guarded(_check_or_compile, parsed))


def _check_or_compile(arguments: argparse.Namespace, console: Console) -> int:
    """Check, after a short report; or compile, for a chip, where only code is wanted."""
    name = "check" if arguments.dump_code is None and not arguments.diff else "compile"
    arguments.brief = True
    return int(_command(name).run(arguments, console))


# Parsing.


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and names the nearest command."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def _get_formatter(self) -> argparse.HelpFormatter:
        width = min(shutil.get_terminal_size().columns, WIDTH)
        return argparse.RawDescriptionHelpFormatter(self.prog, max_help_position=26, width=width)

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}\nsee {self.prog} --help\n")


class _CommandParser(_Parser):
    """The parser of one command, which learns its arguments when it is used."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        name = self.prog.split()[-1]
        command = _command(name)
        command.configure(self)
        add_traceback(self)
        self.epilog = f"examples:\n{command.EXAMPLES}"
        self.set_defaults(run=command.run)
        return super().parse_known_args(args, namespace)


class _Program(_Parser):
    def error(self, message: str) -> NoReturn:
        wrong = message.split("'")[1] if "invalid choice" in message else ""
        near = difflib.get_close_matches(wrong, COMMANDS, n=1)
        if wrong:
            hint = f"did you mean {near[0]}? " if near else ""
            message = f"no command {wrong!r}: {hint}there are {', '.join(COMMANDS)}"
        super().error(message)


def _program() -> _Program:
    usage = "flexgen [-h] [--version] COMMAND ..."
    parser = _Program(prog="flexgen", usage=usage, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"flexgen {__version__}")
    commands = parser.add_subparsers(
        title="commands",
        prog=parser.prog,
        metavar="COMMAND ...",
        dest="command",
        required=True,
        parser_class=_CommandParser,
    )
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    return parser


def _command(name: str) -> Any:
    return import_module(f"flexgen.commands.{name}")


def _code(leaving: SystemExit) -> int:
    return leaving.code if isinstance(leaving.code, int) else OK


# Running.

_PROSE = ("  why: ", "  fix: ")  # lines that may be broken; not the user's own, nor the carets below it


def _quietly(run: Callable[[], int]) -> int:
    """Run, and leave without a word when the reader of the output has gone or the user interrupts."""
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:
        with contextlib.suppress(OSError, ValueError):  # what is still buffered goes nowhere at the interpreter's end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _guarded(run: Callable[[argparse.Namespace, Console], int], arguments: argparse.Namespace) -> int:
    """Run a command and turn what it raises into a message and an exit code.

    What the user's own code prints goes to standard error, so that standard output holds the result alone.
    """
    console = Console()
    try:
        with logging_as_asked(), contextlib.redirect_stdout(sys.stderr):
            code = run(arguments, console)
        console.flush()
    except BrokenPipeError:
        raise
    except InternalError as error:
        return _tell_bug(error, console, arguments.traceback)
    except FlexgenError as error:
        _tell(f"error: {error}", console, arguments.traceback)
        return REFUSED
    except Exception as error:
        if _is_out_of_memory(error):
            what = f"error: there is too little memory: {first_line(error)}\n  fix: give a smaller --shape"
            _tell(what, console, arguments.traceback)
            return REFUSED
        return _tell_bug(error, console, arguments.traceback)
    return code


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an array or tensor was too large: torch has no class of its own for the CPU's."""
    told = first_line(error)
    return isinstance(error, MemoryError) or "out of memory" in told or "can't allocate memory" in told


def _tell(message: str, console: Console, with_traceback: bool) -> None:
    if with_traceback:
        console.note(traceback.format_exc(), "")
    for number, line in enumerate(message.splitlines()):
        for part in wrapped(line) if line.startswith(_PROSE) else [line]:
            console.note(part, "red" if number == 0 else "")


def _tell_bug(error: Exception, console: Console, with_traceback: bool) -> int:
    told = error.render() if isinstance(error, FlexgenError) else f"{type(error).__name__}: {first_line(error)}"
    asks = "" if isinstance(error, InternalError) else "\n  please report it"
    hint = "" if with_traceback else "; --traceback shows where"
    _tell(f"bug in flexgen: {told}{asks}{hint}", console, with_traceback)
    return BUG

"""`flexgen cache`: where emitted sources are kept, what is there, and emptying it."""

from __future__ import annotations

import argparse
import ast
import time
from pathlib import Path

from flexgen.commands.console import Console, counted
from flexgen.errors import FlexgenError
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.environment import read_environment
from flexgen.tuning.store import FOLDER, TunedStore

EXAMPLES = """\
  flexgen cache path                             the directory
  flexgen cache list                             one line for each emitted source
  flexgen cache clear                            delete them all, and what `flexgen tune` kept"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("path", "list", "clear"), help="what to do")


def run(arguments: argparse.Namespace, console: Console) -> int:
    directory = read_environment().cache_dir
    if directory is None:
        raise FlexgenError(
            "there is no cache directory",
            why="this user has no home directory, so each process keeps its sources in a temporary one",
            fix="set FLEXGEN_CACHE_DIR",
        )
    match arguments.action:
        case "path":
            console.line(str(directory))
        case "list":
            _list(directory, console)
        case "clear":
            _clear(directory, console)
    return 0


def _list(directory: Path, console: Console) -> None:
    files = sorted(directory.glob("*.py"), key=lambda path: path.stat().st_mtime, reverse=True)
    if files:
        console.table(("key", "kernel", "bytes", "used"), [_row(path) for path in files], left=2)
    total = sum(path.stat().st_size for path in files)
    tuned = len(TunedStore(directory / FOLDER).files())
    told = f", and what was tuned for {counted(tuned, 'problem')}" if tuned else ""
    console.note(f"{counted(len(files), 'source')}, {total:,} bytes in {directory}{told}")


def _row(path: Path) -> list[str]:
    status = path.stat()
    return [path.stem[:16], _described(path), f"{status.st_size:,}", _age(time.time() - status.st_mtime)]


def _described(path: Path) -> str:
    """Return the target and the mods that the source's docstring names."""
    try:
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    except (OSError, UnicodeDecodeError, SyntaxError):
        return "damaged; it will be written again when it is needed"
    title, _, body = text.partition("\n")
    named = [line.split(maxsplit=1) for line in body.splitlines() if line.startswith(("score_mod", "mask_mod"))]
    mods = [f"{kind} {name}" for kind, name in named if not name.startswith("none")]
    return ", ".join([title.removeprefix("Fused attention, ").removesuffix(". Written by flexgen."), *mods])


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def _clear(directory: Path, console: Console) -> None:
    number = SourceCache(directory).clear() if directory.is_dir() else 0
    tuned = TunedStore(directory / FOLDER).clear()
    told = f", and what was tuned for {counted(tuned, 'problem')}" if tuned else ""
    console.line(f"deleted {counted(number, 'source')} in {directory}{told}")

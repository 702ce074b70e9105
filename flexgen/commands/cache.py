"""`flexgen cache`: where emitted sources and compiled kernels are kept, what is there, and whether it is intact."""

from __future__ import annotations

import argparse
import ast
import time
from dataclasses import dataclass
from pathlib import Path

from flexgen.commands.console import Console, Span, counted
from flexgen.errors import FlexgenError, OptionError
from flexgen.runtime.cache import CacheEntry, SourceCache
from flexgen.runtime.compiled_files import CompiledEntry, compiled_entries, evict_compiled
from flexgen.runtime.environment import read_environment
from flexgen.runtime.file_lock import LOCKS
from flexgen.runtime.private_directory import complaint
from flexgen.tuning.store import FOLDER, TunedStore

EXAMPLES = """\
  flexgen cache path                             the directory
  flexgen cache list                             one line for each emitted source
  flexgen cache show 3f9a                        the source whose key begins so
  flexgen cache verify                           is every file what was written?
  flexgen cache prune                            delete what is damaged, left over, or too much
  flexgen cache clear                            delete everything, and what `flexgen tune` kept"""

ACTIONS = ("path", "list", "show", "verify", "prune", "clear")
_OLD_LOCK_SECONDS = 86400


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a directory holds."""

    directory: Path

    @property
    def sources(self) -> SourceCache:
        return SourceCache(self.directory)

    @property
    def compiled(self) -> list[CompiledEntry]:
        return compiled_entries(self.directory)

    @property
    def tuned(self) -> TunedStore:
        return TunedStore(self.directory / FOLDER)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=ACTIONS, help="what to do")
    parser.add_argument("key", nargs="?", metavar="KEY", help="of show: the beginning of a key that list shows")


def run(arguments: argparse.Namespace, console: Console) -> int:
    directory = read_environment().cache_dir
    if directory is None:
        raise FlexgenError(
            "there is no cache directory",
            why="this user has no home directory, so each process keeps its sources in a temporary one",
            fix="set FLEXGEN_CACHE_DIR",
        )
    if (arguments.key is not None) != (arguments.action == "show"):
        what = "show needs a KEY" if arguments.action == "show" else f"{arguments.action} takes no KEY"
        raise OptionError(what, fix="flexgen cache list shows the keys, for flexgen cache show KEY")
    if arguments.action == "path":
        console.line(str(directory))
        return 0
    _refuse_foreign(directory)
    kept = _Kept(directory)
    match arguments.action:
        case "list":
            _list(kept, console)
        case "show":
            _show(kept, arguments.key, console)
        case "verify":
            return _verify(kept, console)
        case "prune":
            _prune(kept, console)
        case "clear":
            _clear(kept, console)
    return 0


def _refuse_foreign(directory: Path) -> None:
    refusal = complaint(directory) if directory.is_dir() else None
    if refusal is not None:
        raise FlexgenError(
            refusal,
            why="what lies there may have been changed by others, so flexgen does not use the directory",
            fix="chmod 700 it if it is yours, or set FLEXGEN_CACHE_DIR to a directory of your own",
        )


def _list(kept: _Kept, console: Console) -> None:
    entries, compiled = kept.sources.entries(), kept.compiled
    if entries:
        console.table(("key", "kernel", "bytes", "used"), [_row(entry) for entry in entries], left=2)
    total = sum(entry.size for entry in entries)
    parts = [f"{counted(len(entries), 'source')}, {total:,} bytes in {kept.directory}"]
    if compiled:
        parts.append(f"{counted(len(compiled), 'compiled kernel')}, {sum(entry.size for entry in compiled):,} bytes")
    console.note(_with_tuned(", and ".join(parts), kept))


def _row(entry: CacheEntry) -> list[str]:
    return [entry.key[:16], _described(entry.text), f"{entry.size:,}", _age(time.time() - entry.used)]


def _described(text: str | None) -> str:
    """Return the target and the mods that a source's docstring names."""
    try:
        docstring = ast.get_docstring(ast.parse(text)) if text is not None else None
    except SyntaxError:
        docstring = None
    if docstring is None:
        return "damaged; it will be written again when it is needed"
    title, _, body = docstring.partition("\n")
    named = [line.split(maxsplit=1) for line in body.splitlines() if line.startswith(("score_mod", "mask_mod"))]
    mods = [f"{kind} {name}" for kind, name in named if not name.startswith("none")]
    return ", ".join([title.removeprefix("Fused attention, ").removesuffix(". Written by flexgen."), *mods])


def _age(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"


def _show(kept: _Kept, key: str, console: Console) -> None:
    found = [entry for entry in kept.sources.entries() if entry.key.startswith(key)]
    if len(found) != 1:
        raise OptionError(
            f"{counted(len(found), 'source')} have a key that begins with {key!r}" if found else f"no key {key!r}",
            why=", ".join(entry.key for entry in found[:5]) or f"there is no such source in {kept.directory}",
            fix="flexgen cache list shows the keys; give as much of one as makes it unique",
        )
    if found[0].text is None:
        raise FlexgenError(
            f"{found[0].path} is damaged",
            why="its last line is not the digest of what stands before it",
            fix="flexgen cache prune deletes it; it is written again when it is needed",
        )
    console.code(found[0].text)


def _verify(kept: _Kept, console: Console) -> int:
    entries, compiled = kept.sources.entries(), kept.compiled
    damaged = [entry.path for entry in entries if entry.text is None]
    damaged += [entry.path for entry in compiled if not entry.is_intact()]
    for path in damaged:
        console.line(Span("damaged  ", "red"), str(path))
    told = f"{counted(len(entries), 'source')} and {counted(len(compiled), 'compiled kernel')}"
    console.line(f"{told}: {len(damaged)} damaged" if damaged else f"{told}, all intact")
    return 1 if damaged else 0


def _prune(kept: _Kept, console: Console) -> None:
    sources = kept.sources.prune()
    damaged = [entry for entry in kept.compiled if not entry.is_intact()]
    for entry in damaged:
        entry.delete()
    compiled = len(damaged) + evict_compiled(kept.directory)
    for lock in (kept.directory / LOCKS).glob("*.lock"):
        if time.time() - lock.stat().st_mtime > _OLD_LOCK_SECONDS:
            lock.unlink(missing_ok=True)
    console.line(f"deleted {counted(sources, 'source')} and {counted(compiled, 'compiled kernel')} in {kept.directory}")


def _clear(kept: _Kept, console: Console) -> None:
    sources, compiled = kept.sources.clear(), kept.compiled
    for entry in compiled:
        entry.delete()
    for lock in (kept.directory / LOCKS).glob("*.lock"):
        lock.unlink(missing_ok=True)
    told = f"deleted {counted(sources, 'source')} in {kept.directory}"
    told += f", and {counted(len(compiled), 'compiled kernel')}" if compiled else ""
    told = _with_tuned(told, kept)
    kept.tuned.clear()
    console.line(told)


def _with_tuned(told: str, kept: _Kept) -> str:
    tuned = len(kept.tuned.files())
    return told + (f", and what was tuned for {counted(tuned, 'problem')}" if tuned else "")

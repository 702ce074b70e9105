"""The project's documents, taken apart: fenced blocks, links and inline code, each with its line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted(
    [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    + list((ROOT / "docs").glob("*.md"))
)

_FENCE = re.compile(r"^```(\w*)$")
_EXCERPT = re.compile(r"^<!-- excerpt: (\S+) -->$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        language: what follows the opening fence.
        line: the number of the opening fence.
        text: the lines between the fences.
        excerpt_of: the file, relative to the root, that a comment above the block says it is an excerpt of.
    """

    document: Path
    language: str
    line: int
    text: str
    excerpt_of: str | None = None

    @property
    def place(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Return the blocks of some languages in all documents, in order."""
    return [block for path in DOCUMENTS for block in _blocks(path) if block.language in languages]


def _blocks(path: Path) -> Iterator[Block]:
    opened: tuple[str, int, str | None] | None = None
    collected: list[str] = []
    above: str | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = _FENCE.match(line)
        if fence and opened is None:
            opened, collected = (fence[1], number, above), []
        elif fence and opened is not None:
            language, start, excerpt_of = opened
            yield Block(path, language, start, "\n".join(collected) + "\n", excerpt_of)
            opened = None
        elif opened is not None:
            collected.append(line)
        excerpt = _EXCERPT.match(line)
        above = excerpt[1] if excerpt else None
    assert opened is None, f"{path.name} ends inside of a block"


def prose(path: Path) -> str:
    """Return a document without its fenced blocks."""
    lines, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        if _FENCE.match(line):
            inside = not inside
        elif not inside:
            lines.append(line)
    return "\n".join(lines)


def links(path: Path) -> list[str]:
    """Return the targets of links to files, without their anchors."""
    targets = [target.split("#")[0] for target in _LINK.findall(prose(path))]
    return [target for target in targets if target and "://" not in target]


def inline_code(path: Path) -> list[str]:
    """Return what stands between single backticks."""
    return _CODE.findall(prose(path))


def missing_lines(shown: str, actual: str) -> list[str]:
    """Return the lines that are shown, in this order and without a gap except at `...`, but are not there."""
    found = actual.splitlines()
    position, missing = 0, []
    for part in re.split(r"^\.\.\.\n", shown, flags=re.MULTILINE):
        wanted = part.rstrip("\n").splitlines()
        starts = range(position, len(found) - len(wanted) + 1)
        at = next((start for start in starts if found[start : start + len(wanted)] == wanted), None)
        if at is None:
            missing += [line for line in wanted if line not in found[position:]] or wanted
        else:
            position = at + len(wanted)
    return missing

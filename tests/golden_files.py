"""The pytest plugin for golden files: byte-for-byte comparison, `--regen`, and no file without a test that writes it.

`tests/golden/INDEX` says which test writes which file, so that orphans are found in any run: also when only some
tests are selected, when they are spread over processes, and when some are skipped on this machine.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

INDEX_NAME = "INDEX"
DIFF_LINES_SHOWN = 80

Entry = tuple[str, str]  # (golden name, node id of the test that writes it)


@dataclass(slots=True)
class GoldenBook:
    """The golden files of one checkout, and what this session's tests have claimed of them.

    Attributes:
        folder: where the golden files and their index lie.
        regenerate: whether claims rewrite files instead of comparing.
        claims: what tests of this process have written or compared.
        ran: the tests of this process that passed with the fixture.
        collected: every test pytest found, before any selection by keyword or marker.
        whole_files: whether `collected` holds all tests of each file it mentions.
    """

    folder: Path
    regenerate: bool
    claims: set[Entry] = field(default_factory=set)
    ran: set[str] = field(default_factory=set)
    collected: set[str] = field(default_factory=set)
    whole_files: bool = True

    def index(self) -> set[Entry]:
        path = self.folder / INDEX_NAME
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return {(name, node) for name, _, node in (line.partition("\t") for line in lines)}

    def files(self) -> set[str]:
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return {path.relative_to(self.folder).as_posix() for path in paths} - {INDEX_NAME}

    def claim(self, name: str, text: str, node: str) -> None:
        """Compare `text` with the golden file `name`, or rewrite it; fails the test `node` when they differ."""
        self.claims.add((name, node))
        path, content = self.folder / name, text.encode()
        if self.regenerate:
            _write_if_changed(path, content)
        elif not path.exists() or (name, node) not in self.index():
            pytest.fail(f"golden file {name} is missing or not in the index for this test; run pytest --regen", False)
        elif path.read_bytes() != content:
            pytest.fail(_difference(name, path.read_bytes().decode(), text), pytrace=False)

    def finish_test(self, node: str) -> None:
        """Fail the test `node` when the index says that it writes files it has not written."""
        self.ran.add(node)
        missing = sorted(name for name, writer in self.index() - self.claims if writer == node)
        if missing and not self.regenerate:
            pytest.fail(f"this test no longer writes {', '.join(missing)}; run pytest --regen", pytrace=False)

    def test_is_gone(self, node: str) -> bool:
        """Whether the test that the index names does not exist any more; False where this run cannot tell."""
        path = node.partition("::")[0]
        if not (self.folder.parent.parent / path).exists():
            return True
        files = {other.partition("::")[0] for other in self.collected} if self.whole_files else set()
        return path in files and node not in self.collected

    def orphans(self) -> list[str]:
        """Return one line for each file without a test, test without a file, and test that is gone."""
        index, files = self.index(), self.files()
        named = {name for name, _ in index}
        problems = [f"{name}: no test writes it" for name in files - named]
        problems += [f"{name}: in the index, but there is no such file" for name in named - files]
        problems += [f"{name}: its test {node} is gone" for name, node in index if self.test_is_gone(node)]
        return sorted(problems)

    def rewrite_index(self) -> None:
        """Write the index from what ran and what this run did not touch, and delete the files it leaves out."""
        kept = {(name, node) for name, node in self.index() if node not in self.ran and not self.test_is_gone(node)}
        entries = sorted(kept | self.claims)
        lines = "".join(f"{name}\t{node}\n" for name, node in entries)
        _write_if_changed(self.folder / INDEX_NAME, lines.encode())
        for orphan in self.files() - {name for name, _ in entries}:
            (self.folder / orphan).unlink()


def _write_if_changed(path: Path, content: bytes) -> None:
    if path.exists() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _difference(name: str, golden: str, text: str) -> str:
    lines = list(difflib.unified_diff(golden.splitlines(), text.splitlines(), name, "this run", lineterm="", n=2))
    cut = [f"... {len(lines) - DIFF_LINES_SHOWN} more lines"] if len(lines) > DIFF_LINES_SHOWN else []
    shown = lines[:DIFF_LINES_SHOWN] or ["(only line endings or the last newline differ)"]
    return "\n".join([f"golden file {name} differs; if the change is wanted, run pytest --regen", *shown, *cut])


BOOK = pytest.StashKey[GoldenBook]()
PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regen", action="store_true", help="rewrite the golden files that the selected tests write")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[BOOK] = GoldenBook(config.rootpath / "tests" / "golden", config.getoption("--regen"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    book = config.stash[BOOK]
    book.collected |= {item.nodeid for item in items}
    book.whole_files = not any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        item.stash[PASSED] = report.passed
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    book = session.config.stash[BOOK]
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["goldens"] = [sorted(map(list, book.claims)), sorted(book.ran), sorted(book.collected), book.whole_files]
    elif book.regenerate:
        book.rewrite_index()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Gather what a worker process of pytest-xdist has claimed."""
    output = getattr(node, "workeroutput", {})
    if "goldens" in output:
        _merge(node.config.stash[BOOK], *output["goldens"])


def _merge(book: GoldenBook, claims: Iterable[list[str]], ran: list[str], collected: list[str], whole: bool) -> None:
    book.claims |= {(name, node) for name, node in claims}
    book.ran.update(ran)
    book.collected.update(collected)
    book.whole_files = book.whole_files and whole


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[Callable[[str, str], None]]:
    """Return `golden(name, text)`, which compares `text` with tests/golden/`name` or, with --regen, rewrites it."""
    book: GoldenBook = request.config.stash[BOOK]
    node = request.node.nodeid
    yield lambda name, text: book.claim(name, text, node)
    if request.node.stash.get(PASSED, False):
        book.finish_test(node)

"""The golden files all belong to tests, and the mechanism behind them notices what it must."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.golden_files import BOOK, INDEX_NAME

REPOSITORY = Path(__file__).parent.parent
WRITER = """
import pytest

@pytest.mark.parametrize("name", {names})
def test_writes(golden, name):
    golden(f"ring/{{name}}.txt", name + "{suffix}\\n")
"""


def test_every_golden_file_belongs_to_a_test(request: pytest.FixtureRequest) -> None:
    book = request.config.stash[BOOK]
    if book.regenerate:
        pytest.skip("the index is rewritten when this run ends")
    assert book.orphans() == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    _write_test(tmp_path, ["one", "two"])
    (tmp_path / "tests" / "test_orphans.py").write_text(Path(__file__).read_text().split("@pytest.fixture")[0])
    assert _pytest(tmp_path, "--regen").returncode == 0
    return tmp_path


def _write_test(project: Path, names: list[str], suffix: str = "") -> None:
    (project / "tests").mkdir(exist_ok=True)
    (project / "tests" / "test_writer.py").write_text(WRITER.format(names=names, suffix=suffix))


def _pytest(project: Path, *options: str, target: str = "tests") -> subprocess.CompletedProcess[str]:
    own = ["-q", "-p", "tests.golden_files", "-p", "no:cacheprovider", f"--rootdir={project}"]
    command = [sys.executable, "-m", "pytest", *own, *options, target]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=120)


def _goldens(project: Path) -> set[str]:
    folder = project / "tests" / "golden"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {INDEX_NAME}


def test_regenerated_goldens_pass(project: Path) -> None:
    assert _goldens(project) == {"ring/one.txt", "ring/two.txt"}
    assert _pytest(project).returncode == 0


def test_changed_text_fails_with_a_difference(project: Path) -> None:
    _write_test(project, ["one", "two"], suffix="!")
    result = _pytest(project)
    assert result.returncode == 1
    for text in ("-one\n", "+one!\n", "--regen"):
        assert text in result.stdout


def test_only_a_missing_last_newline_also_fails(project: Path) -> None:
    (project / "tests" / "golden" / "ring" / "one.txt").write_text("one")
    assert _pytest(project).returncode == 1


def test_golden_without_a_test_fails_and_is_deleted_by_regen(project: Path) -> None:
    (project / "tests" / "golden" / "stray.txt").write_text("stray")
    result = _pytest(project, target="tests/test_orphans.py")
    assert result.returncode == 1
    assert "stray.txt: no test writes it" in result.stdout
    _pytest(project, "--regen")
    assert "stray.txt" not in _goldens(project)


def test_golden_of_a_removed_parameter_fails_and_is_deleted_by_regen(project: Path) -> None:
    _write_test(project, ["one"])
    result = _pytest(project)
    assert result.returncode == 1
    assert "ring/two.txt: its test" in result.stdout
    assert _pytest(project, "--regen").returncode == 0
    assert _goldens(project) == {"ring/one.txt"}


def test_regen_of_some_tests_leaves_the_other_goldens(project: Path) -> None:
    assert _pytest(project, "--regen", target="tests/test_writer.py::test_writes[one]").returncode == 0
    assert _goldens(project) == {"ring/one.txt", "ring/two.txt"}
    assert _pytest(project).returncode == 0


def test_regen_over_several_processes(project: Path) -> None:
    pytest.importorskip("xdist")
    _write_test(project, ["one", "three", "four"], suffix="?")
    assert _pytest(project, "--regen", "-n", "2").returncode == 0
    assert _goldens(project) == {"ring/one.txt", "ring/three.txt", "ring/four.txt"}
    assert _pytest(project, "-n", "2").returncode == 0

"""The store of sources survives damage, races, foreign directories and full disks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen.runtime.cache import SourceCache
from flexgen.runtime.environment import read_environment

KEY = "0123456789abcdef"
TEXT = "VALUE = 1\n"


def never() -> str:
    raise AssertionError("built again")


def store(directory: Path | None, key: str = KEY, build: Callable[[], str] = lambda: TEXT):
    return SourceCache(directory).get(key, build)


def test_a_second_process_reads_what_the_first_wrote(tmp_path: Path):
    first = store(tmp_path / "cache")
    assert store(tmp_path / "cache", build=never) == first
    assert first.text == TEXT


def test_a_text_comes_back_byte_for_byte(tmp_path: Path):
    text = "# é\r\n\n# sha256 of nothing\nlast line without an end"
    store(tmp_path, build=lambda: text)
    assert store(tmp_path, build=never).text == text


def test_the_directory_is_the_users_alone(tmp_path: Path):
    assert store(tmp_path / "a" / "b").path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data.replace(b"1", b"2", 1),
        lambda data: b"",
        lambda data: b"\xff" + data,
        lambda data: data + b"import os\n",
    ],
    ids=["truncated", "changed", "empty", "not text", "appended"],
)
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: Callable[[bytes], bytes]):
    path = store(tmp_path).path
    path.write_bytes(damage(path.read_bytes()))
    assert store(tmp_path).text == TEXT
    assert store(tmp_path, build=never).text == TEXT


def test_a_link_is_not_followed(tmp_path: Path):
    path = store(tmp_path / "cache").path
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store(tmp_path / "cache", build=lambda: "VALUE = 2\n").text == "VALUE = 2\n"


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int):
    store(tmp_path / "cache")
    (tmp_path / "cache").chmod(mode)
    with pytest.warns(RuntimeWarning, match="other users may write"):
        found = store(tmp_path / "cache", build=lambda: "VALUE = 2\n")
    assert found.text == "VALUE = 2\n"
    assert found.path.parent != tmp_path / "cache"


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert store(tmp_path).path.parent != tmp_path


def test_a_full_disk_warns_once_and_keeps_working(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    cache = SourceCache(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("in the way")
    for number in range(3):
        source = cache.get(f"{KEY}{number}", lambda: TEXT)
        assert source.text in source.path.read_text()
    assert [str(warning.message).count("cannot write") for warning in recwarn] == [1]


def test_without_a_directory_sources_live_in_a_private_one():
    source = store(None)
    assert not source.path.exists()  # it went with its cache
    cache = SourceCache(None)
    assert cache.get(KEY, lambda: TEXT).path.parent.stat().st_mode & 0o777 == 0o700


def test_the_least_recently_used_go_first(tmp_path: Path):
    cache = SourceCache(tmp_path, max_bytes=1000)
    for age, name in enumerate(["oldest00", "older000", "used0000"]):
        os.utime(cache.get(name, lambda: "#" * 200).path, (age, age))
    store(tmp_path, "used0000", never)  # a use makes it young
    cache.get("newest00", lambda: "#" * 200)
    assert sorted(path.stem for path in tmp_path.glob("*.py")) == ["newest00", "older000", "used0000"]


def test_what_is_larger_than_the_bound_still_works(tmp_path: Path):
    cache = SourceCache(tmp_path, max_bytes=10)
    assert cache.get(KEY, lambda: TEXT * 10).path.exists()


def test_stats_and_clear(tmp_path: Path):
    cache = SourceCache(tmp_path)
    cache.get(KEY, lambda: TEXT)
    assert cache.stats().entries == 1
    assert cache.stats().total_bytes == cache.get(KEY, never).path.stat().st_size
    assert cache.clear() == 1
    assert cache.get(KEY, lambda: "VALUE = 3\n").text == "VALUE = 3\n"


@pytest.mark.parametrize("key", ["../outside", "short", "a/b/c/d/e/f", ""])
def test_keys_cannot_leave_the_directory(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match="not a cache key"):
        store(tmp_path, key)


RACE = """
import sys
from pathlib import Path
from flexgen.runtime.cache import SourceCache
for number in range(200):
    text = f"VALUE = {number}\\n" * 50
    assert SourceCache(Path(sys.argv[1])).get(f"race{number:08}", lambda: text).text == text
"""


def test_two_processes_may_race(tmp_path: Path):
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    racers = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [racer.wait() for racer in racers] == [0, 0]
    assert len(list(tmp_path.iterdir())) == 200  # nothing temporary is left


class TestEnvironment:
    def test_the_cache_directory_is_flexgens_own_variable_first(self):
        chosen = read_environment({"FLEXGEN_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c"})
        assert chosen.cache_dir == Path("/a/b")

    def test_else_it_is_in_the_users_cache(self):
        assert read_environment({"XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/flexgen")
        assert read_environment({"XDG_CACHE_HOME": "relative"}).cache_dir == Path.home() / ".cache" / "flexgen"

    def test_triton_interpret_is_seen(self):
        assert read_environment({"TRITON_INTERPRET": "1"}).triton_interprets
        assert not read_environment({"TRITON_INTERPRET": "0"}).triton_interprets

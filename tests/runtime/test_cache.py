"""The store of sources survives damage, races, kills, foreign directories and full disks, and never runs a file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen.runtime import cache as cache_module
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.environment import read_environment
from flexgen.runtime.load import load_module

KEY = "0123456789abcdef"
TEXT = "VALUE = 1\n"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def store(directory: Path | None, key: str = KEY, text: str = TEXT):
    return SourceCache(directory).keep(key, text)


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def test_a_second_process_finds_what_the_first_wrote(tmp_path: Path):
    first = store(tmp_path / "cache")
    written = first.path.stat().st_ino
    assert store(tmp_path / "cache") == first
    assert first.path.stat().st_ino == written  # not written again
    assert first.text == TEXT


def test_a_text_comes_back_byte_for_byte(tmp_path: Path):
    text = "# é\r\n\n# sha256 of nothing\nlast line without an end"
    store(tmp_path, text=text)
    (entry,) = SourceCache(tmp_path).entries()
    assert entry.text == text


def test_directory_and_files_are_the_users_alone(tmp_path: Path):
    path = store(tmp_path / "a" / "b").path
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[: len(data) // 2],
    "changed": lambda data: data.replace(b"1", b"2", 1),
    "empty": lambda data: b"",
    "not text": lambda data: b"\xff" + data,
    "appended": lambda data: data + b"import os\n",
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_written_again(tmp_path: Path, damage: Callable[[bytes], bytes]):
    path = store(tmp_path).path
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert [entry.text for entry in SourceCache(tmp_path).entries()] == [None]
    assert store(tmp_path).text == TEXT
    assert path.read_bytes() == intact


def test_a_file_with_a_right_seal_and_another_text_is_never_run(tmp_path: Path):
    planted = store(tmp_path, text="raise AssertionError('planted code ran')\n")
    found = store(tmp_path)
    assert vars(load_module(found))["VALUE"] == 1
    assert found.path == planted.path
    assert found.path.read_text().startswith(TEXT)


def test_an_entry_of_another_version_is_replaced(tmp_path: Path):
    path = store(tmp_path).path
    path.write_text(TEXT)  # without a seal, as a version without seals would have it
    assert store(tmp_path).text == TEXT
    assert [entry.text for entry in SourceCache(tmp_path).entries()] == [TEXT]


def test_a_link_is_not_followed(tmp_path: Path):
    path = store(tmp_path / "cache").path
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    before = elsewhere.read_bytes()
    store(tmp_path / "cache", text="VALUE = 2\n")
    assert not path.is_symlink()
    assert elsewhere.read_bytes() == before


def test_what_others_may_change_is_not_read(tmp_path: Path):
    path = store(tmp_path).path
    path.chmod(0o666)
    assert [entry.text for entry in SourceCache(tmp_path).entries()] == [None]
    store(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_pipe_in_the_place_of_a_file_blocks_nobody(tmp_path: Path):
    os.mkfifo(tmp_path / f"{KEY}.py")
    assert store(tmp_path).text == TEXT
    assert (tmp_path / f"{KEY}.py").is_file()


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_directory_that_others_may_write_to_is_not_used(tmp_path: Path, mode: int):
    store(tmp_path / "cache")
    (tmp_path / "cache").chmod(mode)
    with pytest.warns(RuntimeWarning, match="other users may write"):
        found = store(tmp_path / "cache", text="VALUE = 2\n")
    assert found.text == "VALUE = 2\n"
    assert found.path.parent != tmp_path / "cache"


def test_a_directory_below_one_that_others_may_write_to_is_not_used(tmp_path: Path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="and so replace"):
        assert store(tmp_path / "open" / "cache").path.parent.parent != tmp_path / "open"
    (tmp_path / "open").chmod(0o1777)  # as /tmp: others may not move what is not theirs
    assert store(tmp_path / "open" / "cache").path.parent.parent == tmp_path / "open"


def test_a_directory_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.warns(RuntimeWarning, match="belongs to another user"):
        assert store(tmp_path).path.parent != tmp_path


def test_a_directory_that_cannot_be_written_warns_once_and_works(tmp_path: Path, recwarn: pytest.WarningsRecorder):
    cache = SourceCache(tmp_path / "cache")
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_text("in the way")
    for number in range(3):
        source = cache.keep(f"{KEY}{number}", TEXT)
        assert source.text in source.path.read_text()
    assert [str(warning.message).count("cannot write") for warning in recwarn] == [1]
    assert cache.is_temporary


def test_with_no_place_to_write_at_all_sources_stay_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
):
    def full(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    cache = SourceCache(tmp_path)
    monkeypatch.setattr(cache_module.tempfile, "mkstemp", full)
    monkeypatch.setattr(cache_module.tempfile, "TemporaryDirectory", full)
    for number in range(3):
        source = cache.keep(f"{KEY}{number}", f"VALUE = {number}\n")
        assert vars(load_module(source))["VALUE"] == number
    assert [str(warning.message).count("No space left") for warning in recwarn] == [1]


def test_a_rename_that_succeeded_and_tells_an_error_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over a network, the answer to a rename may be lost, and the rename tried again finds nothing to rename."""
    replace = os.replace

    def answer_lost(source: str, target: Path) -> None:
        replace(source, target)
        raise FileNotFoundError(2, "No such file or directory")

    cache = SourceCache(tmp_path)
    monkeypatch.setattr(os, "replace", answer_lost)
    assert cache.keep(KEY, TEXT).path.parent == tmp_path
    assert not cache.is_temporary


def test_without_a_directory_sources_live_in_a_private_one():
    source = store(None)
    assert not source.path.exists()  # it went with its cache
    cache = SourceCache(None)
    assert cache.keep(KEY, TEXT).path.parent.stat().st_mode & 0o777 == 0o700


FORKS = """
import os
from flexgen.runtime.cache import SourceCache
cache = SourceCache(None)
path = cache.keep("0123456789abcdef", "VALUE = 1").path
child = os.fork()
if child == 0:
    cache.keep("fedcba9876543210", "VALUE = 2")
    raise SystemExit(0)  # with everything that runs at an exit
os.waitpid(child, 0)
print(path.exists())
"""


def test_a_forked_process_leaves_the_temporary_directory_to_its_parent():
    assert start(FORKS).communicate(timeout=60)[0] == "True\n"


# How much there is.


def test_the_least_recently_used_go_first(tmp_path: Path):
    cache = SourceCache(tmp_path, max_bytes=1000)
    for age, name in enumerate(["oldest00", "older000", "used0000"]):
        os.utime(cache.keep(name, "#" * 200).path, (age, age))
    store(tmp_path, "used0000", "#" * 200)  # a use makes it young
    cache.keep("newest00", "#" * 200)
    left = sorted(path.stem for path in tmp_path.glob("*.py"))
    assert "newest00" in left and "used0000" in left and "oldest00" not in left
    assert sum(path.stat().st_size for path in tmp_path.glob("*.py")) <= 1000


def test_what_is_larger_than_the_bound_still_works(tmp_path: Path):
    assert SourceCache(tmp_path, max_bytes=10).keep(KEY, TEXT * 10).path.exists()


def test_what_other_processes_wrote_counts_too(tmp_path: Path):
    cache = SourceCache(tmp_path, max_bytes=100_000)
    cache.keep(KEY, TEXT)
    other = SourceCache(tmp_path)
    for number in range(20):
        other.keep(f"other{number:08}", "#" * 10_000)
    for number in range(cache_module._WRITES_BETWEEN_LOOKS):
        cache.keep(f"mine{number:08}", TEXT)
    assert sum(path.stat().st_size for path in tmp_path.glob("*.py")) <= 100_000


def test_a_full_directory_is_not_looked_through_at_each_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looks = []
    listed = cache_module._listed
    monkeypatch.setattr(cache_module, "_listed", lambda *args: looks.append(args) or listed(*args))
    cache = SourceCache(tmp_path)
    for number in range(100):
        cache.keep(f"many{number:08}", TEXT)
    assert len(looks) <= 4


def test_prune_deletes_what_is_damaged_and_what_the_killed_left(tmp_path: Path):
    cache = SourceCache(tmp_path)
    cache.keep(KEY, TEXT)
    cache.keep("damaged0", TEXT).path.write_text("half a fi")
    for name, age in ((".left.tmp", 10_000), (".written.tmp", 0)):
        (tmp_path / name).write_text("half")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    assert cache.prune() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".written.tmp", f"{KEY}.py"]


def test_clear_leaves_nothing_and_what_is_used_comes_back(tmp_path: Path):
    cache = SourceCache(tmp_path)
    cache.keep(KEY, TEXT)
    assert cache.clear() == 1
    assert cache.entries() == []
    assert cache.keep(KEY, TEXT).path.exists()


@pytest.mark.parametrize("key", ["../outside", "short", "a/b/c/d/e/f", ""])
def test_keys_cannot_leave_the_directory(tmp_path: Path, key: str):
    with pytest.raises(ValueError, match="not a cache key"):
        store(tmp_path, key)


# Several at once.

RACE = """
import sys
from pathlib import Path
from flexgen.runtime.cache import SourceCache
for number in range(40):
    text = f"VALUE = {number}\\n" * 50
    assert SourceCache(Path(sys.argv[1])).keep(f"race{number:08}", text).text == text
"""


def test_sixteen_processes_may_race(tmp_path: Path):
    racers = [start(RACE, tmp_path) for _ in range(16)]
    assert [racer.wait(timeout=120) for racer in racers] == [0] * 16
    assert len(list(tmp_path.iterdir())) == 40  # nothing temporary is left
    assert all(entry.text is not None for entry in SourceCache(tmp_path).entries())


WRITES = """
import itertools, sys
from pathlib import Path
from flexgen.runtime.cache import SourceCache
cache = SourceCache(Path(sys.argv[1]))
print("started", flush=True)
for number in itertools.count():
    cache.keep(f"kill{number:08}", f"VALUE = {number}\\n" * 2000)
"""


def test_a_process_may_be_killed_at_any_moment(tmp_path: Path):
    for number in range(6):
        writer = start(WRITES, tmp_path)
        assert writer.stdout is not None and writer.stdout.readline() == "started\n"
        time.sleep(0.02 + 0.013 * number)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    entries = SourceCache(tmp_path).entries()
    assert entries
    assert all(entry.text is not None for entry in entries)


def test_threads_get_one_and_the_same_source(tmp_path: Path):
    cache = SourceCache(tmp_path)
    found = []
    threads = [threading.Thread(target=lambda: found.append(cache.keep(KEY, TEXT))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(source) for source in found}) == 1


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

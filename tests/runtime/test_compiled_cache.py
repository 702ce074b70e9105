"""What Triton compiles is kept in the user's own directory, verified before it is used, and compiled by one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from triton import knobs

from flexgen.lowering.targets import TARGETS
from flexgen.runtime import build
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import Binary, compile_entry, without_cache
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.compiled_cache import VerifiedCache, compiling_into
from flexgen.runtime.compiled_files import FOLDER, GROUP, compiled_entries, evict_compiled
from tests.runtime import kernels
from tests.runtime.conftest import HEADER, Load

TYPES = [ArgType("*fp32")] * 3 + [ArgType("i32")]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory that compiling uses, whatever the tests' own environment says."""
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    cache = SourceCache(tmp_path / "cache")
    monkeypatch.setattr(build, "source_cache", lambda: cache)
    return cache.directory


def compile_add(load: Load) -> Binary:
    return compile_entry(load(kernels.ADD), "add", TYPES, TARGETS["sm_80"], num_warps=1, num_stages=1)


def compiled_file(directory: Path, suffix: str) -> Path:
    (found,) = (directory / FOLDER).glob(f"*/add{suffix}")
    return found


def test_a_kernel_is_compiled_once_and_then_found(load: Load, directory: Path):
    first = compile_add(load)
    written = compiled_file(directory, ".cubin").stat().st_mtime_ns
    assert compile_add(load).stages == first.stages
    assert compiled_file(directory, ".cubin").stat().st_mtime_ns == written
    assert (directory / FOLDER).stat().st_mode & 0o777 == 0o700
    assert compiled_file(directory, ".cubin").stat().st_mode & 0o777 == 0o600


DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda path: path.write_bytes(path.read_bytes()[::-1]),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "deleted": lambda path: path.unlink(),
    "writable by others": lambda path: path.chmod(0o666),
    "a link": lambda path: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to("../elsewhere")),
}


@pytest.mark.parametrize("suffix", [".cubin", ".ptx", ".json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_not_intact_is_compiled_again(load: Load, directory: Path, damage, suffix: str):
    intact = compile_add(load).stages
    path = compiled_file(directory, suffix)
    damage(path)
    (entry,) = compiled_entries(directory)
    assert not entry.is_intact()
    assert compile_add(load).stages == intact
    assert not path.is_symlink()
    (entry,) = compiled_entries(directory)
    assert entry.is_intact()


LISTS: dict[str, str] = {
    "no JSON": "{",
    "Triton's own": json.dumps({"child_paths": {"add.cubin": "/etc/passwd"}}),
    "of files elsewhere": json.dumps({"sha256": {"../../elsewhere": "0" * 64}}),
    "no dictionary": json.dumps({"sha256": [1]}),
}


@pytest.mark.parametrize("text", LISTS.values(), ids=LISTS)
def test_a_list_that_is_not_as_written_is_none(load: Load, directory: Path, text: str):
    intact = compile_add(load).stages
    compiled_file(directory, ".json").parent.joinpath(f"{GROUP}add.json").write_text(text)
    assert compile_add(load).stages == intact


@pytest.mark.parametrize("name", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_who_chose_tritons_cache_keeps_it(directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv(name, str(tmp_path))
    with compiling_into(directory):
        assert knobs.cache.manager_class is None


def test_processes_that_start_meanwhile_see_nothing_of_it(directory: Path):
    before = dict(os.environ)
    with compiling_into(directory):
        assert knobs.cache.dir == str(directory / FOLDER) and dict(os.environ) == before
    with without_cache():
        assert knobs.cache.dir != knobs.cache.get_triton_dir("cache") and dict(os.environ) == before
    assert knobs.cache.dir == knobs.cache.get_triton_dir("cache")


def test_without_a_cache_there_is_none(directory: Path):
    with without_cache(), compiling_into(directory):
        assert knobs.cache.manager_class is None
    with compiling_into(directory):
        assert knobs.cache.manager_class is VerifiedCache
    assert knobs.cache.manager_class is None


def test_a_directory_that_others_may_write_to_is_not_used(load: Load, directory: Path):
    (directory / FOLDER).mkdir()
    (directory / FOLDER).chmod(0o777)
    with compiling_into(directory):
        assert knobs.cache.manager_class is None


def test_the_kernels_used_longest_ago_go_first(load: Load, directory: Path):
    compile_add(load)
    (entry,) = compiled_entries(directory)
    for age, name in ((100, "older"), (200, "oldest")):
        shutil.copytree(entry.path, entry.path.parent / name)
        os.utime(entry.path.parent / name, (time.time() - age,) * 2)
    assert evict_compiled(directory, 2 * entry.size + 1) == 1
    assert [kept.path.name for kept in compiled_entries(directory)] == [entry.path.name, "older"]


COMPILES = f"""
import os, time
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import compile_entry
from flexgen.runtime.cache import source_cache
from flexgen.runtime.load import load_module

backend = type(make_backend(GPUTarget("cuda", 80, 32)))
make_ptx = backend.make_ptx

def slowly(self, *args, **options):
    print("compiles", flush=True)
    time.sleep(0.5)
    return make_ptx(self, *args, **options)

backend.make_ptx = slowly
module = load_module(source_cache().keep("0123456789abcdef", {HEADER + kernels.ADD!r}))
types = [ArgType("*fp32")] * 3 + [ArgType("i32")]
children = []
for _ in range(16):
    child = os.fork()
    if child == 0:
        binary = compile_entry(module, "add", types, TARGETS["sm_80"], num_warps=1, num_stages=1)
        os._exit(0 if binary.stages["cubin"] else 1)
    children.append(child)
raise SystemExit(max(os.waitpid(child, 0)[1] for child in children))
"""


def test_of_processes_that_want_the_same_kernel_one_compiles_it(tmp_path: Path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "FLEXGEN_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiles") == 1

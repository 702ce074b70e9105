"""Kernels that will be needed are compiled by other processes, which nothing depends on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.aux_outputs import AuxRequest
from flexgen.extras import NO_EXTRAS
from flexgen.lowering.targets import TARGETS
from flexgen.runtime import build, compile_ahead, compile_pool, load
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.compile_ahead import CompileAhead, is_known
from flexgen.runtime.compile_job import CompileJob, DriverJob

pytest.importorskip("triton")

from triton import knobs

from flexgen.runtime import launch


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def tensors(requires_grad: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(
        torch.empty(1, 2, 256, 32, dtype=torch.bfloat16, device="meta", requires_grad=requires_grad) for _ in range(3)
    )


def jobs() -> list[CompileJob]:
    lowered = flexgen.compile(None, causal).lower(*tensors(), target="sm_80")
    return [lowered.compile_job(entry) for entry in lowered.entries]


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, for this process and those that it starts."""
    for name in ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_HOME", "FLEXGEN_COMPILE_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path / "cache"))
    own = SourceCache(tmp_path / "cache")
    for module in (build, load, compile_ahead):
        monkeypatch.setattr(module, "source_cache", lambda: own)
    monkeypatch.setattr(compile_ahead, "usual_workers", lambda: 2)
    return own.directory


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[CompileAhead]:
    """What whoever compiles in this process waits for."""
    caplog.set_level("DEBUG", "flexgen.build")  # a test that fails shows why a process did
    own = CompileAhead()
    monkeypatch.setattr(build, "AHEAD", own)
    yield own
    own.close()


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each kernel that this process asks Triton for, whether it found it."""
    hits: list[bool] = []

    def listener(*, cache_hit: bool, **_: object) -> None:
        hits.append(cache_hit)

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    return hits


@pytest.mark.usefixtures("directory")
def test_what_was_started_is_found_compiled(ahead: CompileAhead, found: list[bool]):
    forward, *others = jobs()
    ahead.start(others)
    assert ahead.started == {DriverJob.key, *(job.key for job in others)}
    for job in (forward, *others):
        job.run()
    assert found == [False, True, True, True]


@pytest.mark.usefixtures("directory")
def test_what_is_compiled_starts_nothing(ahead: CompileAhead):
    (job, *_) = jobs()
    assert not is_known(job)
    job.run()
    assert is_known(job)
    ahead.start([job])
    assert not ahead.started


def test_what_was_deleted_is_not_known(directory: Path):
    (job, *_) = jobs()
    job.run()
    for entry in build.source_cache().directory.glob("compiled/*/"):
        for file in entry.iterdir():
            file.unlink()
        entry.rmdir()
    assert directory.exists() and not is_known(job)


class TestTraining:
    """The backward of a recorded call, which is foreseen."""

    @pytest.fixture
    def attention(self, monkeypatch: pytest.MonkeyPatch, ahead: CompileAhead) -> flexgen.Attention:
        """One that takes tensors without memory for an H200's."""
        monkeypatch.setattr("flexgen.attention.target_of", lambda device: TARGETS["sm_90"])
        monkeypatch.setattr("flexgen.training.AHEAD", ahead)
        return flexgen.compile(None, causal, {"BACKEND": "TRITON"})

    def prepared(self, attention: flexgen.Attention, trained: AuxRequest | None) -> None:
        given = tensors()
        attention._ready(attention.read(*given), given, NO_EXTRAS.with_lse(), trained)

    @pytest.mark.usefixtures("directory")
    def test_its_kernels_are_started_with_the_forward_and_then_found(
        self, attention: flexgen.Attention, ahead: CompileAhead, found: list[bool], monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(launch, "make_submit", lambda kernel, device: kernel)  # there is no GPU to load it on
        self.prepared(attention, AuxRequest())
        assert len(ahead.started) == 4, "the driver, delta, dQ, and dK with dV"
        (kernels,) = attention._training._kernels.values()
        for kernel in (kernels.delta, *(one for one, _ in kernels.passes)):
            launcher = kernel.execute
            assert isinstance(launcher, launch.Launcher)
            launcher._load(0, frozenset(at for at, arg in enumerate(kernel.args) if arg.specialize))
        assert found == [True] * 3

    @pytest.mark.usefixtures("directory")
    def test_a_call_that_is_not_recorded_starts_nothing(self, attention: flexgen.Attention, ahead: CompileAhead):
        self.prepared(attention, None)
        assert not ahead.started

    @pytest.mark.usefixtures("directory")
    def test_where_the_forward_is_compiled_nothing_is_started(self, attention: flexgen.Attention, ahead: CompileAhead):
        lowered = attention.lower(*tensors(), target="sm_90")
        lowered.compile_job().run()
        self.prepared(attention, AuxRequest())
        assert not ahead.started and not attention._training._kernels

    @pytest.mark.usefixtures("directory")
    def test_a_backward_that_cannot_be_planned_fails_no_forward(self, attention, ahead: CompileAhead):
        attention = flexgen.compile(None, causal, {"BACKEND": "TRITON", "bwd_BLOCK_M1": 512, "bwd_BLOCK_N1": 512})
        self.prepared(attention, AuxRequest())
        assert not ahead.started


class TestNothingIsStarted:
    """Where there is no use in it, or no way to end it."""

    def refused(self, ahead: CompileAhead) -> bool:
        ahead.start(jobs()[1:])
        return not ahead.started

    @pytest.mark.usefixtures("directory")
    def test_where_the_environment_forbids_it(self, ahead: CompileAhead, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("FLEXGEN_COMPILE_WORKERS", "0")
        assert self.refused(ahead)

    @pytest.mark.usefixtures("directory")
    def test_with_one_processor(self, ahead: CompileAhead, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(compile_ahead, "usual_workers", lambda: 1)
        assert self.refused(ahead)

    @pytest.mark.usefixtures("directory")
    def test_in_a_program_that_embeds_python(self, ahead: CompileAhead, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(sys, "executable", "/usr/bin/blender")
        assert self.refused(ahead)

    @pytest.mark.usefixtures("directory")
    def test_in_a_daemon(self, ahead: CompileAhead, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
        assert self.refused(ahead)

    @pytest.mark.usefixtures("directory")
    def test_where_nothing_is_kept(self, ahead: CompileAhead, monkeypatch: pytest.MonkeyPatch):
        temporary = SourceCache(None)
        monkeypatch.setattr(compile_ahead, "source_cache", lambda: temporary)
        assert self.refused(ahead)


@pytest.mark.usefixtures("directory")
def test_processes_that_end_at_once_are_replaced_by_this_one(
    ahead: CompileAhead, found: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "python").symlink_to("/bin/false")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    _, delta, *_ = jobs()
    ahead.start([delta])
    delta.run()
    assert ahead.started and found == [False]


@pytest.mark.usefixtures("directory")
def test_no_process_that_can_be_started_is_needed(
    ahead: CompileAhead, found: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))  # there is none
    _, delta, *_ = jobs()
    ahead.start([delta])
    delta.run()
    assert ahead.started and found == [False]


def test_a_forked_process_waits_for_nobody(ahead: CompileAhead):
    ahead._done["key"] = compile_ahead.threading.Event()
    ahead.forget()
    ahead.wait("key")
    assert not ahead.started


def test_workers_import_no_torch(directory: Path):
    _, delta, *_ = jobs()
    program = (
        "import pickle, sys, flexgen.runtime.compile_worker as worker\n"
        "worker._compile(pickle.load(sys.stdin.buffer))\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(delta), capture_output=True, check=True)
    assert done.stdout.split() == [b"False"]
    assert is_known(delta) and directory.exists()


def test_the_number_of_workers_can_be_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLEXGEN_COMPILE_WORKERS", "3")
    assert compile_pool.usual_workers() == 3
    monkeypatch.setenv("FLEXGEN_COMPILE_WORKERS", "0")
    assert compile_pool.usual_workers() == 1, "pools that are asked for have one"
    monkeypatch.setenv("FLEXGEN_COMPILE_WORKERS", "many")
    assert 1 <= compile_pool.usual_workers() <= (os.cpu_count() or 1)

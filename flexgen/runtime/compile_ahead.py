"""Compiles kernels in other processes before they are needed, while this one compiles what it needs first.

The first also build what Triton loads kernels with. Whoever needs one of these waits for it and finds it in Triton's
cache on disk. Nothing depends on it: where no process can be started, or one fails, each kernel is compiled here when
it is needed.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flexgen.runtime.cache import source_cache
from flexgen.runtime.compile_job import CompileJob, DriverJob, Job
from flexgen.runtime.compile_key import is_compiled
from flexgen.runtime.compile_pool import CompilePool, usual_workers
from flexgen.runtime.environment import read_environment

_log = logging.getLogger("flexgen.build")
PATIENCE = 120.0  # seconds to wait for a kernel before compiling it here after all
PROGRAM = "flexgen.runtime.compile_worker"


class CompileAhead:
    """What other processes compile for this one.

    Attributes:
        started: keys of all jobs that were ever started.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done: dict[str, threading.Event] = {}
        self._pools: set[CompilePool[bool]] = set()

    @property
    def started(self) -> frozenset[str]:
        return frozenset(self._done)

    def start(self, jobs: Sequence[CompileJob]) -> None:
        """Begin to compile what is not compiled yet, each kernel in a process of its own; returns at once."""
        if not _can_start():
            return
        with self._lock:
            new: dict[str, Job] = {job.key: job for job in jobs if job.key not in self._done and not is_known(job)}
            if new and DriverJob.key not in self._done and any(job.target.backend == "cuda" for job in jobs):
                new = {DriverJob.key: DriverJob(), **new}  # what is needed first
            self._done |= {key: threading.Event() for key in new}
        if new:
            try:
                threading.Thread(target=self._compile, args=(new,), daemon=True, name="flexgen compile").start()
            except RuntimeError:  # Python is ending, or there are too many threads
                self._finish(new)

    def wait(self, key: str) -> None:
        """Wait until something is compiled, or has failed to be, if it was started."""
        done = self._done.get(key)
        if done is not None and not done.wait(PATIENCE):
            _log.info("a compiling process takes longer than %.0f s; compiling here", PATIENCE)

    def close(self) -> None:
        """End all processes."""
        for pool in list(self._pools):
            pool.close()

    def _compile(self, jobs: Mapping[str, Job]) -> None:
        pool = CompilePool(min(len(jobs), usual_workers()), PROGRAM, bool)
        self._pools.add(pool)
        keys = list(jobs)
        try:
            with pool:
                for number, answer in pool.compile(list(jobs.values())):
                    if isinstance(answer, str):  # told again, and located, when the kernel is compiled here
                        _log.debug("not compiled ahead: %s", answer)
                    self._done[keys[number]].set()
        except Exception as error:
            _log.debug("nothing more is compiled ahead: %s", error)
        finally:
            self._pools.discard(pool)
            self._finish(jobs)

    def _finish(self, jobs: Iterable[str]) -> None:
        for key in jobs:
            self._done[key].set()

    def forget(self) -> None:
        """Leave the processes to the one that started them: this one was forked from it."""
        self._lock, self._done, self._pools = threading.Lock(), {}, set()


def is_known(job: CompileJob) -> bool:
    """Whether a kernel is known to be compiled, told without Triton."""
    return is_compiled(source_cache().directory, job.key)


def _can_start() -> bool:
    """Whether there may be, and is any use in, other processes that compile."""
    if read_environment().compile_workers == 0 or usual_workers() < 2 or source_cache().is_temporary:
        return False
    # An embedded interpreter names the program that holds it; and what daemons start is nobody's to end.
    return Path(sys.executable or "").name.startswith("python") and not multiprocessing.current_process().daemon


AHEAD = CompileAhead()
atexit.register(AHEAD.close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=AHEAD.forget)

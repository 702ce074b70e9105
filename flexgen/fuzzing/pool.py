"""Fuzzes in several processes, replaces those that end, and reports the case that one died of."""

from __future__ import annotations

import dataclasses
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import flexgen
from flexgen.fuzzing.hunt import Failure, Plan
from flexgen.fuzzing.tally import Tally
from flexgen.fuzzing.worker import CASES
from flexgen.runtime.messages import receive, send

WORKER = ("-m", "flexgen.fuzzing.worker")
SEEDS_APART = 1 << 32  # between processes, which count on from theirs
GRACE_SECONDS = 120.0  # after the end of the time, for what a process is at


@dataclass(frozen=True, slots=True)
class _Ended:
    """A process has ended."""

    number: int


Event = Tally | Failure | _Ended


class FuzzPool:
    """Processes that fuzz; a context manager.

    They keep emitted sources and compiled kernels in a directory of their own, which goes with the pool.

    Args:
        plan: its cases, if limited, are shared out.
        jobs: how many processes.
    """

    def __init__(self, plan: Plan, jobs: int) -> None:
        self._plan, self._jobs = plan, jobs
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._end = None if plan.seconds is None else time.monotonic() + plan.seconds

    def __enter__(self) -> FuzzPool:
        self._directory = tempfile.TemporaryDirectory(prefix="flexgen-fuzz-")
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()
        self._directory.cleanup()

    def events(self) -> Iterator[Tally | Failure]:
        """Yield what the processes count and find, as it comes."""
        left = self._plan.cases
        started = 0
        while True:
            while len(self._running) < self._jobs and not self._is_over() and (left is None or left > 0):
                share = CASES if left is None else min(CASES, -(-left // (self._jobs - len(self._running))))
                left = None if left is None else left - share
                self._start(started, share)
                started += 1
            if not self._running:
                return
            event = self._next()
            if isinstance(event, _Ended):
                self._running.pop(event.number).wait()
            else:
                yield event

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() > self._end

    def _next(self) -> Event:
        """Return the next event; a process that is stuck long after the time is over is ended."""
        while True:
            try:
                return self._events.get(timeout=5.0)
            except queue.Empty:
                if self._end is not None and time.monotonic() > self._end + GRACE_SECONDS:
                    for process in self._running.values():
                        process.kill()

    def _start(self, number: int, cases: int) -> None:
        own = Path(self._directory.name) / str(number)
        own.mkdir()
        seconds = None if self._end is None else max(self._end - time.monotonic(), 0.0)
        plan = dataclasses.replace(
            self._plan, seed=self._plan.seed + number * SEEDS_APART, seconds=seconds, cases=cases
        )
        process = self._running[number] = _start(own)
        threading.Thread(target=self._listen, args=(number, process, plan, own / "case.py"), daemon=True).start()

    def _listen(self, number: int, process: subprocess.Popen[bytes], plan: Plan, note: Path) -> None:
        """Pass on what a process says; where it ends without a last word, the case that it was at is a failure."""
        assert process.stdin is not None and process.stdout is not None
        is_done = False
        try:
            send(process.stdin, plan)
            while process.poll() is None or process.stdout.readable():
                message = receive(process.stdout)
                if not isinstance(message, Tally | Failure):
                    break
                self._events.put(message)
            is_done = process.wait(timeout=GRACE_SECONDS) == 0  # on a busy machine ending takes long, too
        except (OSError, EOFError, ValueError, subprocess.TimeoutExpired):
            process.kill()
        if not is_done:
            script = note.read_text(encoding="utf-8") if note.exists() else ""
            self._events.put(Failure(f"the process ended with {process.wait()} while it ran this case", script))
        self._events.put(_Ended(number))


def _start(own: Path) -> subprocess.Popen[bytes]:
    root = str(Path(str(flexgen.__file__)).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "FLEXGEN_CACHE_DIR": str(own / "sources"),
        "TRITON_CACHE_DIR": str(own / "compiled"),
    }
    command = [sys.executable, "-P", *WORKER, str(own / "case.py")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

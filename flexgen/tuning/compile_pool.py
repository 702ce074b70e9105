"""Compiles many kernels at once, each in one of a few processes that live as long as the pool."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import flexgen
from flexgen.runtime.compile_job import CompileJob
from flexgen.tuning.cost import CompiledCost
from flexgen.tuning.worker import receive, send

MOST_WORKERS = 16
Outcome = CompiledCost | str


def usual_workers() -> int:
    """Return how many processes to compile in: the processors that this process may use, up to a limit."""
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(mine, MOST_WORKERS))


class CompilePool:
    """Processes that compile; a context manager.

    What they compile lies in Triton's cache on disk afterwards, where this process finds it.

    Args:
        workers: how many processes; they start when there is something to compile.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def compile(self, jobs: Sequence[CompileJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield the position of each job and its outcome, as they come."""
        todo: queue.SimpleQueue[tuple[int, CompileJob]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Outcome]] = queue.SimpleQueue()
        for numbered in enumerate(jobs):
            todo.put(numbered)
        while len(self._processes) < min(self._workers, len(jobs)):
            self._processes.append(_start())
        for process in self._processes:
            threading.Thread(target=_serve, args=(process, todo, done), daemon=True).start()
        for _ in jobs:
            yield done.get()


def _start() -> subprocess.Popen[bytes]:
    root = str(Path(str(flexgen.__file__)).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "flexgen.tuning.worker"]
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # compiling touches no GPU
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )


def _serve(
    process: subprocess.Popen[bytes],
    todo: queue.SimpleQueue[tuple[int, CompileJob]],
    done: queue.SimpleQueue[tuple[int, Outcome]],
) -> None:
    """Give a process one job after the other; jobs of one that died are told as failed."""
    while True:
        try:
            number, job = todo.get_nowait()
        except queue.Empty:
            return
        try:
            answer = _ask(process.stdin, process.stdout, job)
        except (OSError, EOFError, ValueError) as error:
            answer = f"the compiling process ended: {type(error).__name__}"
        done.put((number, answer))


def _ask(to: IO[bytes] | None, back: IO[bytes] | None, job: CompileJob) -> Outcome:
    assert to is not None and back is not None
    send(to, job)
    answer = receive(back)
    if not isinstance(answer, CompiledCost | str):
        raise EOFError
    return answer

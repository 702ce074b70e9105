"""Compiles many kernels at once, each in one of a few processes that live as long as the pool."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import flexgen
from flexgen.runtime.compile_job import Job
from flexgen.runtime.environment import read_environment
from flexgen.runtime.messages import receive, send

MOST_WORKERS = 16
Answer = TypeVar("Answer")


def usual_workers() -> int:
    """Return how many processes to compile in: FLEXGEN_COMPILE_WORKERS, else the processors that this process may use.

    At least one, and never more than a limit.
    """
    asked = read_environment().compile_workers
    mine = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(mine if asked is None else asked, MOST_WORKERS))


class CompilePool(Generic[Answer]):
    """Processes that compile; a context manager.

    What they compile lies in Triton's cache on disk afterwards, where this process finds it.

    Args:
        workers: how many processes; they start when there is something to compile.
        program: the module that each of them runs, by `compile_worker.serve`.
        answers: what it answers with.
    """

    def __init__(self, workers: int, program: str, answers: type[Answer]) -> None:
        self._workers, self._program, self._answers = workers, program, answers
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CompilePool[Answer]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with suppress(OSError):  # what a process that ended did not read
                        pipe.close()
        self._processes.clear()

    def compile(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Answer | str]]:
        """Yield the position of each job and its answer, or why it does not compile, as they come."""
        todo: queue.SimpleQueue[tuple[int, Job]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Answer | str]] = queue.SimpleQueue()
        for numbered in enumerate(jobs):
            todo.put(numbered)
        while len(self._processes) < min(self._workers, len(jobs)):
            self._processes.append(_start(self._program))
        for process in self._processes:
            threading.Thread(target=self._serve, args=(process, todo, done), daemon=True).start()
        for _ in jobs:
            yield done.get()

    def _serve(
        self,
        process: subprocess.Popen[bytes],
        todo: queue.SimpleQueue[tuple[int, Job]],
        done: queue.SimpleQueue[tuple[int, Answer | str]],
    ) -> None:
        """Give a process one job after the other; jobs of one that died are told as failed."""
        while True:
            try:
                number, job = todo.get_nowait()
            except queue.Empty:
                return
            answer: Answer | str
            try:
                answer = self._ask(process, job)
            except (OSError, EOFError, ValueError) as error:
                answer = f"the compiling process ended: {type(error).__name__}"
            done.put((number, answer))

    def _ask(self, process: subprocess.Popen[bytes], job: Job) -> Answer | str:
        assert process.stdin is not None and process.stdout is not None
        send(process.stdin, job)
        answer = receive(process.stdout)
        if not isinstance(answer, (self._answers, str)):
            raise EOFError
        return answer


def _start(program: str) -> subprocess.Popen[bytes]:
    root = str(Path(str(flexgen.__file__)).parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", program]
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}  # compiling touches no GPU
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )

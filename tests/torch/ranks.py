"""Processes that work together over gloo, kept for a whole test session; tests send them functions to run."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 2
TIMEOUT_S = 120


def _serve(rank: int, world: int, meeting: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    while (work := connection.recv()) is not None:
        function, arguments = work
        try:
            function(*arguments)
            connection.send(None)
        except BaseException:
            connection.send(traceback.format_exc())
    dist.destroy_process_group()


class Ranks:
    """The processes.

    Args:
        meeting: a file that does not exist yet, through which they find each other.
        world: how many.
    """

    def __init__(self, meeting: Path, world: int = WORLD) -> None:
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            own, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, str(meeting), theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(own)
            self._processes.append(process)

    def run(self, function: Callable[..., None], *arguments: object) -> None:
        """Run a function of a test module on every rank; fail with what a rank raised."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        found = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(2 * TIMEOUT_S), f"rank {rank} does not answer"
            found.append(pipe.recv())
        failed = [f"rank {rank}:\n{text}" for rank, text in enumerate(found) if text is not None]
        assert not failed, "\n".join(failed)

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()

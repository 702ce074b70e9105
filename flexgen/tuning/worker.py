"""A process that compiles: reads jobs from standard input, answers on standard output with what kernels cost.

Messages are pickles with their length before them, between a parent and the child that it started itself.
"""

from __future__ import annotations

import os
import pickle
import struct
import sys
from typing import IO

_LENGTH = struct.Struct("<Q")


def send(stream: IO[bytes], message: object) -> None:
    """Write one message."""
    data = pickle.dumps(message)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def receive(stream: IO[bytes]) -> object:
    """Return the next message; None at the end of the stream."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return pickle.loads(stream.read(_LENGTH.unpack(head)[0]))


def main() -> None:
    """Answer each job, a `CompileJob`, with a `CompiledCost`, or a text that says why it does not compile."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints goes elsewhere
    from flexgen.errors import FlexgenError
    from flexgen.runtime.compile_job import CompileJob
    from flexgen.runtime.resources import measure
    from flexgen.tuning.cost import cost_of

    while (job := receive(sys.stdin.buffer)) is not None:
        assert isinstance(job, CompileJob)
        answer: object
        try:
            answer = cost_of(measure(job.run()), job.target)
        except FlexgenError as error:
            answer = error.what
        send(answers, answer)


if __name__ == "__main__":
    main()

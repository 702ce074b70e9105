"""A process that compiles: reads jobs from standard input, and says on standard output when each is done.

What it compiles lies in Triton's cache on disk. It imports Triton and not torch, which takes longer to import than many
kernels take to compile.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from flexgen.errors import FlexgenError
from flexgen.runtime.compile_job import Job
from flexgen.runtime.messages import receive, send


def serve(answer_of: Callable[[Job], object]) -> None:
    """Answer each job, or tell with a text why it does not compile, until there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints goes elsewhere
    while (job := receive(sys.stdin.buffer)) is not None:
        assert isinstance(job, Job)
        answer: object
        try:
            answer = answer_of(job)
        except FlexgenError as error:
            answer = error.what
        send(answers, answer)


def _compile(job: Job) -> bool:
    from flexgen.runtime.launcher_ahead import build_launcher  # with Triton

    built = job.run()
    if built is not None:
        build_launcher(built)
    return True


if __name__ == "__main__":
    serve(_compile)

"""A process that fuzzes: reads one plan from standard input, answers with counts and failures until it is done."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flexgen.runtime.messages import receive, send

CASES = 2000  # of one process: the modules that it loads stay in its memory


def main() -> None:
    """Answer with a `Tally` after each run of Hypothesis and a `Failure` for each one found; `None` ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything prints goes elsewhere
    import torch

    from flexgen.fuzzing.hunt import Hunt, Plan

    torch.set_num_threads(1)
    plan, note = receive(sys.stdin.buffer), Path(sys.argv[1])
    assert isinstance(plan, Plan)
    hunt = Hunt(plan, before_case=lambda script: _note(note, script))
    for failure in hunt.failures():
        if failure is not None:
            send(answers, failure)
        send(answers, hunt.take_tally())
    send(answers, None)


def _note(path: Path, script: str) -> None:
    """Leave the script of the case that runs where it is found if the process dies of it."""
    path.write_text(script, encoding="utf-8")


if __name__ == "__main__":
    main()

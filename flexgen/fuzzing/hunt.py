"""Draws cases and runs them until the time is over; what fails is shrunk to a small script."""

from __future__ import annotations

import functools
import itertools
import linecache
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from flexgen.errors import CaptureError, FlexgenError, InternalError, KernelCompileError, KernelMemoryError
from flexgen.fuzzing.cases import Case, Scope, cases
from flexgen.fuzzing.check import check_call
from flexgen.fuzzing.script import script_of
from flexgen.fuzzing.tally import Tally

BATCH = 100  # cases of one run of Hypothesis: a failure ends a run, and the next one has another seed
SHRINKING_SECONDS = 60.0
MOST_OF_A_KIND = 3  # failures that look alike; more of them are counted alone
# What is wrong even where flexgen says so itself: drawn mods use only what is documented to compile.
_BUGS = (InternalError, KernelCompileError, KernelMemoryError, CaptureError)


@dataclass(frozen=True, slots=True)
class Failure:
    """A case that is wrong, as small as it could be made.

    Attributes:
        error: what was raised.
        script: runs it again.
    """

    error: str
    script: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to draw cases, and which.

    Attributes:
        seed: of the first run of Hypothesis; later ones count on from it.
        seconds, cases: whichever ends first ends the hunt; None for no limit.
    """

    scope: Scope
    seed: int
    seconds: float | None = None
    cases: int | None = None


class Hunt:
    """Runs a plan.

    Args:
        before_case: is told the script of each case before it runs.
    """

    def __init__(self, plan: Plan, before_case: Callable[[str], None] = lambda script: None) -> None:
        self.tally = Tally()
        self._counted = 0  # cases in tallies that were taken
        self._plan = plan
        self._before_case = before_case
        self._end = None if plan.seconds is None else time.monotonic() + plan.seconds
        self._device = "cuda" if plan.scope.cuda else "cpu"
        self._failed: dict[Case, str] = {}
        self._kinds: Counter[str] = Counter()
        self._shrinks_until = 0.0

    def take_tally(self) -> Tally:
        """Return what was counted since the last time."""
        self._counted += self.tally.cases
        taken, self.tally = self.tally, Tally()
        return taken

    def failures(self) -> Iterator[Failure | None]:
        """Yield each failure, and None after each run of Hypothesis without one."""
        for number in itertools.count():
            if self._is_over():
                return
            yield self._run(number)

    def _is_over(self) -> bool:
        enough = self._plan.cases is not None and self._counted + self.tally.cases >= self._plan.cases
        return enough or (self._end is not None and time.monotonic() > self._end)

    def _run(self, number: int) -> Failure | None:
        self._failed.clear()
        chosen = settings(
            max_examples=BATCH,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            verbosity=Verbosity.quiet,
            print_blob=False,
        )
        draw = seed(self._plan.seed + number * 1_000_003)(chosen(given(cases(self._plan.scope))(self._try)))
        try:
            draw()
        except Exception as error:
            if not self._failed:
                raise
            case, told = list(self._failed.items())[-1]
            first = f"Found by `flexgen fuzz`: {told.splitlines()[0]}"
            self._kinds[_kind(error)] += 1
            return Failure(told, script_of(case, self._device, _docstring(first)))
        return None

    def _try(self, case: Case) -> None:
        """Run one case, whether it is new or Hypothesis makes a failing one smaller."""
        is_shrinking = bool(self._failed)
        if is_shrinking and case not in self._failed and time.monotonic() > self._shrinks_until:
            return
        if not is_shrinking and self._is_over():
            return
        script = script_of(case, self._device)
        self._before_case(script)
        own = Tally()
        try:
            run_script(script, functools.partial(check_call, tally=own))
        except Exception as error:
            if isinstance(error, FlexgenError) and not isinstance(error, _BUGS):
                own.refused[f"{type(error).__name__}: {error.what}"] += 1
            elif self._kinds[_kind(error)] >= MOST_OF_A_KIND:
                own.repeated += 1
            else:
                self._note(case, error)
                raise
        if not is_shrinking:
            own.cases += 1
            self.tally.add(own)

    def _note(self, case: Case, error: Exception) -> None:
        if not self._failed:
            self._shrinks_until = time.monotonic() + SHRINKING_SECONDS
        self._failed.pop(case, None)  # the last one is the one that Hypothesis ends with
        self._failed[case] = f"{type(error).__name__}: {error}"


def _kind(error: Exception) -> str:
    """Return what tells failures of one cause from those of another, as far as a text can: it without its numbers."""
    return re.sub(r"[-+]?\d[\d.e+-]*", "N", f"{type(error).__name__}: {error}".partition("\n")[0])


def _docstring(line: str) -> str:
    return line.replace("\\", "/").replace('"', "'")[:110]


_numbers = itertools.count()


def run_script(script: str, check: Callable[..., None]) -> None:
    """Run the test of a script with another `check`; Python's tracebacks and flexgen's errors show its lines."""
    filename = f"<case {next(_numbers)} of flexgen fuzz>"
    namespace: dict[str, object] = {"__name__": "case"}
    linecache.cache[filename] = (len(script), None, script.splitlines(keepends=True), filename)
    try:
        exec(compile(script, filename, "exec", dont_inherit=True), namespace)
        test = namespace["test_case"]
        assert callable(test)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            test(check=check)
    finally:
        del linecache.cache[filename]

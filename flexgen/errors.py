"""Every error flexgen raises on purpose: what went wrong, where in the user's source, why, and the fix."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LONGEST_LINE = 160  # of the user's source, in a message


@dataclass(frozen=True, slots=True)
class SourceSpan:
    """A range of the user's source. Lines start at 1, columns at 0; `text` is the first line, verbatim."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    text: str

    def render(self) -> str:
        """Return `file:line:column`, the line, and carets below the span, as a compiler would print it.

        Of a very long line only the part around the span is shown.
        """
        head = f"{self.file}:{self.line}:{self.column + 1}"
        if not self.text.strip():
            return head
        indent = len(self.text) - len(self.text.lstrip())
        shown = self.text.strip()
        start = max(self.column - indent, 0)
        stop = self.end_column - indent if self.end_line == self.line else len(shown)
        stop = max(min(stop, len(shown)), start + 1)
        if len(shown) > LONGEST_LINE:
            first = max(min(start - LONGEST_LINE // 4, len(shown) - LONGEST_LINE), 0)
            last = first + LONGEST_LINE
            before, after = "..." if first else "", "..." if last < len(shown) else ""
            shown = before + shown[first:last] + after
            start, stop = start - first + len(before), min(stop, last) - first + len(before)
        carets = " " * start + "^" * (stop - start)
        return f"{head}\n    {shown}\n    {carets}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says of itself; of a user's own class that may fail."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        return "its text cannot be read"
    return lines[0] if lines else ""


class FlexgenError(RuntimeError):
    """Base of all errors of flexgen.

    A RuntimeError, as what torch raises where it compiles; errors about arguments are ValueErrors too.

    Args:
        what: one line that says what is wrong, with the offending value.
        where: the user's source, if the error belongs to a place in it.
        why: the reason, in a sentence or two.
        fix: what the user can change.
    """

    def __init__(
        self, what: str, *, where: SourceSpan | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        # No call of RuntimeError's own, through which torch.compile cannot trace; the text is that of __str__.
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        return self.render()

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, dict(vars(self)))

    def render(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append("  at " + self.where.render().replace("\n", "\n  "))
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def _restored(kind: type[FlexgenError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> FlexgenError:
    """Return an error as it was in another process."""
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class CaptureError(FlexgenError):
    """A mod could not be traced: it raised, branched on a traced value, or returned the wrong thing."""


class UnsupportedOpError(CaptureError):
    """A mod uses operations that flexgen does not compile; all of them are listed in one message."""

    def __init__(self, problems: Sequence[FlexgenError]) -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.what, where=first.where, why=first.why, fix=first.fix)

    def render(self) -> str:
        count = len(self.problems)
        head = [f"{count} operations of this mod cannot be compiled:"] if count > 1 else []
        return "\n".join(head + [problem.render() for problem in self.problems])


class OptionError(FlexgenError, ValueError):
    """A kernel option is unknown, malformed, contradictory, or cannot be honoured for this problem."""


class UnsupportedProblemError(FlexgenError, ValueError):
    """The tensors of a call (shapes, devices, block masks) do not form an attention problem flexgen computes."""


class ProblemTypeError(UnsupportedProblemError, TypeError):
    """The tensors of a call have dtypes or types that do not go together."""


class ModPicklingError(FlexgenError, pickle.PicklingError):
    """An Attention cannot be pickled, because a mod could not be found again by its name."""


class NoFeasiblePlanError(FlexgenError):
    """No choice of tiles fits the target's shared memory and registers, or a forced one does not."""


class OutOfResourcesError(NoFeasiblePlanError):
    """A compiled kernel needs more of a device than it has.

    Args:
        entry: the kernel's name.
        resource: of what, such as "shared memory".
        required, available: how much; of memory in bytes.
    """

    def __init__(self, entry: str, resource: str, required: int, available: int, *, why: str, fix: str) -> None:
        self.entry, self.resource, self.required, self.available = entry, resource, required, available
        unit = "bytes of " if self.is_of_shared_memory else ""
        what = f"{entry} needs {required} {unit}{resource}, and the device has {available}"
        super().__init__(what, why=why, fix=fix)

    @property
    def is_of_shared_memory(self) -> bool:
        return self.resource == "shared memory"


class KernelCompileError(FlexgenError):
    """Triton, or the assembler behind it, refused an emitted kernel."""


class KernelMemoryError(FlexgenError, IndexError):
    """An interpreted kernel touched memory outside of the tensors it was given."""


class IRTextError(FlexgenError, ValueError):
    """A text that should hold the IR of mods does not parse."""


HOW_TO_REPORT = (
    "this is a bug of flexgen: please report it, with this whole message, the mods, and the versions of flexgen, torch "
    "and triton"
)


class InternalError(FlexgenError):
    """flexgen broke a rule of its own; the message holds what a report needs, and asks for it."""

    def __init__(
        self, what: str, *, where: SourceSpan | None = None, why: str | None = None, fix: str = HOW_TO_REPORT
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)

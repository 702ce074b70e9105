"""Which chunks of a sequence each rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flexgen.errors import OptionError, UnsupportedProblemError

AssignmentName = Literal["head-tail", "contiguous"]
NAMES: tuple[AssignmentName, ...] = get_args(AssignmentName)


@dataclass(frozen=True, slots=True)
class Assignment:
    """Chunks of equal length, each held by one rank; a rank holds its chunks one behind the other, in ascending order.

    Attributes:
        name: "head-tail", where rank r of R holds chunks r and 2 R - 1 - r of 2 R, so that a causal mask gives every
            rank the same work; or "contiguous", where it holds chunk r of R.
        ranks: R.
    """

    name: AssignmentName
    ranks: int

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return self.per_rank * self.ranks

    @property
    def per_rank(self) -> int:
        """How many chunks a rank holds."""
        return 2 if self.name == "head-tail" else 1

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """Return the chunks that a rank holds, in the order in which it holds them."""
        return (rank,) if self.per_rank == 1 else (rank, self.chunks - 1 - rank)

    def why(self) -> str:
        """Return what the assignment does, for people."""
        if self.per_rank == 1:
            return f"rank r holds chunk r of {self.chunks}"
        return f"rank r holds chunks r and {self.chunks - 1} - r of {self.chunks}"


def assignment_named(name: str, ranks: int) -> Assignment:
    """Return the assignment of a name.

    Raises:
        OptionError: there is none of that name.
    """
    if name not in NAMES:
        raise OptionError(f"assignment={name!r} is none", fix=f"choose one of {', '.join(map(repr, NAMES))}")
    return Assignment(name, ranks)


def check_cut(what: str, length: int, assignment: Assignment) -> None:
    """Refuse a whole sequence that cannot be cut in equal chunks.

    Args:
        what: is cut, for people.

    Raises:
        UnsupportedProblemError: says to which length it could be padded.
    """
    chunks = assignment.chunks
    if length % chunks:
        longer, shorter = -(-length // chunks) * chunks, length // chunks * chunks
        raise UnsupportedProblemError(
            f"{what} of {length} tokens cannot be cut in {chunks} equal chunks",
            why=f"with assignment={assignment.name!r}, {assignment.why()}, all of one length",
            fix=f"pad it to {longer} tokens and let the mask hide what was added (behind a causal mask nothing sees "
            f"it, and its rows of the output can be dropped), or shorten it to {shorter}",
        )

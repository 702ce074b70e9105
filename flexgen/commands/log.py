"""FLEXGEN_LOG: what the command line shows of what flexgen logs."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator

from flexgen.errors import OptionError
from flexgen.runtime.environment import read_environment

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


@contextlib.contextmanager
def logging_as_asked() -> Iterator[None]:
    """Write what is logged to standard error, from the level that FLEXGEN_LOG names; without it nothing.

    Raises:
        OptionError: FLEXGEN_LOG is no level.
    """
    asked = read_environment().log
    if not asked:
        yield
        return
    if asked.lower() not in LEVELS:
        raise OptionError(
            f"FLEXGEN_LOG={asked!r} is no level",
            why="it says from which level on to show what flexgen logs",
            fix=f"set it to one of {', '.join(LEVELS)}, or unset it",
        )
    logger, handler = logging.getLogger("flexgen"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(LEVELS[asked.lower()])
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)

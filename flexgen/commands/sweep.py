"""Option settings side by side: `NAME=VALUE,VALUE`, and what follows from several of them."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from flexgen.commands.arguments import parse_setting
from flexgen.errors import OptionError
from flexgen.tuning.settings import Settings

DEFAULT = "default"  # as a value: flexgen decides
MOST = 64

Sweep = tuple[str, tuple[object, ...]]


def parse_sweep(text: str) -> Sweep:
    """Return an option's name and its values."""
    name, equals, values = text.partition("=")
    if not equals or not name or not all(values.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE,VALUE,...")
    return name, tuple(parse_setting(f"{name}={value}")[1] for value in values.split(","))


def settings_of(sweeps: Sequence[Sweep]) -> list[Settings]:
    """Return every combination of the values; what is left to flexgen is left out.

    Raises:
        OptionError: there are too many.
    """
    names = [name for name, _ in sweeps]
    combinations = list(itertools.product(*(values for _, values in sweeps)))
    if len(combinations) > MOST:
        raise OptionError(
            f"{len(combinations)} combinations of {', '.join(names)} are more than {MOST}",
            why="each of them is compiled",
            fix="compare fewer values at a time",
        )
    made = [dict(zip(names, values, strict=True)) for values in combinations]
    return [{name: value for name, value in each.items() if value != DEFAULT} for each in made]


def settings_text(settings: Settings) -> str:
    """Return settings as the user writes them."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or DEFAULT

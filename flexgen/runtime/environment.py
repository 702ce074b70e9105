"""The one place where flexgen reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says.

    Attributes:
        cache_dir: where emitted sources are kept: FLEXGEN_CACHE_DIR, else `flexgen` in XDG_CACHE_HOME or ~/.cache;
            None when the user has no home directory.
        triton_interprets: whether TRITON_INTERPRET makes every `triton.jit` function an interpreted one, which leaves
            nothing to compile.
        triton_cache_is_chosen: whether a variable of Triton's says where and how it keeps what it compiles.
        compile_workers: FLEXGEN_COMPILE_WORKERS, how many processes may compile beside this one, 0 for none; None where
            it is not set, and the processors decide.
        log: FLEXGEN_LOG, which the command line takes for what to log; "" by default.
    """

    cache_dir: Path | None
    triton_interprets: bool
    triton_cache_is_chosen: bool
    log: str
    compile_workers: int | None = None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables, those of the process by default."""
    variables = os.environ if variables is None else variables
    return Environment(
        cache_dir=_cache_dir(variables),
        compile_workers=_count(variables.get("FLEXGEN_COMPILE_WORKERS", "")),
        log=variables.get("FLEXGEN_LOG", ""),
        triton_cache_is_chosen=any(variables.get(name) for name in _TRITON_CACHE),
        triton_interprets=variables.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"),
    )


_TRITON_CACHE = ("TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_HOME")


def _count(text: str) -> int | None:
    """Return a number of processes; None for what is none, as an empty text."""
    return int(text) if text.strip().isdecimal() else None


def _cache_dir(variables: Mapping[str, str]) -> Path | None:
    if chosen := variables.get("FLEXGEN_CACHE_DIR"):
        return Path(chosen).expanduser()
    shared = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # the XDG specification tells readers to ignore relative paths
        return Path(shared) / "flexgen"
    try:
        return Path.home() / ".cache" / "flexgen"
    except RuntimeError:
        return None

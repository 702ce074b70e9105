"""Names for values: unique, safe ASCII identifiers, the user's own where there is one."""

from __future__ import annotations

import keyword
import re
import unicodedata
from collections.abc import Iterable

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = frozenset({"inf", "nan", "buffers", "scalars"})  # by the IR's text, beside Python's keywords
_LONGEST = 24


def is_safe(name: str) -> bool:
    """Whether the name is an ASCII identifier that is neither a keyword of Python nor reserved by the IR's text."""
    return bool(_IDENTIFIER.fullmatch(name)) and not keyword.iskeyword(name) and name not in _RESERVED


def safe_name(wanted: str, *, longest: int = _LONGEST) -> str:
    """Return a safe name close to `wanted`, of at most `longest` characters: `größe` becomes `grosse`."""
    folded = unicodedata.normalize("NFKD", wanted.replace("ß", "ss"))
    base = "".join(char for char in folded if not unicodedata.combining(char))
    base = re.sub(r"[^A-Za-z0-9_]", "_", base)[:longest] or "value"
    base = f"_{base}"[:longest] if base[0].isdigit() else base
    return base if is_safe(base) else f"{base[: longest - 1]}_"


class Names:
    """Hands out names, each once: `offset`, `offset_2`, `offset_3`."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._count: dict[str, int] = {}

    def unique(self, wanted: str) -> str:
        """Return `wanted`, made safe, with a number appended if it is taken."""
        base = safe_name(wanted)
        name = base
        while name in self._taken:
            self._count[base] = self._count.get(base, 1) + 1
            name = f"{base}_{self._count[base]}"
        self._taken.add(name)
        return name

    def temporary(self) -> str:
        """Return the next of `v1`, `v2`, ... that is free."""
        while True:
            self._count[""] = self._count.get("", 0) + 1
            name = f"v{self._count['']}"
            if name not in self._taken:
                self._taken.add(name)
                return name

"""Names for captured values: ASCII identifiers that collide with nothing in emitted code."""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

from flexgen.ir.graph import INPUT_AXES

# Names that mods, templates and Triton's language own. A captured value never takes one of them.
RESERVED: frozenset[str] = frozenset(
    {"tl", "triton", "torch", "math", "libdevice", "gl", "self", "scale", "query", "key", "value", "out", "lse"}
    | {"q", "k", "v", "acc", "mask", "row_max", "row_sum", "alpha", "p", "scores", "q_start", "kv_start", "head_dim"}
    | {"Q", "K", "V", "M", "N", "B", "H", "Hq", "Hkv", "Z", "LSE", "MAX", "DELTA", "DO", "DQ", "DK", "DV", "OUT"}
    | {"inf", "nan", "buffers", "scalars"}  # the IR's text
    | set(INPUT_AXES)
    | set(keyword.kwlist)
    | set(keyword.softkwlist)
    | set(dir(builtins))
)
# Spelled like a template variable (BLOCK_M, SM_SCALE, num_warps): upper case with an underscore, or a launch option.
_TEMPLATE_LIKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+|num_warps|num_stages|num_ctas|stride_\w+|\w+_ptr")


def _ascii_letter(char: str) -> str:
    """Spell one character in ASCII: a decomposition if there is one, else the last word of its Unicode name."""
    plain = unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()
    if plain:
        return plain
    words: list[str] = re.findall(r"[A-Za-z0-9]+", unicodedata.name(char, f"u{ord(char):x}"))
    return words[-1].lower()


def sanitise(name: str, fallback: str) -> str:
    """Return `name` as an ASCII identifier; `fallback` where nothing of it is left."""
    spelled = "".join(char if char.isascii() else _ascii_letter(char) for char in name)
    cleaned = re.sub(r"\W+", "_", spelled).strip("_")
    if not cleaned:
        return fallback
    return f"{fallback}_{cleaned}" if cleaned[0].isdigit() else cleaned


class NameTable:
    """Hands out unique names; `suffix` tells apart a captured value that wants a reserved name."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def claim(self, wanted: str, *, suffix: str) -> str:
        name = sanitise(wanted, suffix)
        if name in RESERVED or _TEMPLATE_LIKE.fullmatch(name):
            name = f"{name}_{suffix}"
        unique, count = name, 1
        while unique in self._taken:
            count += 1
            unique = f"{name}_{count}"
        self._taken.add(unique)
        return unique

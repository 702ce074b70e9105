"""Which Gluon kernels were checked on a GPU: tests/gpu_verified.json, by a digest of each kernel's code."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path
from typing import Any

from flexgen.codegen.dialects.gluon import spelling_of

VERIFIED = Path(__file__).parents[1] / "tests" / "gpu_verified.json"


def code_digest(text: str) -> str:
    """Return a digest of a kernel's code: neither comments nor docstrings nor line breaks change it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


def record(results: Path) -> None:
    """Write what a run has checked; what others have of the other direction, or for other names of Gluon's, stays."""
    found = json.loads(results.read_text())
    about = {name: found["environment"][name] for name in ("device", "date", "torch", "triton")}
    good = [row for row in found["said"] if row.get("ok")]
    kernels = {
        digest: {"check": row["check"], "kernel": kernel, "error": round(row["error"], 5), **about}
        for row in good
        for kernel, digest in row["digests"].items()
    }
    forms = {_form(entry) for entry in kernels.values()}
    kept = {digest: entry for digest, entry in verified().items() if _form(entry) not in forms}
    VERIFIED.write_text(json.dumps(dict(sorted((kept | kernels).items())), indent=1) + "\n")
    print(f"{len(kernels)} kernels of this run in {VERIFIED}, {len(kept)} others kept")


def verified() -> dict[str, Any]:
    """Return the entries by digest."""
    found: dict[str, Any] = json.loads(VERIFIED.read_text())
    return found


def _form(entry: dict[str, Any]) -> tuple[str, str]:
    """Return the direction of a kernel, and the spelling of Gluon that it is written in."""
    return str(entry.get("kernel", "forward")).partition("_")[0], spelling_of(entry["triton"])

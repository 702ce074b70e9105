"""What one mod's golden is made from: a builder of the mod, whose source is shown, and the problem around it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import flexgen
from flexgen.lowered import Lowered
from tests.goldens.changing import lower_after_change

Mod = Callable[..., Any]
LENGTH = 1024


@dataclass(frozen=True, slots=True)
class ModCase:
    """A mod and how to lower it.

    Attributes:
        build: returns the mod; or a generator that yields it, is lowered once there, and again after it has ended.
        dtype: of query, key and value.
        options: as the user gives them.
    """

    build: Callable[[], Any]
    dtype: torch.dtype = torch.bfloat16
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.build.__name__

    @property
    def source(self) -> str:
        """The body of the builder: what a user would write, without returning it."""
        text = textwrap.dedent(inspect.getsource(self.build))
        definition = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
        body = text.splitlines()[definition.body[0].lineno - 1 :]
        shown = [line for line in body if line not in ("    return mod", "    yield mod")]
        return textwrap.dedent("\n".join(shown)).rstrip() + "\n"

    def lower(self, target: str) -> Lowered:
        tensor = torch.empty(2, 4, LENGTH, 64, dtype=self.dtype, device="meta")
        return lower_after_change(
            self.build, self._compile, lambda attention: attention.lower(tensor, tensor, tensor, target=target)
        )

    def _compile(self, mod: Mod) -> flexgen.Attention:
        options = {"BACKEND": "TRITON", **self.options}  # plain Triton's words, which Gluon's are translated from
        if len(inspect.signature(mod).parameters) == 5:
            return flexgen.compile(mod, None, options)
        return flexgen.compile(None, mod, options)


def case(**problem: Any) -> Callable[[Callable[[], Any]], ModCase]:
    """Turn a builder into the case named after it."""
    return lambda build: ModCase(build, **problem)

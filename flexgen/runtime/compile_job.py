"""What another process is to compile, as values that pass between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flexgen.codegen.source import KernelSource
from flexgen.lowering.targets import Target
from flexgen.runtime.compile_key import compile_key
from flexgen.runtime.load import module_name, module_of

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary


@dataclass(frozen=True, slots=True)
class DriverJob:
    """What Triton builds before it loads a first kernel on an NVIDIA GPU."""

    key: ClassVar[str] = "driver"

    def run(self) -> None:
        """Build it into Triton's cache on disk."""
        from flexgen.runtime.launcher_ahead import build_driver  # with Triton

        build_driver()


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A kernel to compile.

    Attributes:
        options: of Triton's compiler, num_warps and num_stages among them.
        divisible: positions of arguments that are multiples of 16.
    """

    source: KernelSource
    target: Target
    options: tuple[tuple[str, int], ...]
    divisible: frozenset[int]

    @property
    def key(self) -> str:
        """What tells it from other compilations."""
        source, name = self.source, module_name(self.source.text)
        return compile_key(name, source.entry, source.args, self.target.name, dict(self.options), self.divisible)

    def run(self) -> Binary:
        """Compile, through Triton's cache on disk.

        Raises:
            KernelCompileError: Triton or the assembler refused the kernel.
        """
        from flexgen.runtime.build import compile_entry  # triton is absent on some systems

        options = dict(self.options)
        return compile_entry(
            module_of(self.source),
            self.source.entry,
            self.source.args,
            self.target,
            num_warps=options.pop("num_warps"),
            num_stages=options.pop("num_stages"),
            extra_options=options,
            divisible=self.divisible,
            line_map=self.source.line_map,
        )


Job = DriverJob | CompileJob

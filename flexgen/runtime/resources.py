"""What a compiled kernel costs: registers, spills, shared memory and the instructions of its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from triton import knobs

from flexgen.errors import InternalError, KernelCompileError
from flexgen.runtime.build import Binary
from flexgen.runtime.machine_code import (
    LOCAL,
    MATRIX,
    Instruction,
    Opcodes,
    main_loops,
    opcodes,
    parse_amdgcn,
    parse_sass,
)


@dataclass(frozen=True, slots=True)
class Resources:
    """The costs of one kernel.

    Attributes:
        registers: of one thread (vector registers, accumulation registers included, on AMD).
        spill_stores, spill_loads: bytes of one thread that do not fit in registers, as the assembler counts its
            stores and loads; on AMD, four bytes for each spilled vector register in both.
        stack_bytes: local (scratch) memory of one thread, spills included.
        shared_bytes: shared memory (LDS) of one program.
        code: the opcodes of the machine code.
        loops: those of each innermost loop that holds matrix instructions, the one that needs the fewest others first:
            it walks the tiles that need no mask, where they are walked apart. With warp specialisation each
            partition has loops of its own.
        spilled_lines: how many loads and stores of local memory each line of the emitted module has.
        num_warps: of one program, those of all partitions.
        warnings: what the assembler said, such as that it serialised the matrix instructions.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    code: Opcodes
    loops: tuple[Opcodes, ...]
    spilled_lines: Mapping[int, int]
    num_warps: int
    warnings: tuple[str, ...]

    @property
    def instructions(self) -> Mapping[str, int]:
        """How often each opcode occurs in the machine code, modifiers included, such as `MUFU.EX2`."""
        return self.code.counts

    def count(self, *opcodes: str) -> int:
        """Return how many instructions have one of these opcodes: see `Opcodes.count`."""
        return self.code.count(*opcodes)

    @property
    def main_loop(self) -> Opcodes | None:
        """The opcodes of the first of `loops`."""
        return self.loops[0] if self.loops else None

    @property
    def matrix_instructions(self) -> int:
        """Tensor-core (matrix-core) instructions: mma, wgmma, tcgen05 or mfma."""
        return self.code.count(*MATRIX)

    @property
    def local_memory_instructions(self) -> int:
        """Loads and stores of local (scratch) memory: spills, and arrays indexed at run time."""
        return self.code.count(*LOCAL)


def measure(binary: Binary) -> Resources:
    """Return the resources of a compiled kernel; runs the assembler and disassembler that Triton carries.

    Raises:
        KernelCompileError: one of those tools is missing or failed.
    """
    match binary.backend:
        case "cuda":
            return _measure_cuda(binary)
        case "hip":
            return _measure_amd(binary)
    raise InternalError(f"no resources are known for backend {binary.backend!r}")


# NVIDIA.


def _measure_cuda(binary: Binary) -> Resources:
    with tempfile.TemporaryDirectory(prefix="flexgen-") as name:
        directory = Path(name)
        usage, code = _disassemble(binary, directory)
        log = _assemble_again(binary, directory)
    return Resources(
        registers=_number(r"\bREG:(\d+)", usage),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        stack_bytes=_number(r"\bSTACK:(\d+)", usage),
        shared_bytes=binary.shared_bytes,
        code=opcodes(code),
        loops=main_loops(code),
        spilled_lines=_spilled_lines(code),
        num_warps=binary.num_warps,
        warnings=_warnings(log),
    )


def _disassemble(binary: Binary, directory: Path) -> tuple[str, list[Instruction]]:
    """Return the resource usage of a cubin, as text, and its machine code."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(_bytes(binary, "cubin"))
    usage = _run(knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin))
    return usage, parse_sass(_run(knobs.nvidia.nvdisasm.path, "-c", "-g", str(cubin)))


def _assemble_again(binary: Binary, directory: Path) -> str:
    """Return the assembler's verbose log, which Triton throws away: the log alone tells spills and warnings."""
    ptx = directory / "kernel.ptx"
    ptx.write_text(_text(binary, "ptx"))
    metadata = binary.metadata
    capability = int(str(metadata["arch"]).removeprefix("sm"))
    ptxas = _nvidia_compiler().get_ptxas(capability).path  # which of two depends on the version of Triton
    arguments = ["-v", "-lineinfo", f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"]
    arguments += [] if metadata["enable_fp_fusion"] else ["--fmad=false"]
    arguments += str(metadata["ptx_options"]).split() if metadata.get("ptx_options") else []
    arguments += _register_allocation()
    return _run(ptxas, *arguments, str(ptx), "-o", str(directory / "again.cubin"))


@cache
def _register_allocation() -> list[str]:
    """Return the register allocator's option that this version of Triton passes, if it passes one."""
    found = re.search(r"--regAllocOptLevel=\d", Path(str(_nvidia_compiler().__file__)).read_text())
    return [found.group()] if found else []


def _nvidia_compiler() -> Any:
    from triton.backends.nvidia import compiler  # the backend is there only where Triton was built with it

    return compiler


def _warnings(log: str) -> tuple[str, ...]:
    """Return the assembler's warnings and advisories, each once."""
    lines = (line.strip() for line in log.splitlines())
    told = (line for line in lines if "warning" in line or "(C7" in line or "Potential Performance Loss" in line)
    return tuple(dict.fromkeys(told))


# AMD.


def _measure_amd(binary: Binary) -> Resources:
    assembly = _text(binary, "amdgcn")
    code = parse_amdgcn(assembly)
    spilled = 4 * _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return Resources(
        registers=_number(r"\.vgpr_count:\s*(\d+)", assembly),
        spill_stores=spilled,
        spill_loads=spilled,
        stack_bytes=_number(r"\.private_segment_fixed_size:\s*(\d+)", assembly),
        shared_bytes=binary.shared_bytes,
        code=opcodes(code),
        loops=main_loops(code),
        spilled_lines=_spilled_lines(code),
        num_warps=binary.num_warps,
        warnings=(),
    )


# Reading.


def _spilled_lines(code: Sequence[Instruction]) -> Mapping[int, int]:
    """Return how many loads and stores of local memory stand at each emitted line, the most first."""
    lines = Counter(each.line for each in code if each.line is not None and opcodes([each]).count(*LOCAL))
    return MappingProxyType({line: number for line, number in lines.most_common() if line is not None})


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise KernelCompileError(f"cannot find {pattern!r} in what the assembler printed")
    return int(found.group(1))


def _text(binary: Binary, stage: str) -> str:
    text = binary.stages[stage]
    assert isinstance(text, str)
    return text


def _bytes(binary: Binary, stage: str) -> bytes:
    data = binary.stages[stage]
    assert isinstance(data, bytes)
    return data


def _run(*command: str) -> str:
    """Return what a tool printed, errors included."""
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        output = getattr(error, "output", None) or str(error)
        raise KernelCompileError(f"{command[0]} failed", why=output.strip().splitlines()[-1]) from error
    return done.stdout

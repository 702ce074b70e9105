"""What a compiled kernel costs: registers, spills, shared memory and the instructions of its machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

from triton import knobs

from flexgen.errors import InternalError, KernelCompileError
from flexgen.runtime.build import Binary


@dataclass(frozen=True, slots=True)
class Resources:
    """The costs of one kernel.

    Attributes:
        registers: of one thread (vector registers, accumulation registers included, on AMD).
        spill_stores, spill_loads: bytes of one thread that do not fit in registers, as the assembler counts its
            stores and loads; on AMD, four bytes for each spilled vector register in both.
        stack_bytes: local (scratch) memory of one thread, spills included.
        shared_bytes: shared memory (LDS) of one program.
        instructions: how often each opcode occurs in the machine code, modifiers included, such as `MUFU.EX2`.
        warnings: what the assembler said, such as that it serialised the matrix instructions.
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_bytes: int
    instructions: Mapping[str, int]
    warnings: tuple[str, ...]

    def count(self, *prefixes: str) -> int:
        """Return how many instructions have an opcode that is one of `prefixes`, whatever its modifiers.

        `count("MUFU.EX2")` counts `MUFU.EX2` and `MUFU.EX2.F16`, `count("LDG", "STG")` global loads and stores.
        """
        dotted = tuple(prefix + "." for prefix in prefixes)
        matching = (name for name in self.instructions if name in prefixes or name.startswith(dotted))
        return sum(self.instructions[name] for name in matching)

    @property
    def matrix_instructions(self) -> int:
        """Tensor-core (matrix-core) instructions: mma, wgmma, tcgen05 or mfma."""
        amd = sum(number for name, number in self.instructions.items() if name.startswith(("v_mfma", "v_smfmac")))
        return amd + self.count("HMMA", "IMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTCHMMA", "UTCQMMA")

    @property
    def local_memory_instructions(self) -> int:
        """Loads and stores of local (scratch) memory: spills, and arrays indexed at run time."""
        amd = sum(number for name, number in self.instructions.items() if name.startswith("scratch_"))
        return amd + self.count("LDL", "STL")


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
        usage, machine_code = _disassemble(binary, directory)
        log = _assemble_again(binary, directory)
    return Resources(
        registers=_number(r"\bREG:(\d+)", usage),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        stack_bytes=_number(r"\bSTACK:(\d+)", usage),
        shared_bytes=binary.shared_bytes,
        instructions=MappingProxyType(_count_sass(machine_code)),
        warnings=_warnings(log),
    )


def _disassemble(binary: Binary, directory: Path) -> tuple[str, str]:
    """Return the resource usage and the machine code of a cubin, as text."""
    cubin = directory / "kernel.cubin"
    cubin.write_bytes(_bytes(binary, "cubin"))
    tool = knobs.nvidia.cuobjdump.path
    return _run(tool, "-res-usage", str(cubin)), _run(tool, "-sass", str(cubin))


def _assemble_again(binary: Binary, directory: Path) -> str:
    """Return the assembler's verbose log, which Triton throws away: the log alone tells spills and warnings."""
    ptx = directory / "kernel.ptx"
    ptx.write_text(_text(binary, "ptx"))
    metadata = binary.metadata
    capability = int(str(metadata["arch"]).removeprefix("sm"))
    ptxas = (knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas).path
    arguments = ["-v", "-lineinfo", f"--gpu-name=sm_{capability}{'a' if capability >= 90 else ''}"]
    arguments += [] if metadata["enable_fp_fusion"] else ["--fmad=false"]
    arguments += str(metadata["ptx_options"]).split() if metadata.get("ptx_options") else []
    arguments += _register_allocation()
    return _run(ptxas, *arguments, str(ptx), "-o", str(directory / "again.cubin"))


@cache
def _register_allocation() -> list[str]:
    """Return the register allocator's option that this version of Triton passes, if it passes one."""
    from triton.backends.nvidia import compiler  # the backend is there only where Triton was built with it

    found = re.search(r"--regAllocOptLevel=\d", Path(str(compiler.__file__)).read_text())
    return [found.group()] if found else []


_SASS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)", re.MULTILINE)


def _count_sass(text: str) -> dict[str, int]:
    """Count opcodes; NOPs are padding."""
    counts = Counter(match.group(1) for match in _SASS.finditer(text))
    counts.pop("NOP", None)
    return dict(sorted(counts.items()))


def _warnings(log: str) -> tuple[str, ...]:
    """Return the assembler's warnings and advisories, each once."""
    lines = (line.strip() for line in log.splitlines())
    told = (line for line in lines if "warning" in line or "(C7" in line or "Potential Performance Loss" in line)
    return tuple(dict.fromkeys(told))


# AMD.


def _measure_amd(binary: Binary) -> Resources:
    assembly = _text(binary, "amdgcn")
    spilled = 4 * _number(r"\.vgpr_spill_count:\s*(\d+)", assembly)
    return Resources(
        registers=_number(r"\.vgpr_count:\s*(\d+)", assembly),
        spill_stores=spilled,
        spill_loads=spilled,
        stack_bytes=_number(r"\.private_segment_fixed_size:\s*(\d+)", assembly),
        shared_bytes=binary.shared_bytes,
        instructions=MappingProxyType(_count_amdgcn(assembly)),
        warnings=(),
    )


_AMDGCN = re.compile(r"^\t([a-z][a-z0-9_]+)(?:\s|$)", re.MULTILINE)


def _count_amdgcn(text: str) -> dict[str, int]:
    counts = Counter(match.group(1) for match in _AMDGCN.finditer(text))
    counts.pop("s_nop", None)
    return dict(sorted(counts.items()))


# Reading.


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

"""Compile a kernel of an emitted module for a target, with or without a GPU in the machine."""

from __future__ import annotations

import linecache
import logging
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from flexgen.codegen.source import LineOrigin
from flexgen.errors import InternalError, KernelCompileError, OptionError, OutOfResourcesError, SourceSpan
from flexgen.runtime.arguments import TypedArg
from flexgen.runtime.cache import source_cache
from flexgen.runtime.compile_ahead import AHEAD
from flexgen.runtime.compile_key import compile_key, lock_of, note_compiled
from flexgen.runtime.compiled_cache import cache_of_triton, compiling_into
from flexgen.runtime.environment import read_environment
from flexgen.runtime.file_lock import only_one
from flexgen.runtime.gluon_source import gluon_source
from flexgen.runtime.line_origin import with_origin
from flexgen.runtime.triton_digest import remember_digest

_log = logging.getLogger("flexgen.build")


class TargetFacts(Protocol):
    """What compiling needs to know of a target."""

    @property
    def name(self) -> str: ...
    @property
    def backend(self) -> str: ...
    @property
    def arch(self) -> int | str: ...
    @property
    def warp_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled kernel.

    Attributes:
        name: the kernel's name in the machine code.
        target: the target's name, as `sm_90`.
        stages: text of ttir, ttgir, llir and ptx or amdgcn, and bytes of cubin or hsaco, in the order they are made.
        metadata: what Triton says of the kernel: num_warps, shared, global_scratch_size and more.
        kernel: Triton's CompiledKernel, which is what a launcher loads.
    """

    name: str
    target: str
    backend: str
    stages: Mapping[str, str | bytes]
    metadata: Mapping[str, object]
    kernel: Any = field(repr=False, compare=False)

    @property
    def shared_bytes(self) -> int:
        """Shared memory (LDS) that one program needs, in bytes."""
        return int(str(self.metadata["shared"]))

    @property
    def num_warps(self) -> int:
        """Warps of one program; with warp specialisation more than were asked for."""
        return int(str(self.metadata["num_warps"]))


class CompilationCount:
    """Counts the kernels handed to Triton's compiler in this process, also those it finds in its own cache."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0

    def increment(self) -> None:
        with self._lock:
            self.total += 1


COMPILATIONS = CompilationCount()

# Triton's compiler keeps state in module globals (knobs, its cache of JIT functions' hashes), so one at a time.
_compiling = threading.RLock()

PATIENCE = 300.0  # seconds to wait for another process that compiles the same kernel

_STAGE_ORDER = ("ttir", "ttgir", "llir", "ptx", "amdgcn", "cubin", "hsaco")


def compile_entry(
    module: ModuleType,
    entry: str,
    arg_types: Sequence[TypedArg],
    target: TargetFacts,
    *,
    num_warps: int,
    num_stages: int,
    extra_options: Mapping[str, object] | None = None,
    divisible: frozenset[int] = frozenset(),
    line_map: Sequence[LineOrigin] = (),
) -> Binary:
    """Compile `module.entry` to machine code; touches no GPU and no driver.

    Args:
        arg_types: one per parameter of the kernel.
        extra_options: options of Triton's backend, such as maxnreg or waves_per_eu.
        divisible: positions of the arguments that are known to be multiples of 16 (addresses in bytes).
        line_map: where each line of the module comes from, for errors.

    Raises:
        OptionError: an option that the target's backend does not have.
        KernelCompileError: Triton or the assembler refused the kernel; names the emitted line and its origin.
    """
    function = _jit_function(module, entry)
    names = list(function.arg_names)
    if len(names) != len(arg_types):
        raise InternalError(f"{entry} has {len(names)} parameters, but {len(arg_types)} types were given")
    signature = {name: arg.type for name, arg in zip(names, arg_types, strict=True)}
    attrs = {(position,): [["tt.divisibility", 16]] for position in sorted(divisible)}
    if function.is_gluon():
        source = gluon_source(function, signature, attrs)
    else:
        source = ASTSource(fn=function, signature=signature, constexprs={}, attrs=attrs)
    options = {"num_warps": num_warps, "num_stages": num_stages, **(extra_options or {})}
    key = compile_key(module.__name__, entry, arg_types, target.name, options, divisible)
    AHEAD.wait(key)
    gpu_target = GPUTarget(target.backend, target.arch, target.warp_size)
    with _compiling, _located_errors(module, entry, target, line_map), _without_dumps():
        _check_options(gpu_target, options, target.name)
        COMPILATIONS.increment()
        start = time.perf_counter()
        try:
            kernel = _compile(source, gpu_target, options, key)
        except OutOfResources as error:
            raise out_of_resources(entry, error, num_warps, num_stages) from error
        _log.info("compiled %s for %s in %.2f s, %s", entry, target.name, time.perf_counter() - start, options)
    return _binary(kernel, target)


def out_of_resources(entry: str, error: OutOfResources, num_warps: int, num_stages: int) -> OutOfResourcesError:
    """Return flexgen's error for Triton's."""
    return OutOfResourcesError(
        entry,
        error.name,
        error.required,
        error.limit,
        why=f"it was compiled with num_warps={num_warps} and num_stages={num_stages}",
        fix="choose smaller blocks, fewer stages, or leave those options to flexgen",
    )


def _jit_function(module: ModuleType, entry: str) -> JITFunction[Any]:
    function = getattr(module, entry, None)
    if isinstance(function, JITFunction):
        return function
    if function is not None and read_environment().triton_interprets:
        raise KernelCompileError(
            "nothing can be compiled while TRITON_INTERPRET is set",
            why="Triton then makes every kernel an interpreted one",
            fix="unset TRITON_INTERPRET; flexgen runs CPU tensors through the interpreter without it",
        )
    raise InternalError(f"module {module.__name__} has no kernel {entry!r}")


def _check_options(gpu_target: GPUTarget, options: Mapping[str, object], target: str) -> None:
    """Refuse what Triton would silently ignore."""
    known = vars(make_backend(gpu_target).parse_options(_with_fusion({})))
    for name in options:
        if name not in known:
            raise OptionError(
                f"{target} has no compiler option {name!r}",
                why="the option belongs to another backend or another version of Triton",
                fix=f"remove it, or use one of {', '.join(sorted(known))}",
            )


def _with_fusion(options: Mapping[str, object]) -> dict[str, object]:
    """Say that products are added in one instruction, unless the environment says otherwise, as it may for Triton.

    It has always been the default; Triton 3.9 warns of one that will not be.
    """
    return {"enable_fp_fusion": knobs.language.default_fp_fusion, **options}


def _compile(source: ASTSource, gpu_target: GPUTarget, options: Mapping[str, object], key: str) -> Any:
    """Compile through a cache; where that cannot be written, through a temporary one.

    Of processes that want the same kernel at the same time, one compiles it, and the others find it.
    """
    options = _with_fusion(options)
    cache = source_cache()
    directory = cache.directory
    lock = lock_of(directory, key)
    remember_digest(directory)
    try:
        with compiling_into(None if cache.is_temporary else directory), only_one(lock, PATIENCE):
            kernel = triton.compile(source, target=gpu_target, options=options)
            note_compiled(lock, Path(next(iter(kernel.metadata_group.values()))).parent)
            return kernel
    except OSError:  # read-only, full, or not a directory
        # The results are read back into memory before the directory goes.
        with without_cache():
            return triton.compile(source, target=gpu_target, options=options)


@contextmanager
def without_cache() -> Iterator[None]:
    """Compile everything anew, as where nothing was compiled before: through an empty cache of Triton's."""
    with tempfile.TemporaryDirectory(prefix="flexgen-triton-") as directory, cache_of_triton(Path(directory)):
        yield


def _binary(kernel: Any, target: TargetFacts) -> Binary:
    stages = {name: kernel.asm[name] for name in _STAGE_ORDER if name in kernel.asm}
    return Binary(
        name=kernel.name,
        target=target.name,
        backend=target.backend,
        stages=MappingProxyType(stages),
        metadata=MappingProxyType(kernel.metadata._asdict()),
        kernel=kernel,
    )


@contextmanager
def _without_dumps() -> Iterator[None]:
    """Keep Triton from printing the whole PTX when ptxas refuses it; the error that it raises holds ptxas's words."""
    nvidia = sys.modules["triton.backends.nvidia.compiler"]
    vars(nvidia)["print"] = lambda *args, **options: None
    try:
        yield
    finally:
        del vars(nvidia)["print"]


@contextmanager
def _located_errors(
    module: ModuleType, entry: str, target: TargetFacts, line_map: Sequence[LineOrigin]
) -> Iterator[None]:
    try:
        yield
    except (OptionError, OutOfResourcesError):
        raise
    except Exception as error:
        where, reason = _locate(error, module)
        raise KernelCompileError(
            f"{entry} does not compile for {target.name}: {reason}",
            where=where,
            why=with_origin(_assembler_log(error), where, line_map),
        ) from error


def _locate(error: BaseException, module: ModuleType) -> tuple[SourceSpan | None, str]:
    """Return the emitted line that Triton's innermost error is about, and what that error says."""
    innermost, reason = None, str(error) or type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CompilationError):
            innermost, reason = cause, cause.error_message or reason
        elif innermost is not None and not innermost.error_message:
            reason = str(cause)
        cause = cause.__cause__
    if innermost is None:
        return None, _first_line(reason)
    return _span(innermost, module), _first_line(reason)


def _first_line(reason: str) -> str:
    return next(iter(reason.splitlines()), "no reason was given")


def _span(error: CompilationError, module: ModuleType) -> SourceSpan | None:
    """Turn a place in a function's text into a place in the module's."""
    line, lines = getattr(error.node, "lineno", None), linecache.getlines(str(module.__file__), vars(module))
    start = "".join(lines).find(error.src) if error.src else -1
    if line is None or start < 0:
        return None
    line += "".join(lines).count("\n", 0, start)
    text = lines[line - 1].rstrip("\n")
    end = getattr(error.node, "end_col_offset", None) or len(text)
    return SourceSpan(str(module.__file__), line, error.node.col_offset, line, end, text)


def _assembler_log(error: BaseException) -> str | None:
    """Return the lines of ptxas's log that tell an error, if that is what failed."""
    told = [
        line.strip() for line in str(error).splitlines() if "ptxas" in line and ("error" in line or "fatal" in line)
    ]
    return "; ".join(told[:3]) or None

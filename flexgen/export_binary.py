"""Packages of machine code: the kernels of one attention compiled for several targets, with a loader."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flexgen import __version__
from flexgen.aux_outputs import AuxRequest
from flexgen.codegen.export.exported import Exported
from flexgen.codegen.export.module import PackedKernel, emit_module, how_text, packed_kernels
from flexgen.codegen.render import render
from flexgen.codegen.source import Arg, Role
from flexgen.errors import InternalError, OptionError
from flexgen.export import exported
from flexgen.lowered import Lowered
from flexgen.lowering.targets import Target
from flexgen.options import Layout
from flexgen.runtime.load import module_of

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary

FORMAT = 2  # of manifest.json
SCRATCH_POINTERS = 2  # that Triton's kernels take behind their own arguments: for descriptors, and for its profiler

_ELEMENT_TYPES = {"fp16": 6, "fp32": 7, "bf16": 9}  # the driver's CUtensorMapDataType

Files = dict[str, bytes]


def export_package(lowered: Sequence[Lowered], *, layout: Layout, aux: AuxRequest, how: str) -> Files:
    """Return the files of a package by their paths in it.

    Args:
        lowered: one for each target.
        layout, aux, how: as for `export_module`.

    Raises:
        OptionError: a target without machine code, or named twice.
        UnsupportedProblemError: the kernels need what a package does not have; says what to change.
        KernelCompileError: a kernel does not compile.
    """
    _check_targets([one.plan.target for one in lowered])
    files: Files = {}
    targets: dict[str, Any] = {}
    for one in lowered:
        module = dataclasses.replace(exported(one, layout=layout, aux=aux, how=how), packed=True)
        target = module.plan.target.name
        text = emit_module(module)
        files[f"{target}.py"] = text.encode()
        kernels = {kernel.name: _kernel(one, module, kernel, files) for kernel in packed_kernels(module)}
        targets[target] = {"backend": module.plan.target.backend, "kernels": kernels}
    manifest = json.dumps(_manifest(how, targets), indent=1, sort_keys=True).encode() + b"\n"
    digest = hashlib.sha256(manifest).hexdigest()
    signature = _signature(files[f"{next(iter(targets))}.py"].decode())
    files["manifest.json"] = manifest
    files["loader.py"] = _text("export/loader.py.jinja", manifest_digest=digest)
    files["__init__.py"] = _text(
        "export/package.py.jinja",
        targets=sorted(targets),
        version=__version__,
        how=how_text(how),
        signature=ast.unparse(signature),
        passed=", ".join(
            [arg.arg for arg in signature.args] + [f"{arg.arg}={arg.arg}" for arg in signature.kwonlyargs]
        ),
    )
    return files


def _check_targets(targets: Sequence[Target]) -> None:
    for target in targets:
        if target.backend == "interpret":
            raise OptionError(
                "the target interpret has no machine code",
                why="it runs the emitted source on the CPU",
                fix="leave it out, or export without --binary",
            )
    names = [target.name for target in targets]
    if len(set(names)) < len(names):
        raise OptionError(f"a target is named twice: {', '.join(names)}", fix="name each once")


def _text(template: str, **holes: Any) -> bytes:
    return "\n".join(line.text for line in render(template, **holes)).encode()


def _manifest(how: str, targets: Mapping[str, Any]) -> dict[str, Any]:
    return {"format": FORMAT, "flexgen": __version__, "made_by": how, "targets": targets}


def _signature(text: str) -> ast.arguments:
    """Return the parameters of a module's `attention`; they are the same for each target."""
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    function = next(node for node in functions if node.name == "attention")
    return function.args


def _kernel(lowered: Lowered, module: Exported, kernel: PackedKernel, files: Files) -> dict[str, Any]:
    """Compile a kernel, add its file, and return what the manifest says of it."""
    from triton import knobs  # absent on some systems

    from flexgen.runtime.build import compile_entry

    target, divisible = module.plan.target, _divisible(lowered, kernel)
    options = dict(kernel.options)
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # names of files of this machine
        binary = compile_entry(
            module_of(kernel.source),
            kernel.source.entry,
            kernel.source.args,
            target,
            num_warps=options.pop("num_warps"),
            num_stages=options.pop("num_stages"),
            extra_options=options,
            divisible=divisible,
            line_map=kernel.source.line_map,
        )
    kind = "cubin" if target.backend == "cuda" else "hsaco"
    image = binary.stages[kind]
    assert isinstance(image, bytes)
    descriptors = _descriptors(kernel.source.args, binary)
    _check_parameters(binary.stages, sum(1 + 2 * len(one["box"]) if one else 1 for one in descriptors))
    path = f"{target.name}/{kernel.name}.{kind}"
    files[path] = image
    return {
        "file": path,
        "sha256": hashlib.sha256(image).hexdigest(),
        "entry": binary.name,
        "grid": kernel.grid,
        "num_warps": binary.num_warps,
        "warp_size": target.warp_size,
        "shared": binary.shared_bytes,
        "scratch_bytes": int(str(binary.metadata.get("global_scratch_size", 0))),
        "arguments": [
            {
                "name": arg.name,
                "type": arg.type,
                "role": arg.role.value,
                "value": value,
                "divisible_by_16": position in divisible,
                **({"copy_engine": descriptor} if descriptor else {}),
            }
            for position, (arg, value, descriptor) in enumerate(
                zip(kernel.source.args, kernel.values, descriptors, strict=True)
            )
        ],
    }


def _descriptors(args: Sequence[Arg], binary: Binary) -> list[dict[str, Any] | None]:
    """Return, for each argument that is a tensor described for the copy engine, what Triton compiled it to be.

    Returns:
        "box": the sizes of what one copy moves; "swizzle" and "element_type" as the driver numbers them; and
        "element_bytes". None for other arguments.
    """
    found = iter(binary.metadata.get("tensordesc_meta") or ())  # type: ignore[call-overload]
    descriptors: list[dict[str, Any] | None] = []
    for arg in args:
        if arg.role is not Role.DESCRIPTOR:
            descriptors.append(None)
            continue
        compiled, element = next(found), arg.type.removeprefix("tensordesc<").split("[")[0]
        descriptors.append(
            {
                "box": list(compiled["block_size"]),
                "swizzle": compiled["swizzle"],
                "element_type": _ELEMENT_TYPES[element],
                "element_bytes": compiled["elem_size"],
            }
        )
    return descriptors


def _divisible(lowered: Lowered, kernel: PackedKernel) -> frozenset[int]:
    """Return the arguments that the machine code takes to be multiples of 16, as in the calls it is compiled for."""
    if not kernel.stage:
        return frozenset()
    if kernel.stage == "forward":
        return lowered.divisible
    if kernel.stage == "combine":
        return lowered.second_divisible
    assert lowered.backward is not None
    return lowered.backward.divisible[list(lowered.backward.passes).index(kernel.stage)]


def _check_parameters(stages: Mapping[str, str | bytes], count: int) -> None:
    """Refuse machine code whose parameters are not those of the arguments and Triton's pointers behind them."""
    if "ptx" in stages:
        head = re.search(r"\.entry [^(]*\((.*?)\)", str(stages["ptx"]), re.DOTALL)
        found = head[1].count(".param") if head else -1
    else:
        values = re.findall(r"\.value_kind:\s+(\S+)", str(stages["amdgcn"]))
        found = sum(not value.startswith("hidden_") for value in values)
    if found != count + SCRATCH_POINTERS:
        raise InternalError(f"a compiled kernel has {found} parameters, and {count + SCRATCH_POINTERS} are known")

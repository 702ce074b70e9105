"""Kernels compile offline for each target, beside the interpreter, and errors name the emitted line."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
import triton

from flexgen.errors import InternalError, KernelCompileError, OptionError
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import COMPILATIONS, Binary, compile_entry
from flexgen.runtime.interpret import interpret
from flexgen.runtime.resources import measure
from tests.runtime import kernels
from tests.runtime.conftest import HEADER, Load

ADD_TYPES = [ArgType("*fp32", True), ArgType("*fp32", True), ArgType("*fp32", True), ArgType("i32")]


def compile_attention(load: Load, target: str, num_warps: int = 4, **options: object) -> Binary:
    module = load(kernels.ATTENTION.format(subtiled=False))
    types = [ArgType(name, name.startswith("*")) for name in kernels.ATTENTION_TYPES]
    return compile_entry(
        module,
        "attention",
        types,
        TARGETS[target],
        num_warps=num_warps,
        num_stages=2,
        extra_options=options,
        divisible=frozenset(range(7)),
    )


def compile_add(module: ModuleType, target: str = "sm_80", **options: object) -> Binary:
    return compile_entry(module, "add", ADD_TYPES, TARGETS[target], num_warps=1, num_stages=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_nvidia_binaries_have_every_stage_and_use_the_matrix_unit(load: Load, target: str):
    binary = compile_attention(load, target)
    assert list(binary.stages) == ["ttir", "ttgir", "llir", "ptx", "cubin"]
    resources = measure(binary)
    assert resources.matrix_instructions > 0
    assert resources.count("MUFU.EX2") > 0
    assert resources.shared_bytes == binary.shared_bytes > 0
    assert resources.spill_stores == resources.local_memory_instructions == 0
    assert resources.registers <= 255


def test_amd_binaries_have_every_stage_and_use_the_matrix_unit(load: Load):
    binary = compile_attention(load, "gfx942", waves_per_eu=1)
    assert list(binary.stages) == ["ttir", "ttgir", "llir", "amdgcn", "hsaco"]
    resources = measure(binary)
    assert resources.matrix_instructions > 0
    assert 0 < resources.registers <= 512
    assert resources.spill_stores == resources.local_memory_instructions == 0


def test_spills_are_seen_in_the_log_and_in_the_machine_code(load: Load):
    resources = measure(compile_attention(load, "sm_80", num_warps=1, maxnreg=32))
    assert resources.registers <= 32
    assert resources.spill_stores > 0
    assert resources.spill_loads > 0
    assert resources.stack_bytes > 0
    assert resources.local_memory_instructions > 0


def test_divisible_addresses_are_read_in_wide_loads(load: Load):
    module = load(kernels.ADD.replace("16", "128"))
    aligned = compile_add(module, divisible=frozenset({0, 1, 2, 3}))
    unaligned = compile_add(module)
    assert "ld.global.v4" in str(aligned.stages["ptx"])
    assert "ld.global.v4" not in str(unaligned.stages["ptx"])


def test_device_made_descriptors_compile_to_bulk_copies(load: Load):
    types = [ArgType("*bf16", True), ArgType("*bf16", True), ArgType("i32"), ArgType("i32")]
    binary = compile_entry(load(kernels.DESCRIPTOR_COPY), "copy", types, TARGETS["sm_90"], num_warps=4, num_stages=1)
    assert measure(binary).count("UTMALDG") > 0
    assert int(str(binary.metadata["global_scratch_size"])) > 0


@pytest.mark.parametrize("variable", [None, "0", "1"])
def test_products_are_fused_unless_the_environment_says_otherwise(
    load: Load, monkeypatch: pytest.MonkeyPatch, variable: str | None
):
    """Said to Triton, which warns since 3.9 where nobody says it."""
    warned: list[str] = []
    monkeypatch.setattr(triton.knobs, "warn_once", warned.append, raising=False)
    monkeypatch.delenv("TRITON_DEFAULT_FP_FUSION", raising=False)
    if variable is not None:
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", variable)
    assert compile_add(load(kernels.ADD)).metadata["enable_fp_fusion"] is (variable != "0")
    assert not warned


class TestErrors:
    def test_triton_errors_name_the_emitted_line_of_the_callee(self, load: Load):
        text = """
@triton.jit
def broken(value):
    return value + tl.arange(0, 8)


@triton.jit
def add(left, right, out, length):
    tl.store(out, tl.sum(broken(tl.arange(0, 16)), 0))
"""
        with pytest.raises(KernelCompileError, match="add does not compile for sm_80") as caught:
            compile_add(load(text))
        assert caught.value.where is not None
        assert caught.value.where.text == "    return value + tl.arange(0, 8)"
        assert caught.value.where.line == (HEADER + text).splitlines().index("    return value + tl.arange(0, 8)") + 1

    def test_the_assembler_is_quoted_and_dumps_nothing(self, load: Load, capfd: pytest.CaptureFixture[str]):
        with pytest.raises(KernelCompileError, match="attention does not compile for sm_80") as caught:
            compile_attention(load, "sm_80", maxnreg=16)
        assert caught.value.why is not None
        assert "register" in caught.value.why
        assert capfd.readouterr().out == ""

    def test_options_of_another_backend_are_refused(self, load: Load):
        with pytest.raises(OptionError, match="sm_80 has no compiler option 'waves_per_eu'"):
            compile_add(load(kernels.ADD), extra_options={"waves_per_eu": 2})

    def test_a_wrong_number_of_types_is_refused(self, load: Load):
        with pytest.raises(InternalError, match="4 parameters, but 3 types"):
            compile_entry(load(kernels.ADD), "add", ADD_TYPES[:3], TARGETS["sm_80"], num_warps=1, num_stages=1)


def test_an_unusable_cache_of_tritons_does_not_matter(
    load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
):
    blocked = tmp_path_factory.mktemp("triton") / "file"
    blocked.write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(blocked))
    assert compile_add(load(kernels.ADD + "# without a cache\n")).stages["ptx"]
    assert triton.knobs.cache.dir == str(blocked)


def test_compiling_and_interpreting_share_a_process_and_its_threads(load: Load):
    before = COMPILATIONS.total

    def work(number: int) -> bool:
        module = load(kernels.ADD + f"# number {number // 2}\n")
        if number % 2:
            return len(compile_add(module).stages["cubin"]) > 0
        left = torch.randn(400)
        out = torch.zeros(400)
        interpret(module, "add", (25, 1, 1), [left, left, out, 400])
        return torch.equal(out, left + left)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert COMPILATIONS.total == before + 6


def test_with_triton_interpret_set_kernels_run_and_compiling_says_why_not(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import pathlib, torch
from flexgen.errors import KernelCompileError
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.arguments import ArgType
from flexgen.runtime.build import compile_entry
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.interpret import interpret
from flexgen.runtime.load import load_module
text = {HEADER + kernels.ADD!r}
module = load_module(SourceCache(pathlib.Path({str(tmp_path)!r}) / "cache").keep("keykeykey", text))
left, out = torch.randn(16), torch.zeros(16)
interpret(module, "add", (1, 1, 1), [left, left, out, 16])
assert torch.equal(out, left + left)
try:
    compile_entry(module, "add", [ArgType("*fp32")] * 3 + [ArgType("i32")], TARGETS["sm_80"], num_warps=1, num_stages=1)
except KernelCompileError as error:
    print(error.fix)
"""
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("unset TRITON_INTERPRET"), done.stderr

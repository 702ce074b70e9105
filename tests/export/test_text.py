"""The text of exported modules: stable, clean, alone, and the same machine code as the kernels that flexgen runs."""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.codegen.export.merge import Module, merge
from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import program_count
from tests.export.conftest import Case, RunCases
from tests.export.test_meaning import CASES, captured_case
from tests.reference import dense_attention, largest_error

ROOT = Path(__file__).parents[2]
ON_CHIPS = [replace(case, target="sm_90") for case in CASES]
ON_CHIPS += [replace(case, target="gfx942") for case in CASES if case.name in ("soft_cap", "derived_table")]


@pytest.mark.parametrize("case", [*CASES, *ON_CHIPS], ids=lambda case: f"{case.name}-{case.target}")
def test_a_module_imports_torch_and_triton_alone(case: Case) -> None:
    tree = ast.parse(case.export())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} == {"torch", "triton"}


def test_modules_pass_ruff(tmp_path: Path) -> None:
    for case in (*CASES, *ON_CHIPS):
        (tmp_path / f"{case.name}_{case.target}.py").write_text(case.export())
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    command += ["--extend-ignore", "SIM300", "."]  # a comparison keeps the order that the user gave it
    completed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


def test_the_text_is_the_same_in_every_process() -> None:
    program = (
        "from tests.export.test_meaning import CASES; print(*(case.export() for case in CASES[:4]), sep='', end='')"
    )
    completed = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={"PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stdout == "".join(case.export() for case in CASES[:4])


def test_the_header_says_what_it_is_for() -> None:
    header = ast.get_docstring(ast.parse(captured_case().export())) or ""
    for words in (
        f"written by flexgen {flexgen.__version__}",
        "attention.export(query, key, value)",
        "score_mod    biased",
        "target       interpret",
        "tensors      float32, head dim 16, 2 query heads for each key head",
    ):
        assert words in header


def test_names_that_differ_between_kernels_are_told_apart() -> None:
    one = (
        "import triton\n\nBLOCK_M = 1\nSAME = 2  # both\n\n\n"
        "def walk(x):\n    return x.BLOCK_M + BLOCK_M + SAME  # BLOCK_M\n"
    )
    two = one.replace("BLOCK_M = 1", "BLOCK_M = 3")
    merged = merge([Module("forward", one, ()), Module("dq", two, ())])
    assert merged.constants == ("SAME = 2  # both",) and merged.functions == ()
    assert [section.constants for section in merged.sections] == [("FORWARD_BLOCK_M = 1",), ("DQ_BLOCK_M = 3",)]
    assert "return x.BLOCK_M + DQ_BLOCK_M + SAME  # DQ_BLOCK_M" in merged.sections[1].functions[0]
    assert merged.sections[1].functions[0].startswith("def dq_walk(x):")


def test_a_captured_tensor_may_have_a_name_of_the_host_code(tmp_path: Path) -> None:
    capacity = torch.rand(2)

    def biased(score, b, h, q_idx, kv_idx):
        return score + capacity[h]

    text = Case("clash", biased, None, (1, 2, 2, 32, 32, 16, 16), trains=False).export()
    assert "def attention(query, key, value, capacity_):" in text
    compile(text, "clash.py", "exec")


def test_a_captured_number_that_changed_and_a_third_scale_are_arguments(
    tmp_path: Path, run_standalone: RunCases
) -> None:
    """What flexgen makes an argument of the kernel is one of the module too, as wide as the kernel takes it."""
    window = 8

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < window

    attention = flexgen.compile(mask_mod=near)
    query, key, value = Case("", None, None, (1, 1, 1, 32, 32, 16, 16), trains=False).inputs()
    assert "def attention(query, key, value):" in attention.export(query, key, value, target="interpret")
    window = 5
    text = attention.export(query, key, value, target="interpret")
    assert "def attention(query, key, value, window):" in text and "    window: tl.int" in text
    path = tmp_path / "near.py"
    path.write_text(text)
    calls = [{"path": str(path), "arguments": [query, key, value, n], "weights": []} for n in (5, 2**40)]
    found, refused = run_standalone(calls)
    for scale in (0.1, 0.2, 0.3):
        text = attention.export(query, key, value, scale, target="interpret")
    assert "def attention(query, key, value, scale, window):" in text and "    sm_scale: tl.float32" in text
    assert largest_error(found["outputs"][0], dense_attention(query, key, value, mask_mod=near).out) < 1e-5
    assert f"window = {2**40}" in refused["error"]


# The grid and the machine code.


@pytest.mark.parametrize("case", [*CASES, *ON_CHIPS], ids=lambda case: f"{case.name}-{case.target}")
def test_a_launch_runs_as_many_programs_as_flexgen_does(case: Case) -> None:
    """The grids of the text, evaluated with the lengths of the call."""
    options = {**case.options, "BACKEND": "TRITON"}
    aux = flexgen.AuxRequest(lse=True)
    lowered = flexgen.compile(case.score_mod, case.mask_mod, options).lower(
        *case.inputs(), return_aux=aux, target=case.target
    )
    b, hq, hkv, lq, lk, _, _ = case.sizes
    query = torch.empty(b, hq, lq, 1, device="meta")
    launch = Launch(batch=b, q_heads=hq, kv_heads=hkv, q_len=lq, kv_len=lk, tensors={"query": query}, scale=1.0)
    plans = {"forward": lowered.plan} | {
        n: p for n, (_, p) in (lowered.backward.passes if lowered.backward else {}).items()
    }
    text = case.export()
    names = _constants(text) | {"q_len": lq, "kv_len": lk, "batch": b, "q_heads": hq, "kv_heads": hkv, "splits": 1}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "programs":
            names["programs"] = eval(ast.unparse(node.value), {"triton": _Cdiv}, names)
    found = {
        node.value.id: eval(ast.unparse(node.slice), {"triton": _Cdiv}, names)[:1]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in plans
    }
    assert found == {name: (program_count(plan, launch),) for name, plan in plans.items()}


class _Cdiv:
    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


class _Constant:
    def __init__(self, value: int) -> None:
        self.value = value


def _constants(text: str) -> dict[str, _Constant]:
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            (name,), (value,) = node.targets, node.value.args
            found[ast.unparse(name)] = _Constant(ast.literal_eval(value))
    return found


def test_an_exported_kernel_compiles_to_the_same_instructions(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from flexgen.runtime.build import compile_entry
    from flexgen.runtime.resources import measure
    from tests.export.standalone import load

    case = replace(captured_case(), target="sm_90", sizes=(1, 4, 2, 128, 128, 64, 64))
    lowered = flexgen.compile(case.score_mod, case.mask_mod, {"BACKEND": "TRITON"}).lower(
        *case.inputs(), return_aux=flexgen.AuxRequest(lse=True), target="sm_90"
    )
    path = tmp_path / "exported.py"
    path.write_text(case.export())
    module = load(path)
    assert lowered.backward is not None
    kernels = {"forward": (lowered.forward.source, lowered.plan, lowered.divisible)}
    source, plan, divisible = kernels["forward"]
    exported = compile_entry(
        module,
        "forward",
        source.args,
        plan.target,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        divisible=divisible,
    )
    found, own = measure(exported), measure(lowered.binary())
    assert (found.code, found.loops, found.registers, found.shared_bytes) == (
        own.code,
        own.loops,
        own.registers,
        own.shared_bytes,
    )

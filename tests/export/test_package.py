"""Packages of machine code: what is packed, and how the loader chooses, checks and launches it. No GPU is needed."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import flexgen
from flexgen.runtime.kernel import program_count
from tests.cli.conftest import Run, causal, run, write
from tests.export.conftest import Case
from tests.export.test_meaning import captured_case

__all__ = ["causal", "run", "write"]  # fixtures of the command line's tests

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

ROOT = Path(__file__).parents[2]
SHAPE = ("--shape", "1,2,1,64,64,16,16", "--dtype", "fp16")


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a captured bias, its forward for two chips."""
    from flexgen.aux_outputs import AuxRequest
    from flexgen.export_binary import export_package

    case: Case = captured_case()
    attention = flexgen.compile(case.score_mod, case.mask_mod, {"BACKEND": "TRITON"})
    query, key, value = (tensor.detach() for tensor in case.inputs())
    with torch.no_grad():
        assert case.captured[0].requires_grad
        case.captured[0].requires_grad_(False)
        lowered = [attention.lower(query, key, value, target=target) for target in ("sm_90", "gfx942")]
        case.captured[0].requires_grad_(True)
    files = export_package(lowered, layout="bhsd", aux=AuxRequest(), how="made by a test")
    folder = tmp_path_factory.mktemp("site") / "packed_attention"
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def packed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, imported anew."""
    monkeypatch.syspath_prepend(str(package.parent))
    for name in [name for name in sys.modules if name.startswith("packed_attention")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("packed_attention")


def loader_of(packed: ModuleType) -> Any:
    return importlib.import_module(f"{packed.__name__}.loader")


def manifest_of(package: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((package / "manifest.json").read_text())
    return found


# What is packed.


def test_the_manifest_says_what_each_file_is(package: Path) -> None:
    manifest = manifest_of(package)
    assert set(manifest["targets"]) == {"sm_90", "gfx942"}
    for target, about in manifest["targets"].items():
        for name, kernel in about["kernels"].items():
            content = (package / kernel["file"]).read_bytes()
            assert content[:4] == b"\x7fELF"
            assert kernel["file"] == f"{target}/{name}.{'cubin' if target == 'sm_90' else 'hsaco'}"
            assert hashlib.sha256(content).hexdigest() == kernel["sha256"]
            assert kernel["warp_size"] == (32 if target == "sm_90" else 64)
            assert kernel["num_warps"] >= 1 and kernel["shared"] > 0
    assert hashlib.sha256((package / "manifest.json").read_bytes()).hexdigest() in (package / "loader.py").read_text()


def test_the_arguments_are_those_of_the_kernel_in_its_order(package: Path) -> None:
    arguments = manifest_of(package)["targets"]["sm_90"]["kernels"]["forward"]["arguments"]
    assert [argument["value"] for argument in arguments[:4]] == ["query", "key", "value", "output"]
    values = {argument["name"]: (argument["role"], argument["type"], argument["value"]) for argument in arguments}
    assert values["query_stride_q"] == ("tensor stride", "i32", "query.stride(2)")
    assert values["Q_LEN"] == ("length", "i32", "q_len")
    assert values["bias_ptr"] == ("buffer", "*fp32", "bias")
    aligned = {argument["name"]: argument["divisible_by_16"] for argument in arguments}
    assert aligned["query_ptr"] and not aligned["Q_LEN"]


def test_the_grid_of_the_manifest_is_that_of_flexgen(package: Path) -> None:
    case = captured_case()
    b, hq, hkv, lq, lk, _, _ = case.sizes
    grid = manifest_of(package)["targets"]["sm_90"]["kernels"]["forward"]["grid"]
    names = {"q_len": lq, "kv_len": lk, "batch": b, "q_heads": hq, "kv_heads": hkv}
    lowered = flexgen.compile(case.score_mod, None, {"BACKEND": "TRITON"}).lower(*case.inputs(), target="sm_90")
    call = SimpleNamespace(q_len=lq, kv_len=lk, batch=b, q_heads=hq, kv_heads=hkv)
    assert eval(grid, {"cdiv": lambda a, b: -(-a // b)}, names) == program_count(lowered.plan, call)  # type: ignore[arg-type]


def test_no_file_holds_a_path_of_this_machine(package: Path) -> None:
    for path in package.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert str(ROOT).encode() not in content and b"/tmp/" not in content and b".cache" not in content


def test_the_sources_of_a_package_import_torch_alone_and_pass_ruff(package: Path) -> None:
    for path in package.glob("*.py"):
        text = path.read_text()
        assert "import triton" not in text and "import flexgen" not in text
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
    completed = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout


# Choosing.


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None = None, architecture: str = "") -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4" if architecture else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    facts = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)


def test_the_module_of_the_device_is_chosen(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    on_gpu(monkeypatch, capability=(9, 0))
    assert packed.module_for(device).__name__ == "packed_attention.sm_90"
    on_gpu(monkeypatch, architecture="gfx942")
    assert packed.module_for(device).__name__ == "packed_attention.gfx942"


def test_another_device_is_refused_by_name(packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu(monkeypatch, capability=(8, 6))
    with pytest.raises(packed.NotCompiledFor, match=r"(?s)on cuda:0, a sm_86.*compiled for gfx942, sm_90.*fix: "):
        packed.module_for(torch.device("cuda", 0))
    query = torch.zeros(2, 4, 64, 16)
    with pytest.raises(packed.NotCompiledFor, match="the tensors are on cpu"):
        packed.attention(query, query, query, query)


# Checking.


def test_a_tampered_file_is_not_loaded(package: Path, packed: Any, tmp_path: Path) -> None:
    loader = loader_of(packed)
    facts = manifest_of(package)["targets"]["sm_90"]["kernels"]["forward"]
    file = package / facts["file"]
    before = file.read_bytes()
    loader.read(facts["file"], facts["sha256"])
    try:
        file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
        with pytest.raises(
            packed.BrokenPackage, match=r"(?s)sm_90/forward.cubin has the digest .*it was .*fix: export"
        ):
            loader.read(facts["file"], facts["sha256"])
        file.unlink()
        with pytest.raises(packed.BrokenPackage, match=r"cannot read sm_90/forward\.cubin: No such file"):
            loader.read(facts["file"], facts["sha256"])
    finally:
        file.write_bytes(before)


def test_a_tampered_manifest_is_not_believed(package: Path, packed: Any) -> None:
    loader = loader_of(packed)
    file = package / "manifest.json"
    before = file.read_bytes()
    try:
        file.write_bytes(before.replace(b'"shared": ', b'"shared": 1'))
        with pytest.raises(packed.BrokenPackage, match=r"manifest\.json has the digest"):
            loader.manifest()
    finally:
        file.write_bytes(before)


# Launching.


class FakeDriver:
    """Keeps what would be loaded and launched."""

    def __init__(self) -> None:
        self.loaded: list[tuple[str, int, int]] = []
        self.launched: list[tuple[Any, ...]] = []

    def load(self, image: bytes, name: str, shared: int) -> str:
        self.loaded.append((name, len(image), shared))
        return name

    def launch(self, *launch: Any) -> None:
        self.launched.append(launch)


def launched(packed: Any, package: Path, monkeypatch: pytest.MonkeyPatch, query: torch.Tensor) -> FakeDriver:
    """Launch the forward kernel of sm_90, with the host code of its module."""
    fake, loader = FakeDriver(), loader_of(packed)
    monkeypatch.setattr(loader, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    case = captured_case()
    _, key, value = (tensor.detach() for tensor in case.inputs())
    module = importlib.import_module("packed_attention.sm_90")
    module.launch_forward(query, key, value, case.captured[0].detach())
    return fake


def test_a_launch_passes_each_argument_as_its_type(package: Path, packed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    query = captured_case().inputs()[0].detach()
    fake = launched(packed, package, monkeypatch, query)
    facts = manifest_of(package)["targets"]["sm_90"]["kernels"]["forward"]
    assert fake.loaded == [(facts["entry"], (package / facts["file"]).stat().st_size, facts["shared"])]
    ((function, grid, threads, shared, stream, parameters),) = fake.launched
    assert (function, threads, shared, stream) == ("forward", 32 * facts["num_warps"], facts["shared"], 7)
    assert grid[1:] == (1, 1) and grid[0] > 0
    assert len(parameters) == len(facts["arguments"]) + 2
    types = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
    for argument, parameter in zip(facts["arguments"], parameters, strict=False):
        assert type(parameter) is types.get(argument["type"], ctypes.c_void_p)
    names = [argument["name"] for argument in facts["arguments"]]
    named = dict(zip(names, (parameter.value for parameter in parameters), strict=False))
    assert named["query_ptr"] == query.data_ptr() and named["Q_LEN"] == query.shape[2]
    assert named["query_stride_h"] == query.stride(1)


def test_an_argument_that_is_less_aligned_is_refused(
    package: Path, packed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = captured_case().inputs()[0].detach()
    moved = torch.empty(query.numel() + 1)[1:].view(query.shape).copy_(query)
    with pytest.raises(packed.NotCompiledFor, match=r"(?s)the address of query is \d+.*a multiple of 16"):
        launched(packed, package, monkeypatch, moved)


def test_dropout_is_passed_on_by_name(tmp_path: Path, causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's own `attention` takes what its modules do, and the threshold goes to the kernel without a sign."""
    folder = tmp_path / "dropping_attention"
    said = run("export", causal, "--binary", "--target", "sm_90", "-o", folder, "--dropout", "0.1", *SHAPE)
    assert said.code == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    package, fake = importlib.import_module("dropping_attention"), FakeDriver()
    module, loader = importlib.import_module("dropping_attention.sm_90"), loader_of(package)
    monkeypatch.setattr(loader, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(package, "module_for", lambda device: module)
    monkeypatch.setattr(module, "check_device", lambda device: None)
    query, key = torch.zeros(1, 2, 64, 16).half(), torch.zeros(1, 1, 64, 16).half()
    package.attention(query, key, key, dropout_p=0.75)
    ((*_, parameters),) = fake.launched
    facts = manifest_of(folder)["targets"]["sm_90"]["kernels"]["forward"]
    named = dict(zip((argument["name"] for argument in facts["arguments"]), parameters, strict=False))
    assert type(named["drop_below"]) is ctypes.c_uint32 and named["drop_below"].value == 3 * 2**30
    assert named["keep_scale"].value == 4.0


def test_a_decode_kernel_brings_the_one_that_combines_its_splits(
    tmp_path: Path, causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "decoding_attention"
    shape = ("--shape", "1,4,2,1,256,16,16", "--dtype", "fp16", "--set", "SPLIT_KV=4")
    said = run("export", causal, "--binary", "--target", "sm_90", "-o", folder, *shape)
    assert said.code == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    package, fake = importlib.import_module("decoding_attention"), FakeDriver()
    module, loader = importlib.import_module("decoding_attention.sm_90"), loader_of(package)
    monkeypatch.setattr(loader, "driver", lambda: fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    query, key = torch.zeros(1, 4, 1, 16).half(), torch.zeros(1, 2, 256, 16).half()
    module.launch_forward(query, key, key)
    assert [(launch[0], launch[1]) for launch in fake.launched] == [("forward", (2, 4, 1)), ("combine", (4, 1, 1))]
    facts = manifest_of(folder)["targets"]["sm_90"]["kernels"]
    assert set(facts) == {"forward", "combine"}
    names = [argument["name"] for argument in facts["combine"]["arguments"]]
    named = dict(zip(names, (one.value for one in fake.launched[1][5]), strict=False))
    assert named["splits"] == 4 and named["Q_HEADS"] == 4 and named["partials_ptr"]


# The command.


def test_the_command_writes_a_package_and_says_what_it_wrote(causal: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    said = run("export", causal, "--binary", "--target", "sm_80, sm_90", "-o", folder, *SHAPE)
    assert said.code == 0
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "__init__.py",
        "loader.py",
        "manifest.json",
        "sm_80.py",
        "sm_80/forward.cubin",
        "sm_90.py",
        "sm_90/forward.cubin",
    }
    assert said.out.split() == sorted(str(folder / name) for name in names)
    assert (
        "--binary --shape 1,2,1,64,64,16,16 --dtype fp16 --target sm_80,sm_90" in (folder / "__init__.py").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--binary writes several files", "fix: name it with -o FOLDER")),
        (("-o", "a-b"), ("a-b cannot be imported as a package",)),
        (("-o", "{causal}"), ("exists already", "fix: name a new folder")),
        (("-o", "new", "--set", "BACKEND=GLUON", "--target", "sm_80,sm_90"), ("BACKEND='GLUON' cannot be honoured",)),
        (("-o", "new", "--target", "sm_90,sm_90"), ("a target is named twice: sm_90, sm_90",)),
        (("-o", "new", "--target", "interpret"), ("the target interpret has no machine code",)),
        (("-o", "new", "--target", "sm_90,sm_91"), ("unknown target 'sm_91'",)),
    ],
)
def test_wrong_use_is_told(
    causal: Path, run: Run, tmp_path: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    said = run("export", causal, "--binary", *(str(taken) if word == "{causal}" else word for word in arguments))
    assert said.code == 2 and said.out == ""
    for word in words:
        assert word in said.err
    assert not Path("new").exists()

"""Packages with Hopper's kernels: their loader makes the copy engine's descriptors as Triton's launcher does."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flexgen.export_binary import export_package
from flexgen.lowered import Lowered
from flexgen.runtime.kernel import program_count
from tests.export.test_hopper import CASES, FOUR, LSE

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
CASE = CASES["default"]
BYTES = {"u8": 1, "u16": 2, "u32": 4, "u64": 8, "f32": 4, "f64": 8}  # of PTX's types


@pytest.fixture(scope="module")
def lowered() -> Lowered:
    return CASE.lower()


@pytest.fixture(scope="module")
def package(lowered: Lowered, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forward and backward, for sm_90."""
    folder = tmp_path_factory.mktemp("site") / "hopper_package"
    for name, content in export_package([lowered], layout="bhsd", aux=LSE, how="made by a test").items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def kernels_of(package: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((package / "manifest.json").read_text())["targets"]["sm_90"]["kernels"]
    return found


class Launches:
    """A driver's library that keeps what it is told."""

    def __init__(self, loader: Any) -> None:
        self.described: list[dict[str, Any]] = []
        self.launched: list[tuple[str, tuple[int, ...], int, list[Any]]] = []
        driver = self.driver = object.__new__(loader.Driver)
        driver.encode_tiled = self.encode_tiled
        driver.load = lambda image, name, shared: name  # type: ignore[method-assign]
        driver.launch = self.launch  # type: ignore[method-assign]

    def encode_tiled(self, into: Any, element: int, rank: int, address: Any, *rest: Any) -> int:
        sizes, strides, box, steps, *modes = rest
        into._obj.raw = bytes([len(self.described)]) * 128
        self.described.append(
            {
                "at": ctypes.addressof(into._obj),
                "address": address.value,
                "element": element,
                "sizes": list(sizes),
                "strides": list(strides)[: rank - 1],
                "box": list(box),
                "steps": list(steps),
                "modes": modes,
            }
        )
        return 0

    def launch(self, name: str, grid: Any, threads: int, shared: int, stream: int, parameters: list[Any]) -> None:
        self.launched.append((name, grid, threads, parameters))


@pytest.fixture
def launches(package: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What a forward and a backward launch; the inputs are `tensors`."""
    monkeypatch.syspath_prepend(str(package.parent))
    module, loader = (importlib.import_module(f"hopper_package.{name}") for name in ("sm_90", "loader"))
    kept = Launches(loader)
    monkeypatch.setattr(loader, "driver", lambda: kept.driver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(module, "check_device", lambda device: None)
    output, logsumexp = module.attention(*CASE.inputs())
    (output.sum() + logsumexp.sum()).backward()
    return kept


def test_tiles_are_what_triton_compiled_them_to_be(package: Path, lowered: Lowered) -> None:
    """As Triton's own launcher reads its metadata, with its table from the compiler's element types to the driver's."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    kernels = kernels_of(package)
    assert tuple(kernels) == tuple(sorted(FOUR))
    for entry in FOUR:
        told = [one["copy_engine"] for one in kernels[entry]["arguments"] if "copy_engine" in one]
        known = lowered.binary(entry).metadata["tensordesc_meta"]
        assert isinstance(known, list)
        assert told == [
            {
                "box": one["block_size"],
                "swizzle": one["swizzle"],
                "element_type": TMA_DTYPE_DEVICE_TO_HOST[one["elem_type"]],
                "element_bytes": one["elem_size"],
            }
            for one in known
        ]
        assert bool(told) == (entry != "backward_delta") and not any(one["fp4_padded"] for one in known)


def test_each_parameter_is_as_wide_as_the_machine_code_reads_it(lowered: Lowered, launches: Launches) -> None:
    assert [name for name, *_ in launches.launched] == list(FOUR)
    for entry, _, _, parameters in launches.launched:
        head = re.search(r"\.entry [^(]*\((.*?)\)", str(lowered.binary(entry).stages["ptx"]), re.DOTALL)
        assert head is not None
        widths = [
            int(found[2]) if found[2] else BYTES[found[1]]
            for found in re.finditer(r"\.param (?:\.align \d+ )?\.(\w+)[^,]*?(?:\[(\d+)\])?(?:,|\s*$)", head[1])
        ]
        assert [ctypes.sizeof(parameter) for parameter in parameters] == widths


def test_grids_and_threads_are_those_of_flexgen(package: Path, lowered: Lowered, launches: Launches) -> None:
    b, hq, hkv, lq, lk, _ = CASE.sizes
    call: Any = SimpleNamespace(q_len=lq, kv_len=lk, batch=b, q_heads=hq, kv_heads=hkv, device=torch.device("cpu"))
    kernels = kernels_of(package)
    for name, grid, threads, _ in launches.launched:
        assert grid == (program_count(lowered.plan_of(name), call), 1, 1)  # type: ignore[arg-type]
        assert threads == 32 * kernels[name]["num_warps"] == 32 * lowered.binary(name).num_warps


def test_a_tensor_is_described_from_the_innermost_dimension(package: Path, launches: Launches) -> None:
    """Of the forward: query, key and value, in bfloat16, with tiles of 64 columns, the width of a swizzle."""
    b, hq, hkv, lq, lk, d = CASE.sizes
    query, key, _ = launches.described[:3]
    assert query["sizes"] == [d, lq, hq, b] and key["sizes"] == [d, lk, hkv, b]
    assert query["strides"] == [2 * d, 2 * d * lq, 2 * d * lq * hq if b > 1 else 2 * 64]
    boxes = [one["copy_engine"]["box"] for one in kernels_of(package)["forward"]["arguments"][:3]]
    assert [one["box"] for one in launches.described[:3]] == [box[::-1] for box in boxes]
    assert query["box"][0] == 64 and query["steps"] == [1, 1, 1, 1] and query["element"] == 9
    assert query["modes"] == [0, 3, 2, 0], "not interleaved, 128 bytes swizzled, promoted to 128 bytes, filled with 0"
    assert all(one["at"] % 64 == 0 and one["address"] % 16 == 0 for one in launches.described)


def test_numbers_of_rows_are_described_in_one_dimension(launches: Launches) -> None:
    """What dK/dV reads of each row."""
    rows = [one for one in launches.described if len(one["sizes"]) == 1]
    assert len(rows) == 2 and all(one["element"] == 7 and one["strides"] == [] for one in rows)


def test_a_descriptor_goes_before_its_shape_and_strides(launches: Launches) -> None:
    b, hq, _, lq, _, d = CASE.sizes
    parameters = launches.launched[0][3]
    assert parameters[0].raw == bytes(128), "the first that was made"
    assert [one.value for one in parameters[1:5]] == [b, hq, lq, d]
    assert parameters[8].value == 1 and parameters[7].value == d


def test_an_old_driver_is_told(package: Path, launches: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("hopper_package.sm_90")
    launches.driver.encode_tiled = None
    with torch.no_grad(), pytest.raises(RuntimeError, match="no cuTensorMapEncodeTiled: it is older than CUDA 12"):
        module.attention(*CASE.inputs())


def test_an_error_of_the_driver_is_told(launches: Launches) -> None:
    module = importlib.import_module("hopper_package.sm_90")
    launches.driver.encode_tiled = lambda *arguments: 1
    with torch.no_grad(), pytest.raises(RuntimeError, match="the driver returned 1 from describing a tensor"):
        module.attention(*CASE.inputs())


def test_rows_that_the_copy_engine_cannot_read_are_refused(launches: Launches) -> None:
    module = importlib.import_module("hopper_package.sm_90")
    query, key, value = (tensor.detach() for tensor in CASE.inputs())
    wide = torch.empty(*query.shape[:3], 129, dtype=query.dtype)[..., :128]
    with pytest.raises(module.NotCompiledFor, match=r"(?s)query has strides .* multiples of 16 bytes"):
        module.attention(wide, key, value)


def test_the_sources_import_torch_alone_and_pass_ruff(package: Path) -> None:
    for path in package.glob("*.py"):
        text = path.read_text()
        assert "triton" not in text.replace("Triton", "") and "import flexgen" not in text
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml"), "."]
    completed = subprocess.run(command, cwd=package, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout

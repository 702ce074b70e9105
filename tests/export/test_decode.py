"""Exported decode kernels: splits that are combined, growing caches, pages, and keys in 8 bits, as flexgen has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.lowering.triton_decode.splits import Extent, split_count
from tests.export.conftest import RunCases
from tests.export.standalone import load
from tests.reference import largest_error

PAGE = 16
LENGTHS = torch.tensor([100, 41], dtype=torch.int32)
PAGES = torch.tensor([[3, 1, 8, 0, 4, 6, 7], [5, 2, 9, -1, -1, -1, -1]], dtype=torch.int32)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (kv_idx - q_idx).abs() < 300


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


QUERY, CACHE = drawn(2, 8, 3, 32), drawn(2, 2, 112, 32)
BHSD: dict[str, Any] = {}
PAGED = drawn(10, 2, PAGE, 32)
HALF = torch.float16  # Triton's interpreter multiplies the bits of bfloat16
STORED = PAGED.to(torch.float8_e4m3fn)
SCALES = torch.tensor([0.5, 1.5])

# By name: mods, options, tensors, and what the call brings besides them.
CASES: dict[str, tuple[Any, Any, dict[str, Any], tuple[Tensor, Tensor, Tensor], dict[str, Any]]] = {
    "splits": (softcap, None, {"SPLIT_KV": 3}, (QUERY, CACHE, CACHE), {}),
    "counted": (None, window, BHSD, (QUERY, CACHE, CACHE), {}),
    "lengths": (None, None, {"SPLIT_KV": 2}, (QUERY, CACHE, CACHE), {"kv_lengths": LENGTHS}),
    "pages": (softcap, None, {"SPLIT_KV": 2}, (QUERY, PAGED, PAGED), {"kv_lengths": LENGTHS, "page_table": PAGES}),
    "prefill": (None, causal, BHSD, (drawn(2, 8, 40, 32), CACHE, CACHE), {"kv_lengths": LENGTHS.long()}),
    "bytes": (
        *(None, None, {"SPLIT_KV": 2}),
        (QUERY.to(HALF), STORED, STORED),
        {"kv_lengths": LENGTHS, "page_table": PAGES, "k_scale": SCALES, "v_scale": 2.0},
    ),
    "scales": (
        *(None, None, {"layout": "bshd"}),
        tuple(tensor.transpose(1, 2).contiguous() for tensor in (QUERY, CACHE, CACHE)),
        {"k_scale": 0.5, "v_scale": SCALES},
    ),
}


def text_of(name: str, target: str = "interpret") -> str:
    score, mask, options, tensors, given = CASES[name]
    aux = flexgen.AuxRequest(lse=True)
    return flexgen.compile(score, mask, options).export(*tensors, return_aux=aux, target=target, **given)


def passed(name: str) -> dict[str, Any]:
    """Return what the exported function takes by name: a k_scale that is a number is part of the scale."""
    given = CASES[name][4]
    return {key: one for key, one in given.items() if key != "k_scale" or isinstance(one, Tensor)}


def own(name: str, device: str = "cpu") -> list[Tensor]:
    score, mask, options, tensors, given = CASES[name]
    moved = {key: one.to(device) if isinstance(one, Tensor) else one for key, one in given.items()}
    attention = flexgen.compile(score, mask, options)
    with torch.no_grad():
        tensors = tuple(tensor.to(device) for tensor in tensors)
        output, aux = attention(*tensors, return_aux=flexgen.AuxRequest(lse=True), **moved)
    return [output, aux.lse]


def test_modules_compute_what_flexgen_does(tmp_path: Path, run_standalone: RunCases) -> None:
    asked = []
    for name in CASES:
        path = tmp_path / f"{name}.py"
        path.write_text(text_of(name))
        asked.append({"path": str(path), "arguments": list(CASES[name][3]), "named": passed(name), "weights": []})
    for name, found in zip(CASES, run_standalone(asked), strict=True):
        for actual, exact in zip(found["outputs"], own(name), strict=True):
            assert largest_error(actual, exact) < (2e-2 if exact.dtype == HALF else 1e-5), name


@pytest.mark.parametrize("name", ["counted", "splits"])
@pytest.mark.parametrize("processors", [1, 132])
def test_splits_are_counted_as_by_the_launcher(
    name: str, processors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    score, mask, options, tensors, given = CASES[name]
    plan = flexgen.compile(score, mask, options).lower(*tensors, target="sm_90", **given).plan
    assert isinstance(plan, DecodePlan)
    path = tmp_path / "decode.py"
    path.write_text(text_of(name, "sm_90"))
    module = load(path)
    if name == "splits":
        assert "splits = 3\n" in path.read_text() and not hasattr(module, "split_count")
        return
    facts = type("Facts", (), {"multi_processor_count": processors})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    for programs, q_len, kv_len in ((1, 1, 100_000), (16, 3, 4096), (2, 16, 40), (0, 1, 0), (600, 2, 10_000)):
        counted = split_count(plan, Extent(programs, q_len, kv_len, processors))
        assert module.split_count(programs, q_len, kv_len, torch.device("cuda")) == counted


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "lengths' dtype": ("lengths", {"kv_lengths": LENGTHS.long()}, "kv_lengths is torch.int64"),
    "lengths' shape": ("lengths", {"kv_lengths": LENGTHS[:1]}, r"kv_lengths is torch.int32 with shape \(1,\)"),
    "lengths' device": ("lengths", {"kv_lengths": LENGTHS.to("meta")}, "kv_lengths is on meta"),
    "pages' shape": ("pages", {"page_table": PAGES[:1]}, r"page_table is torch.int32 with shape \(1, 7\)"),
    "pages' strides": ("pages", {"page_table": PAGES.mT.contiguous().mT}, "page_table has strides"),
    "scales": ("bytes", {"k_scale": SCALES.half()}, "k_scale is torch.float16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_differs_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, changed, words = REFUSED[name]
    path = tmp_path / "decode.py"
    path.write_text(text_of(case))
    module = load(path)
    monkeypatch.setattr(module, "check_device", lambda device: None)
    with pytest.raises(module.NotCompiledFor, match=words):
        module.attention(*CASES[case][3], **(passed(case) | changed))


def test_pages_of_another_size_and_other_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "decode.py"
    path.write_text(text_of("bytes"))
    module = load(path)
    monkeypatch.setattr(module, "check_device", lambda device: None)
    query, key, value = CASES["bytes"][3]
    with pytest.raises(module.NotCompiledFor, match=r"value is torch\.float8_e5m2"):
        module.attention(query, key, value.to(torch.float8_e5m2), **passed("bytes"))
    with pytest.raises(module.NotCompiledFor, match=r"(?s)\(5, 2, 32, 32\).*pages of 16"):
        module.attention(query, key.reshape(5, 2, 32, 32), value.reshape(5, 2, 32, 32), **passed("bytes"))


def test_gradients_of_a_call_over_a_cache_are_refused_when_it_is_exported() -> None:
    query = QUERY.clone().requires_grad_()
    with pytest.raises(flexgen.UnsupportedProblemError, match="gradients are wanted of a call with kv_lengths"):
        flexgen.compile().export(query, CACHE, CACHE, kv_lengths=LENGTHS, target="sm_90")

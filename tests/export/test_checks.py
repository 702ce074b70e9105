"""A call that an exported module was not compiled for raises, and the message names what differs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from tests.export.conftest import Case, RunCases

SIZES = (2, 4, 2, 128, 128, 16, 32)
slopes = torch.rand(4, generator=torch.Generator().manual_seed(0))


def alibi(score, b, h, q_idx, kv_idx):
    return score + slopes[h] * (kv_idx - q_idx)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


CASE = Case("guarded", alibi, causal, SIZES, captured=(slopes,), returns_lse=False, trains=False)
FORWARD = "this module was compiled for the forward alone"

# name: what differs in the call's query, key, value and slopes; words of the message.
Change = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Any, ...]]
CALLS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "dtype": (lambda q, k, v, s: (q, k, v.half(), s), ("value is torch.float16", "compiled for torch.float32")),
    "rank": (lambda q, k, v, s: (q[0], k, v, s), ("query has shape (4, 128, 16)", "[B, H, L, D]")),
    "head dim": (lambda q, k, v, s: (q[..., :8], k[..., :8], v, s), ("head dims (8, 8, 32)", "(16, 16, 32)")),
    "group": (lambda q, k, v, s: (q, k[:, :1], v[:, :1], s), ("4 query heads and 1 key heads", "2 query heads")),
    "batch": (lambda q, k, v, s: (q[:1], k, v, s), ("(1, 4, 128, 16), (2, 2, 128, 16)", "query's batch or 1")),
    "lengths": (lambda q, k, v, s: (q, k, v[:, :, :64], s), ("(2, 2, 64, 32)", "keys and values of one size")),
    "queries": (lambda q, k, v, s: (q[:, :, :100], k, v, s), ("100 queries", "multiples of")),
    "keys": (lambda q, k, v, s: (q, k[:, :, :100], v[:, :, :100], s), ("100 keys", "multiples of")),
    "stride": (lambda q, k, v, s: (q.mT.contiguous().mT, k, v, s), ("query has strides", "fix: call .contiguous()")),
    "gradient": (lambda q, k, v, s: (q, k.detach().requires_grad_(), v, s), ("key requires grad", FORWARD)),
    "captured dtype": (lambda q, k, v, s: (q, k, v, s.double()), ("slopes is torch.float64", "torch.float32 with 1")),
    "captured rank": (lambda q, k, v, s: (q, k, v, s[None]), ("slopes is torch.float32 with 2 dimensions",)),
    "captured stride": (lambda q, k, v, s: (q, k, v, s.repeat(2)[::2]), ("slopes has stride 2 in dimension 0",)),
    "captured gradient": (lambda q, k, v, s: (q, k, v, s.clone().requires_grad_()), ("slopes requires grad",)),
    "device": (lambda q, k, v, s: (q, k.to("meta"), v, s), ("key is on meta, query on cpu",)),
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory, run_standalone: RunCases) -> dict[str, str]:
    path = Path(tmp_path_factory.mktemp("guarded"), "guarded.py")
    path.write_text(CASE.export())
    calls = [
        {"path": str(path), "arguments": list(change(*CASE.inputs(), slopes)), "weights": []}
        for change, _ in CALLS.values()
    ]
    results = run_standalone(calls)
    return {name: result.get("error", "") for name, result in zip(CALLS, results, strict=True)}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_differs_is_refused_by_name(name: str, errors: dict[str, str]) -> None:
    message = errors[name]
    lines = message.splitlines()
    assert len(lines) == 3 and lines[1].startswith("  why: ") and lines[2].startswith("  fix: ")
    for words in CALLS[name][1]:
        assert words in message


def test_what_a_proof_asks_of_the_lengths_is_checked(tmp_path: Path, run_standalone: RunCases) -> None:
    """Under a mask that lets every query see a key only where there are as many keys, fewer keys are refused."""

    def diagonal(b, h, q_idx, kv_idx):
        return q_idx == kv_idx

    case = Case("square", None, diagonal, (1, 1, 1, 64, 64, 16, 16), returns_lse=False, trains=False)
    path = tmp_path / "square.py"
    path.write_text(case.export())
    query, key, value = case.inputs()
    longer = torch.cat([query, query], 2)
    (found,) = run_standalone([{"path": str(path), "arguments": [longer, key, value], "weights": []}])
    assert "q_len = 128, kv_len = 64" in found["error"]
    assert "q_len <= kv_len, where every query has a live key" in found["error"]


def test_without_a_gpu_and_without_the_interpreter_the_device_is_refused(tmp_path: Path) -> None:
    module = _loaded(CASE.export(), tmp_path)
    query, key, value = CASE.inputs()
    with pytest.raises(module.NotCompiledFor, match=r"(?s)on the CPU.*set TRITON_INTERPRET=1"):
        module.attention(query, key, value, slopes)


def test_kernels_with_instructions_of_a_chip_are_not_interpreted(tmp_path: Path) -> None:
    def cap(score, b, h, q_idx, kv_idx):
        return 20 * torch.tanh(score / 20)

    case = Case("cap", cap, None, SIZES, trains=False, target="sm_90", options={"FAST_TANH": True})
    module = _loaded(case.export(), tmp_path)
    with pytest.raises(module.NotCompiledFor, match="export for the target interpret"):
        module.attention(*case.inputs())


def test_bfloat16_is_not_interpreted_wrong(tmp_path: Path) -> None:
    """Triton's interpreter multiplies the bits of bfloat16 as if they were whole numbers."""
    query = torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16)
    text = flexgen.compile(mask_mod=causal).export(query, query, query, target="interpret")
    module = _loaded(text, tmp_path)
    with pytest.raises(module.NotCompiledFor, match=r"(?s)cannot multiply bfloat16.*export float32"):
        module.attention(query, query, query)


def _loaded(text: str, folder: Path) -> Any:
    from tests.export.standalone import load

    path = folder / "exported.py"
    path.write_text(text)
    return load(path)

"""Dropout and packed sequences in exported modules: the same numbers as flexgen, and refused calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flexgen
from tests.export.conftest import Case, RunCases
from tests.export.test_meaning import softcap, window
from tests.reference import largest_error

SEED = 5
LENGTHS = (37, 0, 1, 90)
bias = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2), requires_grad=True)


def biased_by(bias: Tensor) -> Callable[..., Any]:
    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h, q_idx, kv_idx]

    return biased


def offsets(*lengths: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype)


QUERIES, KEYS = offsets(*LENGTHS), offsets(30, 5, 64, 29)
DROPPING = Case("dropping", biased_by(bias), window, (2, 2, 1, 64, 64, 16, 16), captured=(bias,))
PACKED = Case("packed", softcap, window, (1, 2, 1, 128, 128, 16, 16))
OTHER_KEYS = Case("other_keys", None, window, (1, 2, 1, 128, 128, 16, 16), options={"layout": "bshd"})
BOTH = Case("both", None, window, (1, 2, 1, 128, 128, 16, 16))
FORWARD = Case("forward", None, None, (2, 2, 2, 40, 50, 16, 16), trains=False)

# Of each case: what its calls are given by name, beside flexgen's own spelling of it.
CALLS: dict[str, tuple[Case, dict[str, Any]]] = {
    "dropout": (DROPPING, {"dropout_p": 0.3}),
    "another probability": (DROPPING, {"dropout_p": 0.75}),
    "nothing dropped": (DROPPING, {"dropout_p": 0}),
    "all dropped": (DROPPING, {"dropout_p": 1.0}),
    "packed": (PACKED, {"cu_seqlens_q": QUERIES}),
    "other lengths": (PACKED, {"cu_seqlens_q": offsets(128)}),
    "no sequences": (PACKED, {"cu_seqlens_q": offsets()}),
    "keys apart": (OTHER_KEYS, {"cu_seqlens_q": QUERIES, "cu_seqlens_k": KEYS}),
    "both": (BOTH, {"cu_seqlens_q": QUERIES, "dropout_p": 0.5}),
    "forward": (FORWARD, {"dropout_p": 0.2}),
}


def text_of(case: Case, target: str = "interpret") -> str:
    given = {name: value for owner, named in CALLS.values() if owner is case for name, value in named.items()}
    given["dropout_p"] = 0.1 if "dropout_p" in given else 0
    attention = flexgen.compile(case.score_mod, case.mask_mod, case.options)
    aux = flexgen.AuxRequest(lse=True)
    return attention.export(*case.inputs(), return_aux=aux, target=target, **given)


def weights(case: Case) -> list[Tensor]:
    query, _, value = case.inputs()
    heads, rows = (1, 2) if case.options.get("layout") != "bshd" else (2, 1)
    random = torch.Generator().manual_seed(3)
    lse = torch.rand(query.shape[0], query.shape[heads], query.shape[rows], generator=random)
    return [torch.randn(*query.shape[:3], value.shape[3], generator=random), 0 * lse]


def own(case: Case, named: dict[str, Any], device: str = "cpu") -> list[Tensor]:
    """Return what flexgen itself computes with the same seed: output, logsumexp and gradients."""
    inputs = [tensor.detach().to(device).requires_grad_(case.trains) for tensor in case.inputs()]
    given = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in named.items()}
    torch.manual_seed(SEED)
    score_mod = biased_by(bias.to(device)) if case.captured else case.score_mod
    attention = flexgen.compile(score_mod, case.mask_mod, case.options)
    output, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True), **given)
    captured = case.captured if device == "cpu" else ()  # which lie on the CPU
    leaves = [tensor for tensor in (*inputs, *captured) if tensor.requires_grad]
    if not leaves:
        return [output, aux.lse]
    grads = torch.autograd.grad((output * weights(case)[0].to(device)).sum(), leaves)
    return [output.detach(), aux.lse.detach(), *grads]


def test_modules_compute_what_flexgen_does(tmp_path: Path, run_standalone: RunCases) -> None:
    asked = []
    for name, (case, named) in CALLS.items():
        path = tmp_path / f"{case.name}.py"
        if not path.exists():
            path.write_text(text_of(case))
        arguments = [*case.inputs(), *case.captured]
        weighted = [one.nan_to_num(0) for one in weights(case)] if case.trains else []
        asked.append({"path": str(path), "arguments": arguments, "named": named, "seed": SEED, "weights": weighted})
        asked[-1]["name"] = name
    for call, found in zip(asked, run_standalone(asked), strict=True):
        case, named = CALLS[call["name"]]
        actual = [*found["outputs"], *found["grads"]]
        for number, (one, exact) in enumerate(zip(actual, own(case, named), strict=True)):
            error = largest_error(one.nan_to_num(1e9, 1e9, -1e9), exact.nan_to_num(1e9, 1e9, -1e9))
            assert error < 1e-5, f"{call['name']}, result {number}"


def test_what_is_drawn_follows_the_generator(tmp_path: Path, run_standalone: RunCases) -> None:
    path = tmp_path / "forward.py"
    path.write_text(text_of(FORWARD))
    calls = [
        {
            "path": str(path),
            "arguments": list(FORWARD.inputs()),
            "named": {"dropout_p": 0.5},
            "seed": seed,
            "weights": [],
        }
        for seed in (1, 1, 2)
    ]
    calls.append(calls[0] | {"named": {"dropout_p": 0.5, "generator": torch.Generator().manual_seed(2)}})
    first, again, other, given = (result["outputs"][0] for result in run_standalone(calls))
    assert torch.equal(first, again) and not torch.equal(first, other) and torch.equal(other, given)


REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "probability": (BOTH, {"cu_seqlens_q": QUERIES, "dropout_p": 1.5}, "dropout_p is 1.5"),
    "dtype": (PACKED, {"cu_seqlens_q": QUERIES.long()}, "cu_seqlens_q is torch.int64"),
    "rank": (PACKED, {"cu_seqlens_q": QUERIES[None]}, r"cu_seqlens_q is torch.int32 with shape \(1, 5\)"),
    "stride": (PACKED, {"cu_seqlens_q": QUERIES.repeat_interleave(2)[::2]}, r"strides \(2,\)"),
    "device": (PACKED, {"cu_seqlens_q": QUERIES.to("meta")}, "cu_seqlens_q is on meta, query on cpu"),
    "count": (
        PACKED,
        {"cu_seqlens_q": QUERIES, "cu_seqlens_k": KEYS[1:]},
        "cu_seqlens_q has 5 entries and cu_seqlens_k 4",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_differs_is_refused_by_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.export.standalone import load

    case, named, words = REFUSED[name]
    path = tmp_path / "refusing.py"
    path.write_text(text_of(case))
    module = load(path)
    monkeypatch.setattr(module, "check_device", lambda device: None)
    with pytest.raises(module.NotCompiledFor, match=rf"(?s){words}.*\n  why: .*\n  fix: "):
        module.attention(*case.inputs(), **named)


def test_packed_sequences_in_a_batch_or_beside_other_keys_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.export.standalone import load

    path = tmp_path / "refusing.py"
    path.write_text(text_of(PACKED))
    module = load(path)
    monkeypatch.setattr(module, "check_device", lambda device: None)
    query, key, value = PACKED.inputs()
    with pytest.raises(module.NotCompiledFor, match="128 queries and 64 keys, and cu_seqlens_k is that of the queries"):
        module.attention(query, key[:, :, :64], value[:, :, :64], QUERIES)
    twice = [torch.cat([tensor, tensor]) for tensor in (query, key, value)]
    with pytest.raises(module.NotCompiledFor, match="the batch is 2"):
        module.attention(*twice, QUERIES)

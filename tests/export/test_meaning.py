"""Exported modules compute what the user's callables mean, where flexgen cannot be imported."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flexgen.codegen.block_table_emit import TableSource
from tests.export.conftest import Case, RunCases
from tests.reference import dense_attention, largest_error

SIZES = (2, 4, 2, 64, 64, 16, 16)  # two query heads for each key head
bias = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
document = torch.repeat_interleave(torch.tensor([90, 60, 100, 6]))

is_ancestor = torch.arange(256)[:, None] // 64 == torch.arange(256)[None, :] // 64  # a block of 64 beside empty ones


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 20)


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def biased(score, b, h, q_idx, kv_idx):
    return score + bias[h, q_idx, kv_idx]


def same_document(b, h, q_idx, kv_idx):
    return document[q_idx] == document[kv_idx]


def reachable(b, h, q_idx, kv_idx):
    return is_ancestor[q_idx, kv_idx] & (q_idx >= kv_idx)


def never(b, h, q_idx, kv_idx):
    return (q_idx > 3) & (kv_idx < q_idx)


CASES = (
    Case("closed_form", None, window, SIZES),
    Case("soft_cap", softcap, window, SIZES),
    Case("captured_bias", biased, None, SIZES, captured=(bias,)),
    Case("derived_table", None, same_document, (1, 2, 1, 256, 256, 16, 16), captured=(document,)),
    Case("evaluated_table", None, reachable, (1, 2, 1, 256, 256, 16, 16), captured=(is_ancestor,)),
    Case("other_layout", softcap, None, (1, 2, 2, 50, 70, 24, 40), options={"layout": "bshd"}),
    Case("copy_engine", None, window, SIZES, options={"USE_TMA": True}),
    Case("empty_rows", None, never, (1, 1, 1, 40, 40, 16, 16)),
    Case("decode", softcap, None, (2, 4, 1, 1, 70, 16, 16), trains=False),
)


def captured_case() -> Case:
    """Return the case with a captured tensor that gets a gradient."""
    return next(case for case in CASES if case.name == "captured_bias")


def weights_of(case: Case) -> list[Tensor]:
    b, hq, _, lq, _, _, dv = case.sizes
    shape = (b, lq, hq, dv) if case.options.get("layout") == "bshd" else (b, hq, lq, dv)
    random = torch.Generator().manual_seed(3)
    lse = torch.randn(b, hq, lq, generator=random)
    lse = torch.zeros_like(lse) if case.name == "empty_rows" else lse  # 0 * -inf is nothing to differentiate
    return [torch.randn(shape, generator=random), lse][: 2 if case.returns_lse else 1]


def expected(case: Case, weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return output, logsumexp and gradients in float64, from the user's own callables."""
    query, key, value = case.inputs()
    flip = case.options.get("layout") == "bshd"
    views = [tensor.transpose(1, 2) if flip else tensor for tensor in (query, key, value)]
    dense = dense_attention(*views, case.score_mod, case.mask_mod)
    outputs = [dense.out.transpose(1, 2) if flip else dense.out, dense.lse]
    leaves = [tensor for tensor in (query, key, value, *case.captured) if tensor.requires_grad]
    if not leaves:
        return outputs, []
    finite = torch.where(dense.lse.isfinite(), dense.lse, 0.0)
    loss = (outputs[0] * weights[0]).sum() + (finite * weights[1]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return outputs, [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, run_standalone: RunCases) -> dict[str, dict[str, list[Tensor]]]:
    """Return what every module computes: one process for all, since each costs seconds to start."""
    folder = tmp_path_factory.mktemp("modules")
    asked = []
    for case in CASES:
        path = Path(folder, f"{case.name}.py")
        path.write_text(case.export())
        arguments = [*case.inputs(), *case.captured]
        asked.append({"path": str(path), "arguments": arguments, "weights": weights_of(case)})
    return dict(zip((case.name for case in CASES), run_standalone(asked), strict=True))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_exported_module_computes_the_users_attention(
    case: Case, results: dict[str, dict[str, list[Tensor]]]
) -> None:
    outputs, grads = expected(case, weights_of(case))
    found = results[case.name]
    assert len(found["grads"]) == len(grads) == (3 * case.trains + sum(t.requires_grad for t in case.captured))
    for actual, exact in zip([*found["outputs"], *found["grads"]], [*outputs, *grads], strict=True):
        assert actual.shape == exact.shape
        assert largest_error(actual, exact) < 1e-5


def test_the_process_cannot_import_flexgen(tmp_path: Path, run_standalone: RunCases) -> None:
    path = tmp_path / "guilty.py"
    path.write_text("import flexgen.errors\n")
    with pytest.raises(AssertionError, match="an exported module imports flexgen"):
        run_standalone([{"path": str(path), "arguments": [], "weights": []}])


def test_the_walks_of_the_cases_are_what_they_claim() -> None:
    """The table's kernels are in the module that needs them, and in no other."""
    derived = {case.name for case in CASES if "def derive_table(" in case.export()}
    assert derived == {"derived_table", "evaluated_table"}
    dropping = {case.name for case in CASES if "drop_empty_blocks[(rows, mask_heads, mask_batch)](" in case.export()}
    assert dropping == {"evaluated_table"}


def test_every_kernel_that_a_table_may_have_is_launched() -> None:
    """A kernel that is added to tables has to be added to the host code of exports too; `decide` is of no call."""
    assert {field.name for field in fields(TableSource)} == {"summaries", "count", "fill", "drop", "decide"}

"""`flexgen export`: what it writes and says, and what it refuses."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import flexgen
from tests.cli.conftest import Run, causal, mods, run, write

__all__ = ["causal", "mods", "run", "write"]  # fixtures of the command line's tests

SHAPE = ("--shape", "1,2,1,64,64,16,16", "--dtype", "fp32", "--target", "sm_90")


def test_it_prints_the_module_and_nothing_else(mods: Path, run: Run) -> None:
    said = run("export", f"{mods}:softcap,causal", "--backward", "--lse", *SHAPE)
    assert said.code == 0
    header = ast.get_docstring(ast.parse(said.out)) or ""
    made = (
        "flexgen export mods.py:softcap,causal --backward --lse --shape 1,2,1,64,64,16,16 --dtype fp32 --target sm_90"
    )
    assert made in header.splitlines()[4] and "2 query heads for each key head" in header
    assert str(mods.parent) not in said.out
    assert "class Attention(torch.autograd.Function):" in said.out


def test_it_writes_the_module_and_says_where(causal: Path, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my_attention.py"
    said = run("export", causal, "-o", path, "--set", "BLOCK_M=32", "num_warps=2", *SHAPE)
    assert said.code == 0 and said.out == f"{path}\n"
    text = path.read_text()
    assert "--set BLOCK_M=32 num_warps=2" in text
    assert "BLOCK_M = tl.constexpr(32)" in text and "num_warps=2" in text
    assert "def backward" not in text and "logsumexp" not in text.split("def launch_forward")[1]


def test_the_default_target_is_told_apart_from_the_module(
    causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run("export", causal)
    assert "no GPU here: compiling for sm_90" in said.err and "no GPU" not in said.out
    assert "--dtype bf16 --target sm_90" in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dropout", "2"), ("'2' is not a probability",)),
        (("--packed", "3;4"), ("'3;4' are no lengths",)),
        (("-o", "my-attention.py"), ("my-attention.py cannot be imported", "fix: name it like my_attention.py")),
        (("-o", "attention.txt"), ("attention.txt cannot be imported",)),
        (("-o", "no_such_folder/m.py"), ("cannot write no_such_folder/m.py: No such file",)),
        (("--target", "sm_91"), ("unknown target 'sm_91'",)),
        (("--set", "BLOCKM=64"), ("BLOCK_M",)),
    ],
)
def test_wrong_use_says_what_is_wrong(
    causal: Path, run: Run, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    said = run("export", causal, *arguments)
    assert said.code == 2 and said.out == ""
    for word in words:
        assert word in said.err


def test_the_file_of_the_mods_is_not_replaced(causal: Path, run: Run) -> None:
    before = causal.read_text()
    said = run("export", causal, "-o", causal)
    assert said.code == 2 and "is the file of the mods" in said.err
    assert causal.read_text() == before


def test_a_block_mask_and_maxima_cannot_be_exported() -> None:
    def mask(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    attention = flexgen.compile(mask_mod=mask)
    query = torch.empty(1, 1, 128, 16, device="meta")
    with pytest.raises(flexgen.UnsupportedProblemError, match="maxima of scores cannot be exported"):
        attention.export(query, query, query, return_aux=flexgen.AuxRequest(max_scores=True))


def test_deterministic_gradients_cannot_be_exported() -> None:
    bias = torch.zeros(1, requires_grad=True)

    def biased(score, b, h, q_idx, kv_idx):
        return score + bias[h]

    attention = flexgen.compile(biased)
    query = torch.empty(1, 1, 128, 16)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(flexgen.UnsupportedProblemError, match=r"(?s)deterministic gradients.*fix: export outside"):
            attention.export(query, query, query, target="sm_90")
    finally:
        torch.use_deterministic_algorithms(False)

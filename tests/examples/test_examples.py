"""Each example file defines its mods for `flexgen compile`, runs on its own, prints its kernel, and is right."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen.cli import run_file
from tests.reference import dense_attention

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))
VARIANTS = [path for path in EXAMPLES if path.stem not in ("demo", "generation")]
EXPECTED = [
    "alibi",
    "causal",
    "dilated_window",
    "document_mask",
    "gqa",
    "neighbourhood_2d",
    "prefix_lm",
    "relative_bias",
    "sliding_window",
    "softcap",
]

each_variant = pytest.mark.parametrize("path", VARIANTS, ids=lambda path: path.stem)


def load(path: Path) -> dict[str, Any]:
    return runpy.run_path(str(path), run_name="example")


def test_the_promised_examples_exist() -> None:
    assert [path.stem for path in VARIANTS] == EXPECTED


@each_variant
def test_example_is_right(path: Path) -> None:
    example = load(path)
    B, Hq, Hkv, Lq, Lk, Dqk, Dv = example["SHAPE"]
    generator = torch.Generator().manual_seed(0)
    shapes = ((B, Hq, Lq, Dqk), (B, Hkv, Lk, Dqk), (B, Hkv, Lk, Dv))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    expected = dense_attention(query, key, value, example.get("score_mod"), example.get("mask_mod"))
    torch.testing.assert_close(example["attention"](query, key, value).double(), expected.out, rtol=0, atol=1e-4)


@each_variant
def test_example_prints_its_kernel(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_file(str(path), ["--dump-code"]) == 0
    printed = capsys.readouterr().out
    assert "@triton.jit" in printed or "@gluon.jit" in printed


def test_an_example_runs_as_a_script() -> None:
    path = next(path for path in VARIANTS if path.stem == "causal")
    completed = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert "pass" in completed.stdout


def test_demo_writes_its_kernels(tmp_path: Path) -> None:
    demo = EXAMPLES[[path.stem for path in EXAMPLES].index("demo")]
    command = [sys.executable, str(demo), "--dump-code", str(tmp_path)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert completed.stdout.count("pass: largest difference") == 2
    written = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.py")}
    assert written >= {"sliding_window/forward.py", "softcapped_documents/forward.py"}


def test_generation_from_a_paged_cache_equals_dense_attention() -> None:
    """Token by token, and over a page's end, a window's end and more than one page."""
    example = load(next(path for path in EXAMPLES if path.stem == "generation"))
    torch.manual_seed(0)
    config = example["Config"]()
    model = example["Model"](config)
    prompt = torch.randint(config.vocabulary, (2, 30))
    tokens, worst = example["generate"](model, config, prompt, 5)  # raises where a token differs
    assert tokens.shape == (2, 5)
    assert len(set(tokens.flatten().tolist())) > 2  # what is attended to decides the tokens
    assert worst < 1e-4


def test_generation_prints_its_kernels() -> None:
    example = load(next(path for path in EXAMPLES if path.stem == "generation"))
    source = example["decode_kernels"](example["Config"]())
    assert "page_table_ptr" in source
    assert "def combine(" in source

"""What each command prints, and that the printed is true."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from flexgen.commands import check, reference
from flexgen.commands.dropout_pattern import kept_pairs
from flexgen.commands.reference import DenseProblem, evaluate_dense
from flexgen.runtime.cache import SourceCache
from flexgen.tuning.store import FOLDER, TunedStore
from tests.cli.conftest import Run
from tests.reference import dense_attention, eager_attention

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


# compile


def test_dump_code_prints_the_source_and_nothing_else(mods: Path, run: Run) -> None:
    said = run("compile", f"{mods}:softcap,causal", "--dump-code", "--target", "sm_90")
    assert said.code == 0
    assert "softcap: the score" in said.out and "causal: the mask" in said.out
    assert ast.get_docstring(ast.parse(said.out)) is not None
    assert "said while loading" in said.err


def test_a_default_target_is_told_apart_from_the_source(
    causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = run("compile", causal, "--dump-code")
    assert "no GPU here: compiling for sm_90" in said.err and "no GPU" not in said.out


@needs_triton
def test_dump_code_writes_a_numbered_file_for_each_stage(causal: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    said = run("compile", causal, "--dump-code", folder, "--target", "sm_80")
    assert said.code == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "01_captured.ir",
        "02_simplified.ir",
        "03_facts.txt",
        "04_plan.txt",
        "05_forward.lines.json",
        "05_forward.py",
        "06_resources.txt",
        "06_sm_80.ptx",
    ]
    assert sorted(said.out.split()) == sorted(str(folder / name) for name in names)
    assert ".target sm_80" in (folder / "06_sm_80.ptx").read_text()
    assert re.search(r"registers +\d+ a thread", (folder / "06_resources.txt").read_text())


def test_dump_code_into_a_file_is_an_error_not_a_bug(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--dump-code", causal.with_name("mine.txt"), "--target", "interpret")
    assert said.code == 0
    blocked = causal.with_name("mine.txt") / "01_captured.ir" / "below"
    said = run("compile", causal, "--dump-code", blocked, "--target", "interpret")
    assert said.code == 2 and "cannot write" in said.err


@needs_triton
def test_compile_sums_up_what_it_built(causal: Path, run: Run) -> None:
    said = run(
        "compile", causal, "--target", "sm_80", "--set", "BLOCK_M=32", "BLOCK_N=32", "num_warps=4", "num_stages=2"
    )
    assert said.code == 0
    assert "32 queries x 32 keys, 4 warps, 2 stages" in said.out
    assert (
        "closed form" in said.out and "registers" in said.out and "spills" in said.out and "shared memory" in said.out
    )


def test_the_interpreter_has_no_machine_code(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--target", "interpret")
    assert said.code == 2 and "no machine code" in said.err
    assert run("compile", causal, "--target", "interpret", "--dump-code").code == 0


# explain


def test_explain_gives_decisions_with_reasons_and_fits_the_screen(mods: Path, run: Run) -> None:
    said = run("explain", f"{mods}:documents", "--set", "USE_SUBTILING=1", "--target", "sm_90")
    assert said.code == 0
    assert re.search(r"USE_SUBTILING += True +because: asked for", said.out)
    assert "block table" in said.out
    assert max(map(len, said.out.splitlines())) <= 100
    assert "\x1b" not in said.out


# check


@needs_triton
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_check_compares_every_output_and_passes(mods: Path, run: Run, dtype: str) -> None:
    said = run("check", f"{mods}:softcap,causal", "--dtype", dtype, "--target", "interpret")
    assert said.code == 0, said.out + said.err
    for name in ("output", "logsumexp", "max_scores"):
        assert re.search(rf"^{name}( +\d\.\de[-+]\d\d){{3}}  pass$", said.out, re.MULTILINE)
    assert said.out.endswith("pass\n")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_check_runs_on_the_gpu_that_is_there(causal: Path, run: Run, dtype: str) -> None:
    said = run("check", causal, "--dtype", dtype)
    assert said.code == 0, said.out + said.err
    assert torch.cuda.get_device_name() in said.out
    explained = run("explain", causal)
    assert explained.code == 0 and "no GPU here" not in explained.err


@needs_triton
def test_check_fails_where_the_kernel_is_wrong(mods: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def slightly_off(problem: DenseProblem, *arguments: object) -> object:
        exact = evaluate_dense(problem, "exact")
        exact.logsumexp[0, 0, 5] += 0.1
        return exact

    monkeypatch.setattr(check, "evaluate_dense", slightly_off)
    said = run("check", f"{mods}:causal", "--target", "interpret")
    assert said.code == 1 and said.out.endswith("FAIL\n")
    assert re.search(r"^logsumexp .* FAIL$", said.out, re.MULTILINE)
    assert re.search(r"^output .* pass$", said.out, re.MULTILINE)


@needs_triton
def test_check_with_dropout_knows_which_weights_are_dropped(
    mods: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("check", f"{mods}:softcap,causal", "--dropout", "0.4", "--shape", "1,4,2,40,70,16,16")
    said = run(*command, "--target", "interpret")
    assert said.code == 0, said.out + said.err
    monkeypatch.setattr(check, "SEED", 1)
    assert run(*command, "--target", "interpret").code == 0
    monkeypatch.setattr(reference, "kept_pairs", lambda dropout, box: kept_pairs(dropout, box).logical_not())
    said = run(*command, "--target", "interpret")
    assert said.code == 1 and re.search(r"^output .* FAIL$", said.out, re.MULTILINE)
    assert re.search(r"^logsumexp .* pass$", said.out, re.MULTILINE)


def test_commands_that_compile_take_dropout(causal: Path, run: Run) -> None:
    said = run("explain", causal, "--dropout", "0.1", "--target", "sm_90")
    assert said.code == 0 and re.search(r"^  DROPOUT += grouped +because: dropout_p is not 0", said.out, re.MULTILINE)
    said = run("compile", causal, "--dropout", "0.1", "--dump-code", "--backward", "--target", "sm_90")
    assert said.code == 0 and said.out.count("def is_kept(") == 3
    for wrong in ("1.5", "nan", "often"):
        said = run("explain", causal, "--dropout", wrong)
        assert said.code == 2 and f"'{wrong}' is not a probability" in said.err


@needs_triton
def test_check_says_that_a_shape_does_not_fit_the_captured_tensors(mods: Path, run: Run) -> None:
    said = run("check", f"{mods}:documents", "--shape", "1,1,1,128,128,16,16", "--target", "interpret")
    assert said.code == 2 and "outside of a captured tensor" in said.err and "--shape" in said.err


@needs_triton
@pytest.mark.parametrize("returned", ["2", "-1.5", "True"])
def test_check_takes_a_score_mod_that_returns_a_number(tmp_path: Path, run: Run, returned: str) -> None:
    path = tmp_path / "mods.py"
    path.write_text(f"def score_mod(s, b, h, q, k):\n    return {returned}\n")
    said = run("check", path, "--shape", "1,1,1,20,20,16,16")
    assert said.code == 0 and said.out.endswith("pass\n")


def test_check_refuses_a_chip_that_is_not_here(causal: Path, run: Run) -> None:
    said = run("check", causal, "--target", "gfx942")
    assert said.code == 2 and "check cannot run on gfx942" in said.err


def test_the_reference_agrees_with_that_of_the_tests() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, length, size, generator=generator, dtype=torch.float16)
        for heads, length, size in ((4, 9, 8), (2, 12, 8), (2, 12, 5))
    )
    table = torch.randn(12, generator=generator)

    def score_mod(score, b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return score * (h + 1) + table[kv_idx]

    def mask_mod(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return (q_idx > 2) & (kv_idx <= q_idx + b)

    problem = DenseProblem(query, key, value, score_mod, mask_mod, scale=0.5)
    exact, theirs = evaluate_dense(problem, "exact"), dense_attention(query, key, value, score_mod, mask_mod, 0.5)
    torch.testing.assert_close(exact.output, theirs.out)
    torch.testing.assert_close(exact.logsumexp, theirs.lse)
    torch.testing.assert_close(exact.max_scores, theirs.max_scores)
    eager = eager_attention(query, key, value, score_mod, mask_mod, 0.5)
    torch.testing.assert_close(evaluate_dense(problem, "eager").output, eager)


# cache


def test_cache_lists_and_clears(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path / "cache"))
    assert run("cache", "path").out == f"{tmp_path / 'cache'}\n"
    assert not (tmp_path / "cache").exists()
    assert run("cache", "clear").out.startswith("deleted 0 sources")
    docstring = (
        '"""Fused attention, forward, for sm_90. Written by flexgen.\n\nscore_mod    none: x\nmask_mod     causal\n"""'
    )
    SourceCache(tmp_path / "cache").keep("0123456789abcdef", docstring)
    said = run("cache", "list")
    assert said.code == 0 and "forward, for sm_90, mask_mod causal" in said.out and "1 source," in said.err
    TunedStore(tmp_path / "cache" / FOLDER).put("a" * 32, {"fwd_BLOCK_N": 64}, 1.0, 2.0)
    assert run("cache", "list").err.endswith(", and what was tuned for 1 problem\n")
    cleared = run("cache", "clear").out
    assert cleared.startswith("deleted 1 source ") and cleared.endswith(", and what was tuned for 1 problem\n")
    assert run("cache", "list").out == ""


def test_cache_shows_one_source_by_the_beginning_of_its_key(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path))
    for key in ("0123456789abcdef", "0123ffffffffffff"):
        SourceCache(tmp_path).keep(key, f"KEY = '{key}'\n")
    assert run("cache", "show", "01234").out == "KEY = '0123456789abcdef'\n"
    assert "2 sources have a key" in run("cache", "show", "0123").err
    assert "no key 'ff'" in run("cache", "show", "ff").err
    assert "show needs a KEY" in run("cache", "show").err
    assert run("cache", "list", "0123").code == 2


def test_cache_verifies_and_prunes(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path))
    paths = [SourceCache(tmp_path).keep(f"{number:016}", "VALUE = 1\n").path for number in range(2)]
    assert (run("cache", "verify").code, run("cache", "verify").out) == (
        0,
        "2 sources and 0 compiled kernels, all intact\n",
    )
    paths[0].write_text("VALUE = 2\n")
    half = tmp_path / "compiled" / "ABC"
    half.mkdir(parents=True)
    (half / "kernel.cubin").write_bytes(b"half")
    said = run("cache", "verify")
    assert said.code == 1
    assert said.out.splitlines()[:2] == [f"damaged  {paths[0]}", f"damaged  {half}"]
    assert "is damaged" in run("cache", "show", "0000000000000000").err
    assert run("cache", "prune").out == f"deleted 1 source and 1 compiled kernel in {tmp_path}\n"
    assert run("cache", "verify").code == 0
    assert run("cache", "clear").out.startswith("deleted 1 source ")


def test_cache_refuses_a_directory_that_others_may_write_to(run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("FLEXGEN_CACHE_DIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    said = run("cache", "list")
    assert said.code == 2 and "other users may write to" in said.err and "chmod 700" in said.err


# packed sequences


@needs_triton
def test_check_compares_each_packed_sequence_with_float64(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "after_a_prefix.py"
    file.write_text(
        "import torch\nprefix = torch.tensor([3, 0, 9])\nSHAPE = (2, 4, 2, 64, 64, 16, 16)\n\n\n"
        "def mask_mod(b, h, q_idx, kv_idx):\n    return (q_idx >= kv_idx) | (kv_idx < prefix[b])\n"
    )
    said = run("check", file, "--packed", "20,0,37", "--target", "interpret")
    assert said.code == 0 and "1,4,2,57,57,16,16 packed 20,0,37" in said.out
    assert said.out.count("pass") == 4


def test_packed_sequences_reach_the_source(causal: Path, run: Run) -> None:
    said = run("compile", causal, "--dump-code", "--target", "sm_90", "--packed", "100,37,1")
    assert said.code == 0 and "cu_seqlens_q_ptr" in said.out
    said = run("explain", causal, "--target", "sm_90", "--packed", "100,37,1")
    assert "PACKED_SEQUENCES       = True" in said.out


def test_lengths_that_are_none_are_refused(causal: Path, run: Run) -> None:
    said = run("check", causal, "--packed", "100,-3")
    assert said.code == 2 and "'100,-3' are no lengths" in said.err
    assert run("mask", causal, "--packed", "100").code == 2  # a mask's picture is of one sequence


@pytest.mark.parametrize(
    ("given", "said_of_it"),
    [
        (["--ranks", "0"], "'0' is no count: give a whole number from 1"),
        (["--ranks", "3"], "a query of 256 tokens cannot be cut in 6 equal chunks"),
        (["--ranks", "2", "--packed", "100,28"], "--ranks was given with --packed"),
        (["--ranks", "2", "--dropout", "0.1"], "--ranks was given with --dropout"),
    ],
)
def test_what_cannot_be_sharded_is_told(causal: Path, run: Run, given: list[str], said_of_it: str) -> None:
    said = run("explain", causal, "--target", "sm_90", *given)
    assert said.code == 2 and said_of_it in said.err

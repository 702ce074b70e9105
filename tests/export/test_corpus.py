"""Every mask and score_mod of the corpus, exported: sound text, and what flexgen computes itself."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.capture.live import LiveMods
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.corpus.scores import SCORES
from tests.export.conftest import Case, RunCases
from tests.export.test_meaning import weights_of
from tests.reference import largest_error

ROOT = Path(__file__).parents[2]
SHAPE = Shape(B=2, Hq=2, Hkv=1, Lq=128, Lk=128)  # heads of one group: time goes with them
SIZES = (2, 2, 1, 128, 128, 16, 16)


def cases() -> Iterator[Case]:
    device = torch.device("cpu")
    for kind, corpus in (("score", SCORES), ("mask", MASKS)):
        for entry in corpus:
            if not entry.fits(SHAPE) or entry.name == "all_false":  # whose kernels load what they never use
                continue
            mod = entry.build(SHAPE, device)
            score, mask = (mod, None) if kind == "score" else (None, mod)
            for tensor in LiveMods(score, mask).current(torch.float32).buffers:
                if kind == "score" and tensor.is_floating_point():
                    tensor.requires_grad_()
            captured = LiveMods(score, mask).current(torch.float32).buffers
            yield Case(f"{kind}_{entry.name}", score, mask, SIZES, captured=tuple(captured))


@pytest.mark.slow
def test_every_module_of_the_corpus_passes_ruff(tmp_path: Path) -> None:
    for case in cases():
        attention = flexgen.compile(case.score_mod, case.mask_mod)
        text = attention.export(*case.inputs(), return_aux=flexgen.AuxRequest(lse=True), target="sm_90")
        (tmp_path / f"{case.name}.py").write_text(text)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config", str(ROOT / "pyproject.toml")]
    completed = subprocess.run(
        [*command, "--extend-ignore", "SIM300", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stdout


def own(case: Case) -> list[Tensor]:
    """Return what flexgen itself computes, output, logsumexp and gradients, in its own interpreter."""
    attention = flexgen.compile(case.score_mod, case.mask_mod)
    inputs = case.inputs()
    output, aux = attention(*inputs, return_aux=flexgen.AuxRequest(lse=True))
    leaves = [tensor for tensor in (*inputs, *case.captured) if tensor.requires_grad]
    loss = sum((found * weight).sum() for found, weight in zip((output, aux.lse), weights_of(case), strict=True))
    return [output, aux.lse, *torch.autograd.grad(loss, leaves)]


@pytest.mark.slow
def test_every_module_of_the_corpus_computes_what_flexgen_does(tmp_path: Path, run_standalone: RunCases) -> None:
    asked, known = [], list(cases())
    for case in known:
        path = tmp_path / f"{case.name}.py"
        path.write_text(case.export())
        arguments = [*case.inputs(), *case.captured]
        asked.append({"path": str(path), "arguments": arguments, "weights": weights_of(case)})
    with ThreadPoolExecutor(1) as elsewhere:
        running = elsewhere.submit(run_standalone, asked)
        owned = [own(case) for case in known]
    wrong = []
    for case, found, results in zip(known, running.result(), owned, strict=True):
        for number, (actual, exact) in enumerate(zip([*found["outputs"], *found["grads"]], results, strict=True)):
            scale = max(1.0, float(exact.detach().abs().nan_to_num(posinf=0).max()))
            error = largest_error(actual.nan_to_num(1e9), exact.nan_to_num(1e9))
            wrong += [f"{case.name}, result {number}: {error}"] if not error < 1e-5 * scale else []
    assert wrong == []

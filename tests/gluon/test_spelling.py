"""Gluon renamed words between releases of Triton: which kernels are written in which, and that nothing else differs."""

from __future__ import annotations

import pytest

from benchmarks.gluon_backward_check import lowered as lowered_backward
from benchmarks.gluon_verified import code_digest, verified
from flexgen.codegen.dialects import gluon
from flexgen.codegen.source import KernelSource
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from tests.gluon.backward_problems import CHECKS as BACKWARD_CHECKS
from tests.gluon.backward_problems import backward_of
from tests.gluon.conftest import WrittenIn
from tests.gluon.problems import CHECKS, lowered

RELEASES = {"3.6.0": "3.6", "3.7.1": "3.6", "3.8.0": "3.6", "3.9.0": "3.9", "3.9.1+git1234": "3.9"}


@pytest.mark.parametrize("version", RELEASES)
def test_a_release_has_the_spelling_of_the_one_that_brought_it(version: str) -> None:
    assert gluon.spelling_of(version) == RELEASES[version]


@pytest.mark.parametrize("version", ["3.5.1", "3.10.0", "4.0.0"])
def test_other_releases_are_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "_installed", lambda: version)
    assert f"Triton {version} is none of the versions" in str(gluon.why_unavailable.__wrapped__())


def test_without_triton_kernels_are_emitted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gluon, "_installed", lambda: None)
    assert gluon.why_unavailable.__wrapped__() is None
    assert gluon.installed_spelling.__wrapped__() in gluon.SPELLINGS


def test_a_renamed_word_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(gluon, "SPELLINGS", dict.fromkeys(gluon.SPELLINGS, gluon.Spelling("no_such_copy")))
    assert "hopper.tma.no_such_copy" in str(gluon.why_unavailable.__wrapped__())


def test_kernels_are_written_for_the_installed_triton() -> None:
    triton = pytest.importorskip("triton")
    spelling = gluon.SPELLINGS[RELEASES.get(triton.__version__, "3.6")]
    assert f"tma.{spelling.load_tile}(" in lowered(CHECKS["causal D=128"]).source["forward"]


def forward_sources() -> list[KernelSource]:
    names = ("causal D=128", "window 100 D=64")  # a kernel of each template
    return [lowered(CHECKS[name]).sources["forward"] for name in names]


def backward_sources() -> list[KernelSource]:
    passes = backward_of(lowered_backward(BACKWARD_CHECKS["causal D=128"])).passes
    return [source for source, plan in passes.values() if isinstance(plan, GluonBackwardPlan)]


@pytest.mark.parametrize("spelling", sorted(gluon.SPELLINGS.keys() - {gluon.OLDEST}))
@pytest.mark.parametrize("sources_of", [forward_sources, backward_sources])
def test_another_spelling_is_the_checked_code_in_other_words(sources_of, spelling: str, written_in: WrittenIn) -> None:
    written_in(gluon.OLDEST)
    oldest = sources_of()
    written_in(spelling)
    new, old = (f"tma.{gluon.SPELLINGS[name].load_tile}(" for name in (spelling, gluon.OLDEST))
    for source, checked in zip(sources_of(), oldest, strict=True):
        assert new in source.text and old not in source.text
        assert code_digest(source.text.replace(new, old)) in verified()
        assert code_digest(checked.text) in verified()
        assert source.key != checked.key

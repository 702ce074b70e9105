"""The dialect's translation, descriptors of tensors, and factors taken out of a score_mod."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.codegen.dialects import gluon
from flexgen.errors import InternalError
from flexgen.ir.evaluate import evaluate
from flexgen.lowering.score_fold import fold_score
from flexgen.runtime.gluon_descriptor import ANY_STRIDE, descriptor_form
from tests.gluon.problems import lower


def test_words_are_translated_one_by_one() -> None:
    plain = "@triton.jit\ntl.where(x, tl.broadcast_to(y, s), tl.full(s, 1.0, tl.float32))"
    assert gluon.translate(plain) == "@gluon.jit\ngl.where(x, broadcast_to(y, s), full(s, 1.0, gl.float32))"
    assert gluon.helpers_in([plain]) == ["broadcast_to", "full"]


def test_an_unknown_word_is_an_error() -> None:
    with pytest.raises(InternalError, match=r"no spelling for tl\.dot"):
        gluon.translate("tl.dot(a, b)")


def test_the_installed_triton_is_probed() -> None:
    pytest.importorskip("triton")
    assert gluon.why_unavailable() is None


def test_a_missing_name_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(gluon, "REQUIRED", {gluon.HOPPER: ("no_such_name",)})
    assert "no_such_name" in str(gluon.why_unavailable.__wrapped__())


def test_a_descriptor_follows_the_strides() -> None:
    form = descriptor_form(torch.empty(2, 100, 4, 64).transpose(1, 2))
    assert form.shape == [2, 4, 100, 64]
    assert form.strides == [25600, 64, 256, 1]


def test_a_dimension_that_repeats_has_one_entry() -> None:
    form = descriptor_form(torch.empty(1, 4, 100, 64).expand(3, -1, -1, -1))
    assert form.shape == [1, 4, 100, 64]
    assert form.strides == [ANY_STRIDE, 6400, 64, 1]


def softcap(score, b, h, q_idx, kv_idx):
    return 20.0 * torch.tanh(score / 5.0)


def negative(score, b, h, q_idx, kv_idx):
    return -2.0 * torch.tanh(score)


def twice_used(score, b, h, q_idx, kv_idx):
    return torch.tanh(score * 2.0) + score


@pytest.mark.parametrize(
    ("mod", "before", "after"), [(softcap, 0.2, 20.0), (negative, 1.0, 1.0), (twice_used, 1.0, 1.0)]
)
def test_factors_around_a_score_mod(mod, before: float, after: float) -> None:
    graph = lower(mod, None).understood.mods.score
    assert graph is not None
    fold = fold_score(graph, constant_scale=True)
    assert (fold.before, fold.after) == (before, after)


def test_a_score_mod_with_its_factors_is_the_same() -> None:
    graph = lower(softcap, None).understood.mods.score
    assert graph is not None
    fold = fold_score(graph, constant_scale=True)
    score = torch.linspace(-40, 40, 101)
    indices = {name: torch.tensor(0) for name in ("b", "h", "q_idx", "kv_idx")}
    inner = evaluate(fold.graph, {**indices, "score": fold.before * score}, {}, {})
    torch.testing.assert_close(fold.after * inner, softcap(score, 0, 0, 0, 0))


def test_a_run_time_scale_keeps_the_factor_before() -> None:
    graph = lower(softcap, None).understood.mods.score
    assert graph is not None
    assert fold_score(graph, constant_scale=False).before == 1.0


def test_a_kernel_shows_the_users_line_of_a_folded_mod() -> None:
    text = lower(softcap, None).source["forward"]
    assert "# return 20.0 * torch.tanh(score / 5.0)\n    return tanh_approx(score)" in text


def test_unavailable_backends_are_named_in_the_report() -> None:
    report = lower(options={"USE_TMA": True}).explain()
    assert "rejected GLUON: USE_TMA selects plain Triton" in report


def test_a_training_call_uses_it_too() -> None:
    query = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device="meta", requires_grad=True)
    low = flexgen.compile().lower(query, query, query, return_aux=flexgen.AuxRequest(lse=True), target="sm_90")
    assert "logsumexp_ptr" in low.source["forward"]
    assert low.plan.OUTPUT_LOGSUMEXP

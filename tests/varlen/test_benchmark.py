"""The benchmark of packed documents, as far as it goes without a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks import program_order, varlen


def test_documents_are_of_random_positive_lengths():
    lengths = varlen.partition(1000, 40)
    assert len(lengths) == 40 and sum(lengths) == 1000 and min(lengths) > 0 and len(set(lengths)) > 10
    assert varlen.partition(40, 40) == [1] * 40


def test_a_report_marks_wrong_results():
    row = varlen.Row("forward", 64, 1000, 2, 10**9, {"packed": 1.0, "flex": 2.0}, {"packed": 0.001, "flex": 0.5})
    assert row.tflops["packed"] == pytest.approx(2 * row.tflops["flex"])
    text = varlen.report([row], {"device": "a chip"})
    assert "| forward | 64 | 1000 | 2 | 8192 | 4096 | WRONG ['flex']" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_needs_a_gpu(monkeypatch):
    monkeypatch.setattr("sys.argv", ["varlen"])
    with pytest.raises(SystemExit, match="on a GPU"):
        varlen.main()


def test_a_simulated_schedule_starts_programs_where_a_place_is_free():
    assert program_order.makespan([3.0, 1.0, 1.0, 1.0], 2) == 3.0
    assert program_order.makespan([1.0, 1.0, 1.0, 3.0], 2) == 4.0
    assert program_order.costs([64, 65], causal=True) == [3, 1 / 3, 3, 4]  # the tile that is one too many ends at once
    after, together, best = program_order.ratios(64, 16, causal=True, seed=0)
    assert 1.0 <= best <= together < after

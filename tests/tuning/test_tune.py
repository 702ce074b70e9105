"""Tuning of real kernels: the space, the pool of processes, the store, and the command, with injected times."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.errors import NoFeasiblePlanError, OptionError, UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.triton_decode.plan import DecodePlan
from flexgen.runtime.timing import Contender
from flexgen.tuning import tune as tuning
from flexgen.tuning.cost_pool import cost_pool
from flexgen.tuning.kernel_bench import KernelBench
from flexgen.tuning.search import Pruned
from flexgen.tuning.space import Group, groups, why_pruned
from flexgen.tuning.store import Tuned, TunedStore, tuned_key
from flexgen.tuning.tune import TuningSubject, tune

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def make(settings):
    return flexgen.compile(mask_mod=causal, options=dict(settings))


def lowered(target: str, length: int = 1024, group: int = 1, backward: bool = False, **options: object) -> Lowered:
    attention = flexgen.compile(mask_mod=causal, options=options)
    query = torch.empty(1, 4, length, 64, dtype=torch.bfloat16, device="meta", requires_grad=backward)
    key = torch.empty(1, 4 // group, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=backward)
    return attention.lower(query, key, key, target=target)


class TestSpace:
    """What is tried."""

    def tried(self, low: Lowered, rows: int = 1024) -> list[dict[str, object]]:
        return [dict(settings) for group in groups(low, "forward", rows) for settings in group.settings]

    def test_all_settings_are_options_that_lower_or_are_refused_for_a_reason(self):
        for target in ("sm_80", "sm_90", "gfx942"):
            outcomes = set()
            for settings in self.tried(lowered(target)):
                try:
                    lowered(target, **settings)
                except (OptionError, NoFeasiblePlanError) as error:
                    outcomes.add("refused" if error.fix else "refused without a fix")
                else:
                    outcomes.add("lowers")
            assert "lowers" in outcomes and "refused without a fix" not in outcomes

    def test_hoppers_own_kernels_are_tried_beside_plain_triton(self):
        backends = {settings.get("fwd_BACKEND") for settings in self.tried(lowered("sm_90"))}
        assert backends == {"TRITON", "GLUON", None}
        assert {settings.get("fwd_BACKEND") for settings in self.tried(lowered("gfx942"))} == {"TRITON", None}

    def test_a_decode_tries_no_tile_of_more_rows_than_it_has(self):
        low = lowered("sm_80", 1, group=4, FORCE_USE_FLEX_ATTENTION=True)
        assert {settings.get("fwd_BLOCK_M") for settings in self.tried(low, rows=4)} == {16, None}

    def test_a_decode_tries_tiles_of_keys_and_then_splits(self):
        tiles, splits = groups(lowered("sm_90", 1, group=4), "forward", 4)
        too_large = 0
        for settings in (*tiles.settings, *splits.settings):
            try:
                plan = lowered("sm_90", 1, group=4, **settings).plan
            except NoFeasiblePlanError:  # which prunes it
                too_large += 1
                continue
            assert isinstance(plan, DecodePlan) and plan.BLOCK_M == 16
        assert too_large < len(tiles.settings) / 4
        assert [settings["fwd_SPLIT_KV"] for settings in splits.settings][:3] == [1, 2, 3]

    def test_backward_kernels_are_searched_one_after_the_other(self):
        names = [group.name for group in groups(lowered("sm_80", backward=True), "backward", 1024)]
        assert names == ["warps and stages", "tile of dK and dV", "tile of dQ"]

    def test_the_models_verdict_on_a_forced_tile_prunes_it(self):
        large = {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2}
        why = why_pruned(lowered("sm_80", BACKEND="TRITON", **large), "forward")
        assert why is not None and "values a thread in registers" in why
        assert why_pruned(lowered("sm_80"), "forward") is None


def offline(direction="forward", target="sm_80") -> KernelBench:
    query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, device="meta")
    return KernelBench(make, (query, query, query), direction, cost_pool(2), target)


class TestBench:
    """The workbench without a GPU."""

    def test_digests_are_those_of_what_is_executed(self):
        bench = offline()
        usual = bench.lower({})
        plan = bench.lowered({}).plan
        assert bench.lower({"fwd_BLOCK_N": plan.BLOCK_N}) == usual, "asked for, and the same kernel"
        assert bench.lower({"fwd_num_warps": plan.num_warps * 2}) != usual
        with pytest.raises(Pruned, match="cannot be honoured"):
            bench.lower({"fwd_USE_TMA": True})

    def test_splits_of_a_decode_are_part_of_the_digest(self):
        query = torch.empty(1, 2, 1, 16, dtype=torch.bfloat16, device="meta")
        key = torch.empty(1, 2, 512, 16, dtype=torch.bfloat16, device="meta")
        bench = KernelBench(make, (query, key, key), "forward", cost_pool(1), "sm_80")
        assert len({bench.lower(settings) for settings in ({}, {"SPLIT_KV": 2}, {"SPLIT_KV": 3})}) == 3

    @needs_triton
    def test_kernels_are_compiled_in_other_processes_and_failures_are_told(self):
        query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, device="meta")
        with cost_pool(1) as pool:
            bench = KernelBench(make, (query, query, query), "forward", pool, "sm_80")
            settings = {"fwd_BLOCK_N": 16, "fwd_num_stages": 1}
            ((number, costs),) = bench.compile([settings])
            assert number == 0 and isinstance(costs, dict)
            cost = costs["forward"]
            assert 0 < cost.registers <= 255 and cost.loop > 0 and cost.issued > 0
            job = bench.lowered(settings).compile_job()
            text = job.source.text.replace("row_max = new_max", "row_max = absent")
            broken = replace(job, source=replace(job.source, text=text, key="f" * 32))
            ((_, why),) = pool.compile([broken])
            assert isinstance(why, str) and "does not compile for sm_80" in why
        assert pool._processes == []

    @needs_triton
    def test_a_process_that_dies_fails_its_job_alone(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(sys, "executable", "/bin/false")
        with cost_pool(1) as pool:
            ((_, why),) = pool.compile([lowered("sm_80").compile_job()])
        assert isinstance(why, str) and "the compiling process ended" in why


def alike(call: Contender, count: int) -> list[float]:
    """A stopwatch by which every call takes the same."""
    call()
    return [2.0]


class TestTune:
    """A whole search on the CPU, where kernels are interpreted and nothing is compiled."""

    @pytest.fixture(autouse=True)
    def _few_candidates_that_need_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        few = (Group("tiles", ({"fwd_BLOCK_N": 16}, {"fwd_BLOCK_N": 64}, {"fwd_BLOCK_N": 24})),)
        monkeypatch.setattr(tuning, "groups", lambda usual, direction, rows: few)

        def compiled(bench: KernelBench, candidates):
            yield from ((number, {}) for number, _ in enumerate(candidates))

        monkeypatch.setattr(KernelBench, "compile", compiled)

    def subject(self) -> TuningSubject:
        query, key, value = torch.randn(3, 1, 2, 64, 16)
        return TuningSubject(make, (query, key, value), "bhsd")

    def test_what_is_found_is_stored_and_taken_the_next_time(self, tmp_path: Path):
        store = TunedStore(tmp_path)
        first = tune(self.subject(), "forward", store, stopwatch=alike)
        states = {str(dict(trial.settings)): trial.state for trial in first.trials}
        assert states == {
            "{}": "measured",
            "{'fwd_BLOCK_N': 16}": "measured",
            "{'fwd_BLOCK_N': 64}": "measured",
            "{'fwd_BLOCK_N': 24}": "pruned",
        }
        assert first.tuned.settings == {} and first.tuned.milliseconds == 2.0
        again = tune(self.subject(), "forward", store, stopwatch=alike)
        assert again.trials == () and again.tuned == first.tuned
        assert tune(self.subject(), "forward", store, again=True, stopwatch=alike).trials

    def test_what_a_decode_brings_goes_along(self, tmp_path: Path):
        query, (key, value) = torch.randn(2, 4, 1, 16), torch.randn(2, 5, 2, 16, 16)
        lengths = torch.tensor([20, 9], dtype=torch.int32)
        given = {"kv_lengths": lengths, "page_table": torch.tensor([[4, 0], [2, -1]], dtype=torch.int32)}
        given |= {"k_scale": 0.5, "v_scale": torch.tensor([2.0, 3.0]), "block_table": None}
        received = []

        class Noted(flexgen.Attention):
            def __call__(self, *tensors, **more):
                received.append(more)
                return super().__call__(*tensors, **more)

        def noting(settings):
            return Noted(None, None, flexgen.Options.of(dict(settings)))

        subject = TuningSubject(noting, (query, key, value), "bhsd", given)
        store = TunedStore(tmp_path)
        assert tune(subject, "forward", store, stopwatch=alike).trials
        assert received and all(more == given for more in received)
        wider = {**given, "page_table": torch.zeros(2, 3, dtype=torch.int32)}
        assert tune(replace(subject, given=wider), "forward", store, stopwatch=alike).trials, "another cache size"

    def test_the_backward_is_tuned_over_what_the_forward_has(self, tmp_path: Path):
        chosen: list[dict[str, object]] = []

        def make_noted(settings):
            chosen.append(dict(settings))
            return make(settings)

        subject = replace(self.subject(), make=make_noted).having({"fwd_BLOCK_N": 16})
        assert tune(subject, "backward", TunedStore(tmp_path), stopwatch=alike).trials
        assert all("fwd_BLOCK_N" in settings for settings in chosen)

    def test_a_result_that_differs_is_no_candidate(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def make_wrong(settings):
            attention = make(settings)
            if not settings:
                return attention
            call = attention.__call__
            return _Off(attention, call)

        class _Off:
            def __init__(self, attention, call) -> None:
                self.lower, self._call = attention.lower, call

            def __call__(self, *tensors, **keywords):
                return self._call(*tensors, **keywords) * 1.1

        subject = replace(self.subject(), make=make_wrong)
        outcome = tune(subject, "forward", TunedStore(tmp_path), stopwatch=alike)
        assert outcome.tuned.settings == {}
        failed = [trial for trial in outcome.trials if trial.state == "failed"]
        assert failed and all("its result differs by 1.0e-01" in trial.why for trial in failed)


class TestStore:
    """Results on disk."""

    def test_round_trip(self, tmp_path: Path):
        store = TunedStore(tmp_path / "new")
        assert store.get("a" * 32) is None
        put = store.put("a" * 32, {"fwd_BLOCK_M": 64, "fwd_BACKEND": "TRITON"}, 1.5, 2.0)
        assert store.get("a" * 32) == put == Tuned({"fwd_BLOCK_M": 64, "fwd_BACKEND": "TRITON"}, 1.5, 2.0, put.date)

    @pytest.mark.parametrize("text", ["", "[]", '{"settings": 3}', "\x00"])
    def test_what_cannot_be_read_is_nothing(self, tmp_path: Path, text: str):
        (tmp_path / "key.json").write_text(text)
        assert TunedStore(tmp_path).get("key") is None

    def test_a_directory_that_cannot_be_written_keeps_nothing(self, tmp_path: Path):
        (tmp_path / "file").write_text("")
        store = TunedStore(tmp_path / "file")
        assert store.put("key", {}, 1.0, 1.0).milliseconds == 1.0 and store.get("key") is None

    def test_keys_tell_devices_problems_and_versions_apart(self):
        keys = {
            tuned_key(kernels, device, versions, shape)
            for kernels in (["a"], ["b"])
            for device in ("x", "y")
            for versions in ("1", "2")
            for shape in ((1, 2), (2, 1))
        }
        assert len(keys) == 16


class TestAutotune:
    """`options={"autotune": True}`."""

    def test_on_the_cpu_it_is_refused(self):
        attention = flexgen.compile(mask_mod=causal, options={"autotune": True})
        tensors = torch.randn(3, 1, 2, 32, 16)
        with pytest.raises(OptionError, match="autotune=True cannot be honoured on cpu"):
            attention(*tensors)
        assert "forward" in attention.lower(*tensors, target="sm_80").source

    def test_in_a_trace_it_is_refused(self):
        attention = flexgen.compile(mask_mod=causal, options={"autotune": True})
        with pytest.raises(UnsupportedProblemError, match="call that is being traced"):
            torch.func.vmap(attention)(*torch.randn(3, 2, 1, 2, 32, 16))

    @pytest.mark.gpu
    def test_the_first_call_tunes_and_later_ones_do_not(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        few = (Group("tiles", ({"fwd_BACKEND": "TRITON", "fwd_BLOCK_N": 32}, {"fwd_BLOCK_N": 64})),)
        monkeypatch.setattr(tuning, "groups", lambda usual, direction, rows: few if direction == "forward" else ())
        monkeypatch.setattr("flexgen.tuning.autotune.tuned_store", lambda: TunedStore(tmp_path))
        tensors = [torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        attention = flexgen.compile(mask_mod=causal, options={"autotune": True})
        usual = make({})(*tensors)
        torch.testing.assert_close(attention(*tensors), usual, atol=2e-2, rtol=2e-2)
        assert len(list(tmp_path.iterdir())) == 1
        attention(*(tensor.requires_grad_() for tensor in tensors)).sum().backward()
        assert len(list(tmp_path.iterdir())) == 2, "the backward, beside the forward found"
        assert len(attention._tuned) == 2

"""`flexgen resources`: tables of what kernels take, why one spills, and which option changes it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.commands import resources
from flexgen.commands.spills import held_values, lighter_steps, steps
from flexgen.commands.sweep import parse_sweep, settings_of, settings_text
from flexgen.errors import OptionError
from flexgen.lowered import Lowered
from tests.cli.conftest import Run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SMALL = ("--set", "BLOCK_M=32", "BLOCK_N=32", "num_warps=2", "num_stages=1")
# Scores alone are more values than a thread has registers, so every version of Triton spills.
SPILLING = ("--set", "BLOCK_M=32", "BLOCK_N=256", "num_warps=1", "num_stages=1")


def table(said: str, title: str) -> list[list[str]]:
    """Return the words of each row below a title, the header first."""
    lines = said.splitlines()
    start = lines.index(title) + 1
    rows = []
    for line in lines[start:]:
        if not line or (rows and not re.search(r"\d", line)):
            break
        rows.append(line.split())
    return rows


COSTS, LOOP = "what a kernel takes", "instructions of the main loop, one step of it over a tile"


def test_each_target_has_a_row_in_both_tables(causal: Path, run: Run) -> None:
    said = run("resources", causal, "--target", "sm_80,gfx942", "--target", "sm_80", *SMALL)
    assert said.code == 0, said.err
    header, *rows = table(said.out, COSTS)
    assert header[:5] == ["target", "tile", "warps", "stages", "regs"]
    assert [row[:4] for row in rows] == [["sm_80", "32x32", "2", "1"], ["gfx942", "32x32", "2", "1"]]
    header, *rows = table(said.out, LOOP)
    matrix, exponentials = header.index("matrix"), header.index("exp2")
    for row in rows:
        assert int(row[matrix]) > 0
        assert int(row[exponentials]) >= 32 * 32 // (2 * (64 if row[0] == "gfx942" else 32))
    assert max(map(len, said.out.splitlines())) <= 100
    assert "why" not in said.out


def test_options_stand_side_by_side(causal: Path, run: Run) -> None:
    said = run("resources", causal, "--target", "sm_80", *SMALL, "--compare", "num_stages=2,3", "BLOCK_N=16,256")
    assert said.code == 0, said.err
    rows = table(said.out, COSTS)[1:]
    assert [row[:2] for row in rows[:1]] == [["num_stages=2", "BLOCK_N=16"]]
    assert len(rows) == 4 and {row[2] for row in rows} == {"32x16", "32x256"}
    shared = {tuple(row[:2]): int(row[8]) for row in rows}
    assert shared["num_stages=3", "BLOCK_N=16"] > shared["num_stages=2", "BLOCK_N=16"]


def test_what_cannot_be_compiled_is_told_beside_the_rest(causal: Path, run: Run) -> None:
    said = run("resources", causal, "--target", "sm_80", *SMALL, "--compare", "USE_TMA=default,1")
    assert said.code == 0
    assert "sm_80 USE_TMA=1: USE_TMA=True cannot be honoured" in said.err
    assert len(table(said.out, COSTS)) == 2
    alone = run("resources", causal, "--target", "sm_80", "--set", "USE_TMA=1")
    assert alone.code == 2 and "cannot be honoured" in alone.err


def test_backward_kernels_have_rows(causal: Path, run: Run) -> None:
    blocks = [f"BLOCK_{axis}{number}=32" for axis in "MN" for number in (1, 2)]
    said = run("resources", causal, "--target", "sm_80", "--backward", *SMALL, *blocks)
    assert said.code == 0, said.err
    rows = table(said.out, COSTS)
    assert [row[0] for row in rows] == ["kernel", "forward", "backward_delta", "backward_dq", "backward_dkdv"]
    loops = {row[0]: row[1:] for row in table(said.out, LOOP)}
    assert loops["backward_delta"][0] == "-"
    assert int(loops["backward_dkdv"][0]) > int(loops["forward"][0]) > 0, "four products for two"


def test_why_a_kernel_spills_and_what_changes_it(causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "steps", lambda plan: [{"BLOCK_N": 32}, {"USE_TMA": True}])
    said = run("resources", causal, "--target", "sm_80", *SPILLING, "--steps")
    assert said.code == 0, said.err
    why = said.out[said.out.index("why forward spills on sm_80") :]
    assert "acc 16, score 256: 272 values of 32 bits" in why
    assert "255 registers, 255 at most" in why
    options = re.search(r"it would hold   (.*);", why)
    assert options is not None
    assert all(re.fullmatch(r"\d+ with fwd_\w+=\d+", option) for option in options[1].split(", "))
    assert "without the matrix unit" not in why
    assert re.search(r"\d+ loads and stores, \d+ bytes a thread; the main loop has \d+ of them", why)
    assert re.search(r"line \d+, from flexgen's template triton/", why)
    changed = why[why.index("with one option changed by one step") :].splitlines()
    assert changed[2].startswith("as it is") and changed[3].startswith("BLOCK_N=32")
    assert changed[2].split()[5] != "0" and changed[3].split()[3] == "0"
    assert changed[4].startswith("USE_TMA=True: USE_TMA=True cannot be honoured")
    assert "--steps" not in said.err


def test_float32_in_full_precision_is_told_apart(causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are multiply-adds: their loop is the main one, and the operands are why registers run out."""
    monkeypatch.setattr(resources, "steps", lambda plan: [step for step in steps(plan) if "FLOAT32" in str(step)])
    shape = ("--shape", "1,1,1,256,256,64,64", "--dtype", "fp32", "--set", "BLOCK_M=64", "BLOCK_N=32", "num_warps=2")
    said = run("resources", causal, "--target", "sm_80", *shape, "--steps")
    assert said.code == 0, said.err
    header, row = table(said.out, LOOP)
    found = dict(zip(header, row, strict=False))
    assert found["matrix"] == "0" and int(found["all"]) > 500, "no matrix instruction, and yet a loop"
    assert "without the matrix unit (FLOAT32_PRECISION=ieee)" in said.out
    assert "fwd_FLOAT32_PRECISION=tf32x3" in said.out and "FAST_TANH" not in said.out


class TestSteps:
    """Which options are tried, and what a thread is said to hold."""

    def lowered(self, target: str, backward: bool = False, **options: object) -> Lowered:
        attention = flexgen.compile(mask_mod=lambda b, h, q, kv: q >= kv, options=options)
        query = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16, device="meta", requires_grad=backward)
        return attention.lower(query, query, query, target=target)

    def test_each_is_one_option_and_one_step(self):
        low = self.lowered("sm_80", BLOCK_M=64, BLOCK_N=16, num_warps=4, num_stages=1)
        assert [settings_text(step) for step in steps(low.plan)][:7] == [
            "fwd_BLOCK_M=32",
            "fwd_BLOCK_M=128",
            "fwd_BLOCK_N=32",
            "fwd_num_warps=2",
            "fwd_num_warps=8",
            "fwd_num_stages=2",
            "fwd_USE_SUBTILING=True",
        ]

    def test_backward_kernels_have_options_of_their_own(self):
        low = self.lowered("sm_80", backward=True)
        names = {name for step in steps(low.plan_of("backward_dkdv")) for name in step}
        assert {"bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_num_warps"} <= names and "bwd_BLOCK_M2" not in names
        assert steps(low.plan_of("backward_delta")) == []

    def test_values_are_those_of_the_tiles(self):
        options = {"BLOCK_M1": 32, "BLOCK_N1": 64, "bwd_num_warps": 4}
        low = self.lowered("sm_80", backward=True, BLOCK_M=64, BLOCK_N=32, num_warps=4, **options)
        assert held_values(low.plan_of("forward")) == {"acc": 64 * 64 // 128, "score": 64 * 32 // 128}  # type: ignore[arg-type]
        assert held_values(low.plan_of("backward_dkdv")) == {  # type: ignore[arg-type]
            "grad_key": 64 * 64 // 128,
            "grad_value": 64 * 64 // 128,
            "weight": 64 * 32 // 128,
            "grad_score": 64 * 32 // 128,
        }
        assert lighter_steps(low.plan) == [
            ({"fwd_BLOCK_M": 32}, 24),
            ({"fwd_num_warps": 8}, 24),
            ({"fwd_BLOCK_N": 16}, 40),
        ]
        assert {"bwd_BLOCK_M1": 16} in [step for step, _ in lighter_steps(low.plan_of("backward_dkdv"))]  # type: ignore[arg-type]
        hopper = self.lowered("sm_90").plan
        assert held_values(hopper) == {"acc": 64 * 64 // 128, "score": 64 * hopper.BLOCK_N // 128}


class TestSweeps:
    """`NAME=VALUE,VALUE`."""

    def test_values_are_read_as_those_of_set(self):
        sweeps = [parse_sweep("USE_TMA=default,1"), parse_sweep("BACKEND=TRITON")]
        assert settings_of(sweeps) == [{"BACKEND": "TRITON"}, {"USE_TMA": 1, "BACKEND": "TRITON"}]
        assert settings_of([]) == [{}] and settings_text({}) == "default"

    @pytest.mark.parametrize("text", ["BLOCK_M", "=64", "BLOCK_M=", "BLOCK_M=64,,32"])
    def test_malformed_ones_are_refused(self, causal: Path, run: Run, text: str) -> None:
        said = run("resources", causal, "--compare", text)
        assert said.code == 2 and "is not NAME=VALUE,VALUE" in said.err

    def test_where_none_can_be_compiled_the_first_error_is_told(self, causal: Path, run: Run) -> None:
        said = run("resources", causal, "--target", "sm_80", "--compare", "BLOCK_MM=64,32")
        assert said.code == 2 and "error: unknown option 'BLOCK_MM'" in said.err and "did you mean" in said.err

    def test_too_many_are_refused(self):
        with pytest.raises(OptionError, match="144 combinations of a, b are more than 64"):
            settings_of([("a", tuple(range(12))), ("b", tuple(range(12)))])

"""Loops are found in the machine code by its branches, and occupancy by what a multiprocessor holds."""

from __future__ import annotations

import pytest
import torch

import flexgen
from flexgen.lowered import Lowered
from flexgen.lowering.occupancy import Occupancy, occupancy
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.build import compile_entry
from flexgen.runtime.load import module_of
from flexgen.runtime.machine_code import (
    EXPONENTIAL,
    LOAD,
    LOCAL,
    MATRIX,
    Opcodes,
    main_loops,
    natural_loops,
    parse_amdgcn,
    parse_sass,
)
from flexgen.runtime.resources import measure

# A prologue; a loop with a wait whose retry stands behind the end; a loop around another one.
SASS = """\
\t//## File "/somewhere/emitted.py", line 7
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
.L_x_0:
\t//## File "/lib/triton/language/standard.py", line 43
        /*0020*/                   LDG.E.128 R8, [R2.64] ;
        /*0030*/              @!P0 BRA `(.L_x_4) ;
.L_x_1:
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
\t//## File "/somewhere/emitted.py", line 9
        /*0050*/                   MUFU.EX2 R9, R9 ;
        /*0060*/                   STL [R1+0x8], R9 ;
        /*0070*/               @P1 BRA `(.L_x_0) ;
.L_x_2:
        /*0080*/                   IADD3 R3, R3, 0x1, RZ ;
.L_x_3:
        /*0090*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00a0*/                   NOP ;
        /*00b0*/                   BRA.U UP0, `(.L_x_3) ;
        /*00c0*/               @P2 BRA `(.L_x_2) ;
        /*00d0*/                   EXIT ;
.L_x_4:
        /*00e0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R5 ;
        /*00f0*/              @!P0 BRA `(.L_x_4) ;
        /*0100*/                   BRA `(.L_x_1) ;
"""
AMDGCN = """\
forward:
.Lfunc_begin0:
\t.loc\t1 3 0 prologue_end             ; emitted.py:3:0
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\t.loc\t2 43 17                         ; standard.py:43:17 @[ emitted.py:5:36 ]
\tv_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]
\tscratch_store_dword off, v3, off
\ts_nop 1
\tv_exp_f32_e32 v1, v1
\ts_cbranch_scc1 .LBB0_1
; %bb.2:
\ts_endpgm
"""


def test_loops_of_sass_are_those_of_its_branches():
    code = parse_sass(SASS)
    loops = sorted(natural_loops(code), key=min)
    assert [sorted(loop) for loop in loops] == [
        [2, 3, 4, 5, 6, 7, 14, 15, 16],  # with the wait behind the end, which is no loop of its own head
        [8, 9, 10, 11, 12],
        [9, 10, 11],
        [14, 15],
    ]


def test_main_loops_are_the_innermost_with_matrix_instructions_the_leanest_first():
    plain, checked = main_loops(parse_sass(SASS))
    assert (plain.count(*MATRIX), plain.total) == (1, 2)
    assert (checked.count(*MATRIX), checked.count(*EXPONENTIAL), checked.count(*LOAD), checked.count(*LOCAL)) == (
        1,
        1,
        1,
        1,
    )


def test_without_a_matrix_unit_the_main_loops_are_those_of_multiply_adds():
    plain, checked = main_loops(parse_sass(SASS.replace("HMMA.16816.F32 ", "FFMA ")))
    assert (plain.count(*MATRIX), plain.total) == (0, 2)
    assert checked.count("FFMA") == 1


def test_instructions_know_the_emitted_line_before_a_librarys():
    assert [each.line for each in parse_sass(SASS)][:7] == [7, 7, 7, 7, 7, 9, 9]
    assert [each.line for each in parse_amdgcn(AMDGCN)] == [3, 5, 5, 5, 5, 5, 5]


def test_loops_of_amds_assembly():
    (loop,) = main_loops(parse_amdgcn(AMDGCN))
    assert loop.counts == {
        "s_cbranch_scc1": 1,
        "scratch_store_dword": 1,
        "v_exp_f32_e32": 1,
        "v_mfma_f32_32x32x8_bf16": 1,
    }
    assert (loop.count(*MATRIX), loop.count(*LOCAL), loop.count(*EXPONENTIAL)) == (1, 1, 1)


def test_code_without_a_loop_has_none():
    assert main_loops(parse_sass(SASS.replace("BRA", "MOV"))) == ()
    assert main_loops([]) == ()


def test_opcodes_match_whole_words():
    counts = Opcodes({"LDG.E": 2, "LDGSTS.E": 3, "LDG": 1, "v_exp_f32_e32": 4})
    assert counts.count("LDG") == 3 and counts.count("LDG", "LDGSTS") == 6 and counts.count("v_exp*") == 4


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def lowered(target: str, **options: object) -> Lowered:
    attention = flexgen.compile(mask_mod=causal, options=options)
    query = torch.empty(1, 4, 1024, 64, dtype=torch.bfloat16, device="meta")
    return attention.lower(query, query, query, target=target)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_both_loops_of_a_causal_kernel_compute_one_exponential_a_score(target: str):
    low = lowered(target, BACKEND="TRITON")
    plan, found = low.plan, measure(low.binary())
    threads = plan.num_warps * plan.target.warp_size
    scores = plan.BLOCK_M * plan.BLOCK_N // threads
    assert len(found.loops) == 2, "with the mask and without"
    for loop in found.loops:
        assert scores < loop.count(*EXPONENTIAL) <= scores + 2 * plan.BLOCK_M // plan.num_warps
        assert loop.count(*MATRIX) > 0 and loop.count(*LOCAL) == 0
    assert found.loops[0].total < found.loops[1].total
    assert sum(loop.total for loop in found.loops) < found.code.total


def test_each_warpgroup_of_a_specialised_kernel_has_a_loop():
    low = lowered("sm_90")
    found = measure(low.binary())
    consumers = low.plan.BLOCK_M // 64
    assert len(found.loops) == consumers > 1
    assert all(loop.count("HGMMA") and not loop.count(*LOAD) for loop in found.loops)


def test_spills_are_told_with_the_emitted_lines_they_stand_at():
    low = lowered("sm_80", BLOCK_M=16, BLOCK_N=16, num_warps=1, num_stages=1)
    source = low.sources["forward"]
    few = {"maxnreg": 40}
    args = (module_of(source), "forward", source.args, low.plan.target)
    found = measure(compile_entry(*args, num_warps=1, num_stages=1, extra_options=few, divisible=low.divisible))
    assert found.num_warps == 1 and found.registers <= 40
    assert sum(found.spilled_lines.values()) == found.local_memory_instructions > 0
    text = source.text.splitlines()
    assert any("tl." in text[line - 1] for line in found.spilled_lines)
    counts = list(found.spilled_lines.values())
    assert counts == sorted(counts, reverse=True)


def test_occupancy_is_limited_by_what_runs_out_first():
    chip = TARGETS["sm_90"]
    assert occupancy(chip, 128, 4, 1024) == Occupancy(4, 16, 64, "registers")
    assert occupancy(chip, 32, 4, 100 * 1024) == Occupancy(2, 8, 64, "shared memory")
    assert occupancy(chip, 16, 4, 0) == Occupancy(16, 64, 64, "warps")
    assert occupancy(chip, 16, 1, 0) == Occupancy(32, 32, 64, "programs")
    assert occupancy(chip, 255, 8, 0) == Occupancy(1, 8, 64, "registers"), "65536 registers of 8 x 32 x 256"
    assert occupancy(TARGETS["gfx942"], 256, 4, 65536) == Occupancy(1, 4, 32, "shared memory")
    assert occupancy(TARGETS["gfx942"], 256, 4, 1024) == Occupancy(2, 8, 32, "registers")
    assert occupancy(TARGETS["interpret"], 1, 4, 0) is None

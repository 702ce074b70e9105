"""What `flexgen mask` says about a mask, that it is true, and that its text picture shows the kernel's walk."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.attention import Attention
from flexgen.commands.arguments import Shape
from flexgen.commands.mask_subject import MaskSubject, Place, mask_subject
from flexgen.commands.subject import Subject
from flexgen.commands.tile_map import Live, Visit, map_tiles
from flexgen.commands.tile_map_table import listed_blocks, summarise_table
from flexgen.lowered import Lowered
from flexgen.lowering.schedule import Walk
from tests.cli.conftest import Run

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SHAPE = Shape(2, 4, 4, 200, 200, 16, 16)
TILES = {"BLOCK_M": 16, "BLOCK_N": 16}


def documents_per_batch() -> Attention:
    document_id = torch.stack([torch.arange(200) // 30, torch.arange(200) // 70])

    def same_document(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
        return document_id[b, q_idx] == document_id[b, kv_idx]

    return flexgen.compile(None, same_document, TILES)


def lowered(attention: Attention, place: Place = Place()) -> tuple[Lowered, MaskSubject]:  # noqa: B008
    subject = Subject("documents", attention, SHAPE, torch.float32)
    return subject.lower("interpret"), mask_subject(subject, place)


def test_mask_draws_what_is_visited(causal: Path, run: Run) -> None:
    said = run("mask", causal, "--set", "BLOCK_M=64", "BLOCK_N=64", "--target", "sm_90")
    assert said.code == 0
    assert "closed form" in said.out and "[0, q_hi + 1)" in said.out
    assert "16 tiles of 64 queries x 64 keys" in said.out
    assert "10 (62.5%)" in said.out and "6 full, 4 partial, 6 empty" in said.out
    assert "\n  +...\n  #+..\n  ##+.\n  ###+\n" in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_mask_shrinks_a_picture_that_is_too_wide(causal: Path, run: Run) -> None:
    said = run("mask", causal, "--shape", "1,1,1,2048,2048,16,16", "--set", "BLOCK_M=16", "BLOCK_N=16")
    assert said.code == 0 and "one character is 3 x 3 tiles" in said.out
    rows = [line for line in said.out.splitlines() if re.fullmatch(r"  [#+.]{20,}", line)]
    assert len(rows) == 43 and rows[0] == "  +" + "." * 42 and rows[-1] == "  " + "#" * 42 + "+"


def test_mask_shows_visits_of_empty_tiles(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "remainders.py"
    path.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return (kv_idx <= q_idx) & ((q_idx ^ kv_idx) < 16)\n")
    arguments = ("--shape", "1,1,1,96,96,16,16", "--set", "BLOCK_M=16", "BLOCK_N=16", "--target", "sm_90")
    said = run("mask", path, *arguments)
    assert said.code == 0, said.err
    assert sum(line.count("o") for line in said.out.splitlines() if re.fullmatch(r"  [#+.o]{6}", line)) == 15
    assert re.search(r"visited needlessly +15\n", said.out) and "o empty, but visited" in said.out


def test_mask_looks_at_the_chosen_batch_and_head(write: object, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "by_head.py"
    path.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return (kv_idx >= 64 * h) & (q_idx >= kv_idx)\n")
    arguments = (path, "--shape", "1,2,2,128,128,16,16", "--set", "BLOCK_M=64", "BLOCK_N=64", "--target", "sm_90")
    assert "\n  +.\n  #+\n" in run("mask", *arguments).out
    assert "\n  ..\n  .+\n" in run("mask", *arguments, "--head", "1").out
    assert run("mask", *arguments, "--head", "2").code == 2


def test_packed_heads_share_their_tiles(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "packed.py"
    path.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return kv_idx <= q_idx + 32 * h\n")
    said = run("mask", path, "--shape", "1,4,1,8,128,16,16", "--set", "BLOCK_N=32", "--target", "sm_90")
    assert said.code == 0, said.err
    assert "live, by the mask" in said.out


def test_a_file_without_a_mask_is_visited_in_full(mods: Path, run: Run) -> None:
    said = run("mask", f"{mods}:softcap", "--target", "sm_90")
    assert said.code == 0 and "no mask" in said.out and "(100.0%)" in said.out


def test_the_meanings_of_tiles_are_ordered() -> None:
    assert list(Visit) == [0, 1, 2] and list(Live) == [0, 1, 2]


# derived tables


def test_mask_tells_what_a_derived_table_lists_and_takes(mods: Path, run: Run) -> None:
    said = run("mask", f"{mods}:documents", "--set", "BLOCK_M=16", "BLOCK_N=16", "--target", "sm_90")
    assert said.code == 0, said.err
    assert "same_document" not in said.out and "block table of 16 queries x 16 keys, derived on the device" in said.out
    assert "14 of 36 blocks: 0 full, 14 partial" in said.out
    assert re.search(r"memory +\d+ bytes, one for every batch and query head", said.out)
    assert "(table_q_min <= table_kv_max) & (table_kv_min <= table_q_max)" in said.out
    assert "\n  ++....\n  +++...\n  .+++..\n" in said.out


def test_a_mask_without_a_table_says_why(mods: Path, run: Run) -> None:
    said = run("mask", f"{mods}:documents", "--shape", "1,1,1,8,96,16,16", "--target", "sm_90")
    assert said.code == 0, said.err
    assert re.search(r"walk +ranges: ", said.out) and "no table: at most" in said.out


def test_blocks_of_a_derived_table_follow_the_batch() -> None:
    attention = documents_per_batch()
    for b, length in ((0, 30), (1, 70)):
        found, mask = lowered(attention, Place(b, 0))
        assert found.plan.schedule.walk is Walk.DERIVED and found.understood.rule is not None
        blocks = listed_blocks(found.understood.rule, found.plan, mask)
        document = torch.arange(208).clamp(max=199).div(length, rounding_mode="floor").reshape(-1, 16)
        first, last = document.amin(1), document.amax(1)
        assert blocks.listed.equal((first[:, None] <= last[None]) & (first[None] <= last[:, None]))
        assert blocks.full.equal((first == last)[:, None] & (first == last)[None] & (first[:, None] == first[None]))


@needs_triton
def test_the_table_told_is_the_table_that_kernels_derive() -> None:
    attention = documents_per_batch()
    found, mask = lowered(attention)
    assert found.understood.rule is not None
    told = summarise_table(found.understood.rule, found.plan, mask)
    derived = attention.block_table(torch.zeros(2, 4, 200, 16), torch.zeros(2, 4, 200, 16))
    assert (told.listed, told.batch, told.heads) == (derived.capacity, 2, 1)
    assert told.full == int(derived.lists["full_kv_num_blocks"][:, 0].sum())
    assert told.nbytes == derived.nbytes


def test_masks_too_large_to_evaluate_are_counted_alike() -> None:
    for attention in (documents_per_batch(), flexgen.compile(None, lambda b, h, q, k: q >= k + 3, TILES)):
        found, mask = lowered(attention)
        everywhere = map_tiles(mask, found.plan, found.understood.rule)
        checked = map_tiles(mask, found.plan, found.understood.rule, every_pair=0)
        assert checked.proven and not everywhere.proven
        assert checked.pairs.equal(everywhere.pairs) and checked.live.equal(everywhere.live)

"""The pictures of `flexgen mask`: what their description holds, and that both formats can be opened."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import flexgen
from flexgen.commands import tile_map
from flexgen.commands.arguments import Shape
from flexgen.commands.mask_figure import EMPTY, FULL, LIVE, NEEDLESS, PARTIAL, MaskFigure, joined_tiles, mask_figure
from flexgen.commands.mask_subject import Place, mask_subject
from flexgen.commands.subject import Subject
from flexgen.commands.tile_map import map_tiles
from tests.cli.conftest import Run

Mask = Callable[..., torch.Tensor]


def figure_of(mask: Mask | None, length: int = 64, tile: int = 16) -> MaskFigure:
    attention = flexgen.compile(None, mask, {"BLOCK_M": tile, "BLOCK_N": tile})
    shape = Shape(1, 1, 1, length, length, 16, 16)
    subject = Subject("mask", attention, shape, torch.float32)
    lowered = subject.lower("sm_90")
    looked_at = mask_subject(subject, Place())
    tiles = map_tiles(looked_at, lowered.plan, lowered.understood.rule)
    return mask_figure("mask", looked_at, tiles, lowered.understood.facts.kv)


def causal(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def sinks_and_window(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx < 8))


def shifted_bits(b, h, q_idx, kv_idx):  # type: ignore[no-untyped-def]
    return ((q_idx ^ kv_idx) < 16) & (q_idx >= kv_idx)


# The description.


def test_each_pixel_shows_its_tile_and_whether_its_pairs_are_live() -> None:
    figure = figure_of(causal)
    assert (figure.row_span, figure.column_span) == (1, 1)
    colors = {place: tuple(figure.pixels[place].tolist()) for place in ((20, 3), (20, 17), (17, 20), (3, 40))}
    assert colors == {(20, 3): FULL, (20, 17): LIVE, (17, 20): PARTIAL, (3, 40): EMPTY}


def test_tiles_visited_in_vain_stand_out() -> None:
    figure = figure_of(shifted_bits)
    assert tuple(figure.pixels[40, 3].tolist()) == NEEDLESS
    assert "visited in vain: 6 (37.5%)" in [entry.label for entry in figure.legend]


def test_the_legend_counts_every_tile_once() -> None:
    labels = [entry.label for entry in figure_of(causal).legend]
    assert labels == [
        "full, without the mask: 6 (37.5%)",
        "partial, mask applied: 4 (25.0%)",
        "empty, skipped: 6 (37.5%)",
    ]


def test_bounds_are_drawn_for_each_segment_in_the_users_names() -> None:
    lines = figure_of(sinks_and_window).lines
    assert [(line.segment, line.is_start, line.label) for line in lines] == [
        ("1: ", True, "0"),
        ("1: ", False, "min(4, q_idx + 1)"),
        ("2: ", True, "q_idx - 7"),
        ("2: ", False, "q_idx + 1"),
    ]
    assert all(line.exact for line in lines)
    assert lines[2].keys.tolist() == [max(0, q - 7) for q in range(64)]
    assert lines[2].queries.tolist() == list(range(65))


def test_bounds_that_only_hold_the_live_keys_are_marked_and_trivial_ones_left_out() -> None:
    (line,) = figure_of(shifted_bits).lines
    assert not line.exact and not line.is_start and line.label == "q_idx + 1"


def test_queries_without_keys_have_no_bounds() -> None:
    (lo, hi) = figure_of(lambda b, h, q_idx, kv_idx: (q_idx >= 20) & (kv_idx < q_idx)).lines
    for line in (lo, hi):
        assert line.keys.isnan().tolist() == [q < 20 for q in range(64)]


def test_a_last_tile_that_is_short_counts_its_own_pairs() -> None:
    figure = figure_of(lambda b, h, q_idx, kv_idx: kv_idx >= 48, length=56)
    assert {tuple(color) for color in figure.pixels[:, 48:].flatten(0, 1).tolist()} <= {FULL, LIVE}
    assert figure.pixels.shape[:2] == (56, 56)


def test_more_tiles_than_a_picture_holds_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [joined_tiles(count) for count in (1, 512, 513, 8192)] == [1, 1, 2, 16]
    monkeypatch.setattr(tile_map, "EVERY_PAIR", 0)
    figure = figure_of(causal, length=16 * 1030)
    assert figure.row_span == figure.column_span == 48
    assert figure.pixels.shape == (344, 344, 3)
    assert tuple(figure.pixels[300, 5].tolist()) == FULL and tuple(figure.pixels[5, 300].tolist()) == EMPTY
    assert any("3 x 3 tiles" in note for note in figure.notes)


# Files.


def test_both_formats_are_written_from_one_command(causal: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg, named = tmp_path / "new" / "mask.png", tmp_path / "mask.svg", tmp_path / "another.svg"
    arguments = ("--set", "BLOCK_M=64", "BLOCK_N=64", "--target", "sm_90")
    said = run("mask", causal, *arguments, "--png", png, "--svg", svg, "-o", named)
    assert said.code == 0, said.err
    assert all(f"wrote {path}" in said.err for path in (png, svg, named))
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    texts = [text for text in ElementTree.parse(svg).getroot().itertext() if text.strip()]
    for expected in (
        "causal.py: mask_mod",
        "closed form",
        "mask is an interval in kv_idx: [0, q_idx + 1)",
        "kv_idx (tokens)",
        "q_idx (tokens)",
        "hi(q) = q_idx + 1",
        "full, without the mask: 6 (37.5%)",
        "10 of 16 tiles are visited (62.5%)",
    ):
        assert expected in texts
    assert svg.read_bytes() == named.read_bytes(), "equal pictures are equal files"


@pytest.mark.parametrize("source", ["return q_idx >= 0", "return kv_idx < 0", "return (kv_idx & q_idx) == 0"])
def test_masks_at_the_edge_can_be_drawn(run: Run, tmp_path: Path, source: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "$edge$.py"
    path.write_text(f"def mask_mod(b, h, q_idx, kv_idx):\n    {source}\n")
    arguments = ("--shape", "1,1,1,40,300,16,16", "--target", "sm_90", "-o", tmp_path / "edge.png")
    said = run("mask", path, *arguments)
    assert said.code == 0, said.err
    assert (tmp_path / "edge.png").stat().st_size > 1000


def test_a_picture_without_matplotlib_says_how_to_get_it(
    causal: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = run("mask", causal, "--png", tmp_path / "mask.png")
    assert said.code == 2 and "pip install flexgen[plot]" in said.err and said.out == ""
    assert run("mask", causal, "--target", "sm_90").code == 0


def test_a_picture_of_another_format_is_refused(causal: Path, run: Run) -> None:
    said = run("mask", causal, "-o", "mask.pdf")
    assert said.code == 2 and "neither a .png nor an .svg" in said.err


def test_a_picture_that_cannot_be_written_is_an_error_not_a_bug(causal: Path, run: Run) -> None:
    pytest.importorskip("matplotlib")
    said = run("mask", causal, "--target", "sm_90", "--png", causal / "below" / "mask.png")
    assert said.code == 2 and "cannot write" in said.err


def test_a_shape_without_keys_has_no_picture(causal: Path, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ("--shape", "1,1,1,8,0,16,16", "--target", "sm_90")
    assert run("mask", causal, *arguments).code == 0
    said = run("mask", causal, *arguments, "--png", tmp_path / "mask.png")
    assert said.code == 2 and "no tiles to picture" in said.err

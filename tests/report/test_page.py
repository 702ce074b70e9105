"""What a report says is what flexgen knows: tiles, lines, decisions, costs; and the page is sound and alone."""

from __future__ import annotations

import html
import importlib.util
import json
import re
from dataclasses import FrozenInstanceError, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from flexgen.codegen.source import Written
from flexgen.commands import report_page as report_page_module
from flexgen.commands.arguments import Shape
from flexgen.commands.mask_subject import Place, mask_subject
from flexgen.commands.report_mask import STATES, mask_box, mask_picture
from flexgen.commands.report_page import Page, report_page
from flexgen.commands.report_plot import Mark, numbered
from flexgen.commands.report_score import ScoreSubject, score_plots
from flexgen.commands.report_source import coloured, source_views
from flexgen.commands.subject import Subject
from flexgen.commands.tile_map import Live, TileMap, Visit, map_tiles
from tests.cli.conftest import Run, run
from tests.report.conftest import EVIL, MODS, subject_of

__all__ = ["run"]  # a fixture of the command line's tests

VOID = {"meta", "link", "img", "br"}


class _Tags(HTMLParser):
    """Checks that every tag is closed in turn, and keeps attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(path: Path) -> _Tags:
    tags = _Tags()
    tags.feed(path.read_text())
    assert tags.open == []
    return tags


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    file = tmp_path_factory.mktemp("subject") / "mods.py"
    file.write_text(MODS)
    return subject_of(file)


@pytest.fixture(scope="module")
def shown(subject: Subject) -> Page:
    return report_page(subject, subject.lower("interpret", backward=True), Place(), "flexgen report mods.py")


# The page.


def test_pages_are_sound_and_alone(page: Path, compiled_page: Path, hostile_page: Path) -> None:
    for path in (page, compiled_page, hostile_page):
        tags = parsed(path)
        assert len(tags.ids) == len(set(tags.ids))
        loads = [value for name, value in tags.attributes if name in ("src", "href", "srcset", "data", "action")]
        assert [value for value in loads if not value.startswith(("#", "data:,"))] == []
        anchors = [value[1:] for name, value in tags.attributes if name == "href" and value.startswith("#")]
        assert set(anchors) <= set(tags.ids)
        assert "@import" not in path.read_text() and "url(" not in path.read_text()
        assert not any(name.startswith("on") for name, _ in tags.attributes)


def test_a_hostile_file_brings_no_tag_of_its_own(hostile_page: Path) -> None:
    text = hostile_page.read_text()
    assert EVIL not in text and html.escape(EVIL)[:40].replace("&#x27;", "&#39;") in text
    assert text.count("<script") == 2 and "<img" not in text


def test_the_page_is_the_same_each_time_and_holds_no_path(page: Path, run: Run) -> None:
    before = page.read_text()
    again = page.with_name("again.html")
    said = run("report", page.with_suffix(".py"), "-o", again, "--target", "interpret", "--backward")
    assert said.code == 0 and said.out == f"{again}\n"
    assert again.read_text() == before
    assert str(page.parent) not in before


def test_the_values_are_frozen(shown: Page) -> None:
    with pytest.raises(FrozenInstanceError):
        shown.title = "another"  # type: ignore[misc]


# The mask.


def test_every_tile_has_the_state_that_the_map_says(subject: Subject) -> None:
    lowered = subject.lower("interpret")
    tiles = map_tiles(mask_subject(subject, Place()), lowered.plan, lowered.understood.rule)
    picture = mask_picture(tiles, subject.shape.Lq, subject.shape.Lk, 1)
    states = [state for state, length in picture.states for _ in range(length)]
    assert len(states) == picture.rows * picture.columns == tiles.visits.numel()
    pairs = list(zip(tiles.visits.flatten().tolist(), tiles.live.flatten().tolist(), strict=True))
    expected = {
        (Visit.SKIPPED, Live.EMPTY): "empty",
        (Visit.UNMASKED, Live.FULL): "full",
        (Visit.CHECKED, Live.FULL): "checked",
        (Visit.CHECKED, Live.PARTIAL): "partial",
        (Visit.CHECKED, Live.EMPTY): "vain",
    }
    assert [STATES[state][0] for state in states] == [expected[Visit(v), Live(live)] for v, live in pairs]
    partial = tiles.pairs[tiles.live == Live.PARTIAL].tolist()
    assert list(picture.live) == partial
    assert {shape.name: shape.count for shape in picture.shapes} == {
        name: states.count(number) for number, (name, _) in enumerate(STATES) if number in states
    }


def test_the_shapes_cover_each_cell_once() -> None:
    random = torch.Generator().manual_seed(0)
    visits = torch.randint(0, 3, (37, 23), generator=random, dtype=torch.int8)
    sizes = torch.full((37, 23), 4)
    pairs = torch.where(visits == Visit.UNMASKED, 4, torch.where(visits == Visit.CHECKED, 2, 0))
    picture = mask_picture(TileMap(2, 2, visits, pairs, sizes), 74, 46, 1)
    drawn = torch.full((37, 23), -1)
    for shape in picture.shapes:
        for x, y, width, height, back in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-(\d+)z", shape.path):
            assert width == back
            block = drawn[int(y) : int(y) + int(height), int(x) : int(x) + int(width)]
            assert bool((block == -1).all())
            block.fill_([name for name, _ in STATES].index(shape.name))
    states = [state for state, length in picture.states for _ in range(length)]
    assert drawn.flatten().tolist() == states


def test_many_tiles_are_joined_and_waste_among_nothing_is_shown() -> None:
    visits = torch.zeros(600, 600, dtype=torch.int8)
    visits[0, 0] = Visit.CHECKED  # visited in vain
    visits[300, 300] = Visit.UNMASKED
    pairs = torch.zeros(600, 600, dtype=torch.int64)
    pairs[300, 300] = 4
    picture = mask_picture(TileMap(2, 2, visits, pairs, torch.full((600, 600), 4)), 1200, 1200, 1)
    assert (picture.rows, picture.columns, picture.side, picture.q_step) == (200, 200, 3, 6)
    names = {shape.name: shape.path for shape in picture.shapes}
    assert names["vain"] == "M0 0h1v1h-1z" and "M100 100" not in names["vain"]
    states = [state for state, length in picture.states for _ in range(length)]
    assert STATES[states[100 * 200 + 100]][0] == "partial"


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 4096), (4096, 1), (7, 7), (1, 1)])
def test_odd_lengths_have_a_picture_that_can_be_looked_at(q_len: int, kv_len: int) -> None:
    rows, columns = -(-q_len // 64), -(-kv_len // 64)
    ones = torch.ones(rows, columns, dtype=torch.int64)
    picture = mask_picture(TileMap(64, 64, ones.char(), ones, ones * 2), q_len, kv_len, 1)
    box = mask_box(picture)
    assert 60 <= box.inner_height <= box.inner_width
    assert [tick.label for tick in box.x_ticks][-1] == f"{kv_len:,}"


# The score.


def plots(score_mod: str, folder: Path) -> list[str]:
    file = folder / "score.py"
    file.write_text(f"import torch\nSHAPE = (1, 4, 4, 128, 96, 16, 16)\nbias = torch.randn(128, 96)\n\n\n{score_mod}\n")
    subject = subject_of(file)
    graph = subject.lower("interpret").understood.mods.score
    assert graph is not None
    mask = mask_subject(subject, Place())
    found = score_plots(ScoreSubject(graph, subject.shape, 0, 0, mask.buffers, mask.scalars))
    assert all("nan" not in shape.path and "inf" not in shape.path for plot in found for shape in plot.shapes)
    return [plot.title for plot in found]


CURVE, DISTANCE, POSITION = (
    "What becomes of a score",
    "What is added to a score, by distance",
    "What is added to a score, by position",
)


@pytest.mark.parametrize(
    ("body", "titles"),
    [
        ("20 * torch.tanh(score / 20)", [CURVE]),
        ("score * 2", [CURVE]),
        ("score - 0.5 * (h + 1) * (q_idx - kv_idx)", [DISTANCE]),
        ("score + bias[q_idx, kv_idx]", [POSITION]),
        ("score + bias[q_idx, kv_idx] * 1e-4", [POSITION]),
        ("score + (0.1 * kv_idx - 0.1 * q_idx)", [DISTANCE]),
        ("score + 0.1 * q_idx", [POSITION]),
        ("torch.where(q_idx >= kv_idx, score, -float('inf'))", [DISTANCE]),
        ("20 * torch.tanh(score / 20) + bias[q_idx, kv_idx]", [CURVE, POSITION]),
        ("score + 1", [CURVE]),
        ("torch.log(score)", [CURVE]),
    ],
)
def test_a_score_mod_is_shown_by_what_it_depends_on(body: str, titles: list[str], tmp_path: Path) -> None:
    assert plots(f"def score_mod(score, b, h, q_idx, kv_idx):\n    return {body}", tmp_path) == titles


# Sources.


def test_lines_link_to_the_lines_that_the_map_says(subject: Subject) -> None:
    sources = subject.lower("interpret", backward=True).sources
    emitted, users = source_views(sources, {"forward": {3: 2}})
    assert [view.title for view in users] == ["mods.py"]
    for view in emitted:
        source = sources[view.title]
        assert "\n".join("".join(piece.text for piece in line.pieces) for line in view.lines) + "\n" == source.text
        links = {line.number: line.link for line in view.lines if line.link}
        assert links == {o.emitted: f"user0-{o.line}" for o in source.line_map if o.written is Written.USER}
    assert [line.spills for line in emitted[0].lines[:4]] == [0, 0, 2, 0]
    linked = {line.number: line.link for line in users[0].lines if line.link}
    assert set(linked) == {8, 9, 13, 14}
    first = next(o.emitted for o in sources["forward"].line_map if o.written is Written.USER and o.line == 13)
    assert linked[13] == f"forward-{first}"


@pytest.mark.parametrize(
    "text",
    [
        MODS,
        'x = """a\n  b"""  # c\n\n\tif x:\n',
        "def f(:\n  'unfinished\n",
        "\n\n",
        "",
        "a\\\n  + b\n",
        "s = f'{x!r:>{n}} \N{GREEK SMALL LETTER ALPHA}'\n",
    ],
)
def test_colours_leave_the_text_as_it_is(text: str) -> None:
    lines = coloured(text)
    assert "\n".join("".join(piece.text for piece in line) for line in lines) == text.removesuffix("\n")


def test_colours_tell_kinds_apart() -> None:
    (line,) = coloured("def scaled(x): return tl.load(x) * 2.5  # note 'x'")
    kinds = {piece.text: piece.kind for piece in line if piece.kind}
    assert kinds == {
        "def": "keyword",
        "scaled": "name",
        "return": "keyword",
        "tl": "builtin",
        "2.5": "number",
        "# note 'x'": "comment",
    }


# Decisions, facts, costs and work.


def test_every_decision_stands_in_the_page(subject: Subject, shown: Page, page: Path) -> None:
    lowered = subject.lower("interpret", backward=True)
    assert [kernel.kernel for kernel in shown.decisions] == ["forward", "backward_dq", "backward_dkdv"]
    assert [row.name for row in shown.decisions[0].rows] == [decision.name for decision in lowered.plan.decisions]
    rejected = [other for kernel in shown.decisions for row in kernel.rows for other in row.rejected]
    text = html.unescape(page.read_text())
    for row in shown.decisions[0].rows:
        assert f'<th scope="row">{row.name}</th>' in text and row.because in text
    assert all(f"rejected: {other.because}" in text for other in rejected)
    assert shown.no_costs == "The target interpret has no machine code." and shown.roofline is None


def test_costs_and_work_of_a_compiled_kernel_are_told(compiled_page: Path) -> None:
    pytest.importorskip("triton")
    text = html.unescape(compiled_page.read_text())
    assert re.search(r"<dt>registers</dt><dd>[1-9]\d* a thread</dd>", text)
    loop = re.search(r'<th scope="row">matrix</th><td class="right">(\d+)</td><td class="right">(\d+)</td>', text)
    assert loop is not None and 0 < int(loop[2]) < int(loop[1])
    assert "Roofline of H200 SXM" in text and re.search(r"1</b>forward: .* at most, bound by", text)


def test_the_mask_data_of_the_page_is_json(page: Path) -> None:
    found = re.search(r'id="mask-data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert sum(length for _, length in data["states"]) == data["rows"] * data["columns"]


# The command.


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-o", "report.txt"), ("report.txt is no page", "fix: name it like report.html")),
        (("-o", "no_such_folder/r.html"), ("cannot write no_such_folder/r.html",)),
        ((), ("the following arguments are required: -o/--output",)),
        (("-o", "r.html", "--head", "7"), ("--head 7 is outside of the shape", "choose one from 0 to 1")),
    ],
)
def test_wrong_use_is_told(subject: Subject, run: Run, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    said = run("report", subject.name, "--target", "interpret", *arguments)
    assert said.code == 2 and said.out == ""
    for word in words:
        assert word in said.err


def test_a_mask_that_reads_outside_of_its_tensor_is_told(run: Run, tmp_path: Path) -> None:
    file, path = tmp_path / "short.py", tmp_path / "short.html"
    file.write_text(
        "import torch\nlive = torch.ones(8) > 0\n\n\ndef mask_mod(b, h, q_idx, kv_idx):\n    return live[kv_idx]\n"
    )
    said = run("report", file, "-o", path, "--target", "interpret", "--shape", "1,1,1,64,64,16,16")
    assert said.code == 2 and "reads outside of a captured tensor" in said.err and "give --shape" in said.err
    assert not path.exists()


def test_no_queries_make_a_page_without_pictures(subject: Subject, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "empty.html"
    said = run("report", subject.name, "-o", path, "--target", "interpret", "--shape", "1,2,1,0,384,16,16")
    assert said.code == 0
    assert 'id="mask"' not in path.read_text() and 'id="decisions"' in path.read_text()
    parsed(path)


@pytest.mark.parametrize(
    ("head_dim", "walking"),
    [(64, ("backward_dq", "backward_dkdv")), (256, ("backward_dq", "backward_dv", "backward_dk"))],
)
def test_every_kernel_of_a_lowering_is_shown(
    head_dim: int, walking: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Hopper's kernels the backward has up to three passes; decisions, source and work show each of them."""
    monkeypatch.setattr(report_page_module, "_built", lambda lowered: ((), "not compiled in this test"))
    file = tmp_path / "causal.py"
    file.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
    subject = replace(subject_of(file), shape=Shape(1, 2, 2, 2048, 2048, head_dim, head_dim))
    lowered = subject.lower("sm_90", backward=True)
    shown = report_page(subject, lowered, Place(), "flexgen report causal.py")
    kernels = ["forward", *walking]
    assert [view.kernel for view in shown.decisions] == kernels
    assert [view.kernel for view in shown.works] == kernels
    assert [view.title for view in shown.emitted] == [*lowered.sources]
    assert {*kernels, "backward_delta"} == {view.title for view in shown.emitted}
    assert shown.roofline is not None and len(shown.roofline.marks) == len(kernels)


def test_packed_sequences_are_looked_at_one_by_one(run: Run, tmp_path: Path) -> None:
    file, output = tmp_path / "causal.py", tmp_path / "report.html"
    file.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
    given = ("--packed", "100,37,500", "--dropout", "0.1", "--target", "interpret")
    said = run("report", file, "-o", output, "--batch", "2", *given)
    assert said.code == 0
    text = output.read_text()
    assert "in sequence 2, query head 0" in text and "3, of 100, 37, 500 tokens" in text
    assert json.loads(re.search(r'id="mask-data">(.*?)</script>', text)[1])["q_len"] == 500  # type: ignore[index]
    assert "--packed" in text and "<dt>dropout</dt><dd>0.1</dd>" in text
    said = run("report", file, "-o", output, "--batch", "3", *given)
    assert said.code == 2 and "--batch 3 is outside of the shape" in said.err


def test_points_that_lie_together_share_their_numbers() -> None:
    marks = [
        Mark(100, 50, "forward", "a"),
        Mark(300, 50, "dq", "b"),
        Mark(160, 50, "dv", "c"),
        Mark(305, 55, "dk", "d"),
    ]
    found = numbered(marks)
    assert [(mark.numbers, mark.below) for mark in found] == [("1", False), ("2, 4", False), ("3", True), ("", False)]
    assert [mark.label for mark in found] == [mark.label for mark in marks]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_a_kernel_that_spills_says_why_and_what_would_hold_less(run: Run, tmp_path: Path) -> None:
    file, output = tmp_path / "causal.py", tmp_path / "report.html"
    file.write_text("def mask_mod(b, h, q_idx, kv_idx):\n    return q_idx >= kv_idx\n")
    setting = ("--set", "BLOCK_M=32", "BLOCK_N=128", "num_warps=1", "num_stages=1")
    said = run("report", file, "-o", output, "--target", "sm_80", "--shape", "1,1,1,256,256,64,64", *setting)
    assert said.code == 0, said.err
    text = output.read_text()
    assert "Why forward spills" in text and "32 queries x 128 keys, 1 warp, 1 stage<" in text
    assert "192 values of 32 bits" in text and "with fwd_num_warps=2" in text

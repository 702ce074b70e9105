"""The report in a real browser: it fits, says nothing to the console, loads nothing, and answers pointer and keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.browser import Browser
from tests.report.conftest import EVIL

WIDTHS = (1280, 400)


@pytest.fixture(params=["page", "compiled_page"])
def any_page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_window_and_says_nothing(browser: Browser, any_page: Path, width: int) -> None:
    browser.open(any_page, width)
    browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert browser.run("return document.documentElement.scrollWidth") == width
    wide = browser.run("""
        const scrolls = (element) => element.closest('.code, .tabs, .contents, .skip, .hidden') !== null;
        return [...document.querySelectorAll('body *')]
          .filter((element) => !scrolls(element) && element.getBoundingClientRect().right > innerWidth + 0.5)
          .map((element) => element.tagName + '.' + element.getAttribute('class'));""")
    assert wide == []
    assert browser.say() == []


def test_a_page_loads_nothing(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    assert browser.run("return performance.getEntriesByType('resource').map((entry) => entry.name)") == []


def test_the_style_applies_under_the_pages_own_policy_in_light_and_dark(browser: Browser, page: Path) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    browser.open(page, 1280)
    light = browser.run(ground)
    browser.open(page, 1280, dark=True)
    assert (light, browser.run(ground)) == ("rgb(247, 248, 249)", "rgb(16, 20, 24)")


def test_text_can_be_told_from_its_ground(browser: Browser, any_page: Path) -> None:
    """The contrast of every text is at least 4.5 to 1, as WCAG 2 asks for small text."""
    for dark in (False, True):
        browser.open(any_page, 1280, dark=dark)
        weak = browser.run("""
            const numbers = (color) => color.match(/[0-9.]+/g).map(Number);
            const light = (color) => numbers(color).slice(0, 3).map((part) => part / 255)
              .map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
              .reduce((sum, part, index) => sum + part * [0.2126, 0.7152, 0.0722][index], 0);
            const ground = (element) => {
              for (let each = element; each; each = each.parentElement) {
                const color = getComputedStyle(each).backgroundColor;
                if ((numbers(color)[3] ?? 1) > 0) return color;
              }
            };
            return [...document.querySelectorAll('body *')].filter((element) => {
              const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
              if (!own || element.closest('script, style, .skip, title')) return false;
              const style = getComputedStyle(element);
              const ink = element.namespaceURI.endsWith('svg') ? style.fill : style.color;
              const [a, b] = [light(ink), light(ground(element))].sort((x, y) => y - x);
              return (a + 0.05) / (b + 0.05) < 4.5;
            }).map((element) => element.tagName + '.' + element.getAttribute('class') + ': ' + element.textContent);""")
        assert sorted(set(weak))[:5] == []


# The mask. BLOCK_M x BLOCK_N is read off the page; rows 0 and columns 0 start at the top left.


def test_pointing_at_a_tile_tells_what_it_is(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    rows, columns, q_step, kv_step = _grid(browser)
    middle = browser.run(
        "const box = document.querySelector('.tiles').getBoundingClientRect();"
        "return [box.width / arguments[0], box.height / arguments[1]]",
        columns,
        rows,
    )
    browser.point("#mask-picture .tiles", round(-middle[0] * (columns / 2 - 0.5)), round(middle[1] * (rows / 2 - 0.5)))
    said = _text(browser, "#mask-readout").splitlines()
    assert said == [
        f"q_idx {(rows - 1) * q_step} to 511",
        f"kv_idx 0 to {kv_step - 1}",
        "full: computed without the mask",
    ]


def test_arrow_keys_move_over_the_tiles(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    _, columns, q_step, kv_step = _grid(browser)
    browser.press("#mask-picture", "End")
    said = _text(browser, "#mask-readout").splitlines()
    assert said == [f"q_idx 0 to {q_step - 1}", f"kv_idx {(columns - 1) * kv_step} to 383", "empty: never visited"]
    browser.press("#mask-picture", *["Left"] * columns, "Down", "Up")
    assert _text(browser, "#mask-readout").splitlines()[2:] == [
        "partial: computed with the mask",
        f"{_live_of_first_tile(q_step, kv_step):,} of {q_step * kv_step:,} pairs live",
    ]
    assert browser.run("return document.getElementById('mask-cursor').getAttribute('visibility')") == "visible"


def _live_of_first_tile(rows: int, columns: int) -> int:
    return sum(q >= kv or kv < 40 for q in range(rows) for kv in range(columns))


def _grid(browser: Browser) -> list[int]:
    found = browser.run(
        "const data = JSON.parse(document.getElementById('mask-data').textContent);"
        "return [data.rows, data.columns, data.q_step, data.kv_step]"
    )
    return [int(number) for number in found]


def _text(browser: Browser, selector: str) -> str:
    return str(browser.run("return document.querySelector(arguments[0]).textContent", selector))


# Sources.


@pytest.mark.parametrize("width", WIDTHS)
def test_a_line_of_the_user_lights_up_what_came_from_it(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width)
    browser.point("#user0-8 .number", click=True)
    hot = browser.run("return [...document.querySelectorAll('.hot')].map((line) => line.id)")
    assert "user0-8" in hot and any(name.startswith("forward-") for name in hot)
    lines = [_text(browser, f"[id='{name}'] code") for name in hot if name.startswith("forward-")]
    assert lines[0].strip() == "# capped = 20 * torch.tanh(score / 20)" and len(lines) > 1
    seen = browser.run("""
        const box = document.querySelector('#panel-forward').getBoundingClientRect();
        const line = document.querySelector('#panel-forward .hot').getBoundingClientRect();
        return line.top >= box.top && line.bottom <= box.bottom;""")
    assert seen
    assert _text(browser, "#source-readout").startswith("line 8 of the user's file: ")


def test_an_emitted_line_lights_up_the_users_and_keys_do_the_same(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    first = browser.run("return document.querySelector('#panel-forward a.number').closest('.line').id")
    browser.point(f"[id='{first}'] code")
    assert browser.run("return [...document.querySelectorAll('.user .hot')].map((line) => line.id)") == ["user0-8"]
    browser.run("document.activeElement.blur()")
    browser.press("#user0-9 a.number", "Tab")  # the next linked line of the file
    assert browser.run("return [...document.querySelectorAll('.user .hot')].map((line) => line.id)") == ["user0-13"]


def test_tabs_choose_a_kernel_with_pointer_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    shown = (
        "return [...document.querySelectorAll('[role=tabpanel]')].filter((each) => !each.hidden).map((each) => each.id)"
    )
    assert browser.run(shown) == ["panel-forward"]
    browser.point("#tab-backward_dq", click=True)
    assert browser.run(shown) == ["panel-backward_dq"]
    browser.press("#tab-backward_dq", "Right")
    assert browser.run(shown) == ["panel-backward_dkdv"]
    assert browser.run("return document.activeElement.id") == "tab-backward_dkdv"


# Hostile files.


def test_names_and_strings_of_a_file_stay_text(browser: Browser, hostile_page: Path) -> None:
    browser.open(hostile_page, 400)
    assert browser.run("return window.evil ?? null") is None
    assert browser.run("return document.images.length + document.querySelectorAll('i').length") == 0
    assert browser.run("return document.scripts.length") == 2
    assert EVIL in _text(browser, ".user .lines")
    assert _text(browser, "h1") == "a&b<i>'x'.py"
    assert browser.run("return document.documentElement.scrollWidth") == 400
    assert browser.say() == []

"""Draws the pictures of the documentation, into docs/images: python docs/make_pictures.py

The pictures of a report need chromium and chromedriver; without them those stay as they are.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from flexgen.cli import main

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the tests know how to drive a browser

from tests.report.browser import browser, missing  # noqa: E402

COLORS = 96  # of a small file; the pictures have few colours besides the shades of their text

LAST_BATCH = 1  # whose prefix is the longer one
TILES = ("--set", "BLOCK_M=64", "BLOCK_N=64")  # the same in all pictures

# The picture, the file of the mask, and a length at which its structure shows.
PICTURES = (
    ("mask_sliding_window", "sliding_window.py", 1024),
    ("mask_documents", "document_mask.py", None),
    ("mask_causal", "causal.py", 1024),
    ("mask_prefix", "prefix_lm.py", 512),
    ("mask_row_reduced", "row_reduced.py", 512),
    ("mask_neighbourhood", "neighbourhood_2d.py", None),
)

# Masks that no example holds, by the name of the file they are written to.
SOURCES = {
    "row_reduced.py": """\
import torch

lengths = torch.tensor([100, 220, 62, 130])
document = torch.repeat_interleave(torch.arange(4), lengths)
offsets = lengths.cumsum(0) - lengths


def mask_mod(b, h, q_idx, kv_idx):
    start = offsets[document[q_idx]]
    return (kv_idx >= start) & (kv_idx <= q_idx)
""",
}


def draw(name: str, file: str, length: int | None) -> Path:
    path = ROOT / "docs" / "images" / f"{name}.png"
    shape = ["--shape", f"2,4,4,{length},{length},64,64"] if length else []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, file) if file in SOURCES else ROOT / "examples" / file
        if file in SOURCES:
            source.write_text(SOURCES[file])
        place = ["--batch", str(LAST_BATCH)] if name == "mask_prefix" else []
        code = main(["mask", str(source), "--target", "sm_90", *TILES, *shape, *place, "--png", str(path)])
    if code:
        sys.exit(code)
    shrink(path)
    return path


# The picture, a script that shows what is meant, the window's width and height, and whether it is dark.
VIEWS = (
    ("report", "", 1280, 920, False),
    (
        "report_source",
        "document.getElementById('source').scrollIntoView();"
        "document.querySelector('.user .linked .number').click();"
        "document.activeElement.blur();",
        1280,
        560,
        True,
    ),
)


def draw_report() -> list[Path]:
    """Draw views of a report as a browser shows them."""
    if reason := missing():
        print(f"{reason}: the pictures of a report stay as they are", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder, browser() as shown:
        page = Path(folder) / "report.html"
        shape = ["--shape", "1,8,8,1024,1024,64,64"]
        code = main(["report", str(ROOT / "examples" / "alibi.py"), "--target", "sm_90", *shape, "-o", str(page)])
        if code:
            sys.exit(code)
        paths = []
        for name, script, width, height, dark in VIEWS:
            shown.open(page, width, height, dark=dark)
            shown.run(script)
            path = ROOT / "docs" / "images" / f"{name}.png"
            with Image.open(io.BytesIO(shown.picture())) as picture:
                picture.resize((width * 3 // 4, height * 3 // 4), Image.Resampling.LANCZOS).save(path)
            shrink(path, colors=256)
            paths.append(path)
    return paths


def shrink(path: Path, colors: int = COLORS) -> None:
    """Write the file again with a palette, at about a third of its size."""
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(colors, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


if __name__ == "__main__":
    for mask in PICTURES:
        print(draw(*mask))
    for drawn in draw_report():
        print(drawn)

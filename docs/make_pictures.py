"""Draws the pictures of the documentation, into docs/images: python docs/make_pictures.py"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image

from flexgen.cli import main

ROOT = Path(__file__).parents[1]
COLORS = 96  # of a small file; the pictures have few colours besides the shades of their text

# The picture, the file of the mask, and a length at which its structure shows.
PICTURES = (
    ("mask_sliding_window", "sliding_window.py", 1024),
    ("mask_documents", "document_mask.py", None),
)


def draw(name: str, file: str, length: int | None) -> Path:
    path = ROOT / "docs" / "images" / f"{name}.png"
    shape = ["--shape", f"1,4,4,{length},{length},64,64"] if length else []
    code = main(["mask", str(ROOT / "examples" / file), "--target", "sm_90", *shape, "--png", str(path)])
    if code:
        sys.exit(code)
    shrink(path)
    return path


def shrink(path: Path) -> None:
    """Write the file again with a palette, at about a third of its size."""
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


if __name__ == "__main__":
    for picture in PICTURES:
        print(draw(*picture))

"""Trains a two-layer GPT in bfloat16 with flexgen and with torch.compile(flex_attention), from one seed and one data.

    python -m benchmarks.train_gpt --out benchmarks/results

Prints both curves of losses and their largest difference; fails if that is larger than --most. Writes train_gpt.md and
.json. Parameters are float32, matrix products and attention bfloat16 by torch.autocast.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.about import environment, require_gpu
from benchmarks.gpt import Size, train, with_flexgen, with_torch_flex

SIZE = Size(vocabulary=256, width=512, heads=8, layers=2, length=1024)
MAKERS = {"flexgen": with_flexgen, "flex": with_torch_flex}


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the largest difference of two curves of the same length; infinite if a loss is no number."""
    differences = [abs(one - other) for one, other in zip(first, second, strict=True)]
    return max(difference if difference == difference else float("inf") for difference in differences)


def report(curves: Mapping[str, Sequence[float]], about: Mapping[str, str]) -> str:
    names = list(curves)
    lines = ["# Training beside torch.compile(flex_attention)", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()]
    lines += [
        "",
        f"A GPT of {SIZE.layers} layers, width {SIZE.width}, {SIZE.heads} heads and {SIZE.length} tokens, in bfloat16;",
        "with a learned bias per head and distance.",
        f"Largest difference of the losses: {largest_difference(*curves.values()):.5f}.",
        "",
        "| step | " + " | ".join(names) + " | difference |",
        "| --- " * (len(names) + 2) + "|",
    ]
    for step, losses in enumerate(zip(*curves.values(), strict=True)):
        shown = " | ".join(f"{loss:.5f}" for loss in losses)
        lines.append(f"| {step} | {shown} | {losses[0] - losses[1]:+.5f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--most", type=float, default=0.25, help="the largest difference that is no failure")
    parser.add_argument("--out", type=Path, help="folder to write the results to")
    arguments = parser.parse_args()
    require_gpu("train_gpt")
    options = {"batch": arguments.batch, "rate": 1e-3, "device": "cuda", "autocast": torch.bfloat16}
    curves = {name: train(SIZE, make, arguments.steps, **options) for name, make in MAKERS.items()}
    about = environment("train_gpt")
    text = report(curves, about)
    print(text)
    difference = largest_difference(*curves.values())
    if arguments.out:
        (arguments.out / "train_gpt.md").write_text(text, encoding="utf-8")
        data = {"environment": about, "losses": curves, "largest_difference": difference}
        (arguments.out / "train_gpt.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    if not difference <= arguments.most:
        sys.exit(f"the losses differ by {difference}, more than {arguments.most}")


if __name__ == "__main__":
    main()

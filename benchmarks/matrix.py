"""Shapes beside the main tables: grouped heads, fewer queries than keys, float16, short and long sequences.

    python -m benchmarks.matrix --out benchmarks/results/matrix_h200.json
    python -m benchmarks.matrix --plot benchmarks/results/matrix_h200.json

Forward and backward of flexgen, torch.compile(flex_attention), cuDNN and FlashAttention 2 (both through
scaled_dot_product_attention, where it computes the same) in one process, in interleaved rounds. Output and gradients of
the first key head and the queries that share it are checked against float32 first. TFLOP/s count live (query, key)
pairs only: 4 * B * Hq * D operations each forward, 10 backward. Writes JSON and a table beside it; --plot draws one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment, require_gpu
from benchmarks.cases import Mod, causal, softcap, window
from benchmarks.timing import Contender, interleaved

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
SDPA = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}
MOST_ERROR = 0.02  # relative, by Frobenius norms
ROWS_AT_A_TIME = 4096
Gradients = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: query [batch, q_heads, q_len, head_dim], key and value [batch, kv_heads, kv_len, head_dim]."""

    name: str
    score_mod: Mod | None
    mask_mod: Mod | None
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: str = "bf16"

    @property
    def shape(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len} x {self.kv_len}"
        return f"B={self.batch} H={heads} S={lengths} D={self.head_dim} {self.dtype}"

    def tensors(self) -> list[torch.Tensor]:
        def draw(heads: int, length: int) -> torch.Tensor:
            shape = (self.batch, heads, length, self.head_dim)
            return torch.randn(shape, device="cuda", dtype=DTYPES[self.dtype]).requires_grad_()

        return [draw(self.q_heads, self.q_len), draw(self.kv_heads, self.kv_len), draw(self.kv_heads, self.kv_len)]


def causal_at_the_end(offset: int) -> Mod:
    """Return the causal mask of queries that are the last of the sequence."""

    def causal_from_offset(b, h, q_idx, kv_idx):
        return q_idx + offset >= kv_idx

    return causal_from_offset


def problems() -> list[Problem]:
    capped = softcap(30.0)
    return [
        Problem("causal", None, causal, 4, 16, 16, 2048, 2048, 128),
        Problem("window 256", None, window(256), 4, 16, 16, 2048, 2048, 128),
        Problem("causal", None, causal, 1, 16, 16, 32768, 32768, 128),
        Problem("window 1024", None, window(1024), 1, 16, 16, 32768, 32768, 128),
        Problem("causal", None, causal, 1, 32, 8, 8192, 8192, 64),
        Problem("causal", None, causal, 1, 32, 8, 8192, 8192, 128),
        Problem("softcap 30", capped, causal, 1, 32, 8, 8192, 8192, 128),
        Problem("window 1024", None, window(1024), 1, 32, 8, 8192, 8192, 128),
        Problem("causal", None, causal, 1, 32, 8, 8192, 8192, 256),
        Problem("causal at the end", None, causal_at_the_end(6144), 1, 16, 16, 2048, 8192, 128),
        Problem("causal", None, causal, 1, 16, 16, 8192, 8192, 128, "fp16"),
        Problem("softcap 30", capped, causal, 1, 16, 16, 8192, 8192, 128, "fp16"),
    ]


def live_pairs(problem: Problem, device: str = "cuda") -> int:
    """Return how many pairs of one head the mask keeps, by evaluating it."""
    if problem.mask_mod is None:
        return problem.q_len * problem.kv_len
    kv_idx, zero, count = torch.arange(problem.kv_len, device=device), torch.tensor(0, device=device), 0
    for start in range(0, problem.q_len, ROWS_AT_A_TIME):
        q_idx = torch.arange(start, min(start + ROWS_AT_A_TIME, problem.q_len), device=device)
        count += int(problem.mask_mod(zero, zero, q_idx[:, None], kv_idx[None, :]).sum())
    return count


def forwards(problem: Problem, tensors: Sequence[torch.Tensor]) -> dict[str, Contender]:
    query, key, value = tensors
    is_grouped = problem.q_heads != problem.kv_heads
    attention = flexgen.compile(problem.score_mod, problem.mask_mod)
    mask = problem.mask_mod and create_block_mask(problem.mask_mod, None, None, problem.q_len, problem.kv_len, "cuda")
    compiled = torch.compile(torch_flex, dynamic=False)
    found: dict[str, Contender] = {
        "flexgen": lambda: attention(query, key, value),
        "flex": lambda: compiled(
            query, key, value, score_mod=problem.score_mod, block_mask=mask, enable_gqa=is_grouped
        ),
    }
    if problem.score_mod is None and problem.mask_mod is causal:
        for name, backend in SDPA.items():
            found[name] = _sdpa(tensors, backend, is_grouped=is_grouped)
    return found


def _sdpa(tensors: Sequence[torch.Tensor], backend: SDPBackend, *, is_grouped: bool) -> Contender:
    def call() -> torch.Tensor:
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=is_grouped)

    return call


def backward_of(forward: Contender, tensors: Sequence[torch.Tensor], grad: torch.Tensor) -> Contender:
    output = forward()
    return lambda: torch.autograd.grad(output, tensors, grad, retain_graph=True)


def reference(problem: Problem, tensors: Sequence[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """Return output and gradients in float32, of the first batch entry's first key head and its queries."""
    query, key, value = (part.detach().float().requires_grad_() for part in _part(problem, *tensors))
    score = query @ key.mT / problem.head_dim**0.5
    lengths = zip((problem.q_len, problem.kv_len), ((1, 1, -1, 1), (1, 1, 1, -1)), strict=True)
    q_idx, kv_idx = (torch.arange(length, device=query.device).view(shape) for length, shape in lengths)
    h = torch.arange(query.shape[1], device=query.device).view(1, -1, 1, 1)
    if problem.score_mod:
        score = problem.score_mod(score, 0 * h, h, q_idx, kv_idx)
    if problem.mask_mod:
        score = score.masked_fill(~problem.mask_mod(0 * h, h, q_idx, kv_idx), float("-inf"))
    output = torch.softmax(score, -1) @ value
    (grad,) = _part(problem, grad)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), grad.float())]


def _part(problem: Problem, *tensors: torch.Tensor) -> list[torch.Tensor]:
    shared = problem.q_heads // problem.kv_heads
    return [tensor[:1, : shared if tensor.shape[1] == problem.q_heads else 1] for tensor in tensors]


def worst_error(problem: Problem, found: Gradients, wanted: Gradients) -> float:
    """Return the greatest relative difference, by Frobenius norms."""
    pairs = zip(_part(problem, *found), wanted, strict=True)
    return max(float((one.detach().float() - other).norm() / other.norm()) for one, other in pairs)


def measure(problem: Problem, rounds: int) -> list[dict[str, Any]]:
    """Return the rows of one problem: forward, then backward."""
    torch.compiler.reset()
    tensors = problem.tensors()
    grad = torch.randn_like(tensors[0])
    wanted = reference(problem, tensors, grad)
    calls = forwards(problem, tensors)
    gradients = {name: backward_of(call, tensors, grad) for name, call in calls.items()}
    errors = {
        name: worst_error(problem, [call(), *gradients[name]()], wanted)  # type: ignore[misc]
        for name, call in calls.items()
    }
    with torch.no_grad():
        times = {"forward": interleaved(calls, rounds)}
    times["backward"] = interleaved(gradients, rounds)
    pairs = problem.batch * problem.q_heads * problem.head_dim * live_pairs(problem)
    operations = {"forward": 4 * pairs, "backward": 10 * pairs}
    return [
        {
            "case": problem.name,
            "shape": problem.shape,
            "pass": name,
            "ms": ms,
            "tflops": {contender: operations[name] / one / 1e9 for contender, one in ms.items()},
            "errors": errors,
            "wrong": sorted(contender for contender, error in errors.items() if not error < MOST_ERROR),
        }
        for name, ms in times.items()
    ]


def line(row: Mapping[str, Any]) -> str:
    names = ("flexgen", "flex", "cudnn", "fa2")
    cells = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names]
    ratio = row["tflops"]["flexgen"] / row["tflops"]["flex"]
    wrong = f" wrong: {', '.join(row['wrong'])}" if row["wrong"] else ""
    return f"| {row['case']} | {row['shape']} | {row['pass']} | " + " | ".join(cells) + f" | {ratio:.2f}{wrong} |"


def report(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> str:
    lines = ["# Other shapes", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += ["TFLOP/s of live pairs, medians of interleaved rounds; fa2 is FlashAttention 2 as torch has it.", ""]
    lines += ["| case | shape | pass | flexgen | flex | cudnn | fa2 | flexgen / flex |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | ---: |", *map(line, rows), ""]
    for name in ("forward", "backward"):
        ratios = [row["tflops"]["flexgen"] / row["tflops"]["flex"] for row in rows if row["pass"] == name]
        mean = statistics.geometric_mean(ratios)
        lines.append(f"{name}: {mean:.2f} times flex as a geometric mean, at least {min(ratios):.2f}.")
    return "\n".join(lines) + "\n"


def plot(results: Path) -> Path:
    """Draw the speeds of a result file as bars, one picture for both passes; return the picture's path."""
    from matplotlib import pyplot  # in flexgen's extra "plot"

    data = json.loads(results.read_text())
    figure, axes = pyplot.subplots(1, 2, figsize=(14, 6), sharey=True)
    names = [name for name in ("flexgen", "flex", "cudnn", "fa2") if any(name in row["tflops"] for row in data["rows"])]
    height = 0.8 / len(names)
    for side, kind in zip(axes, ("forward", "backward"), strict=True):
        rows = [row for row in data["rows"] if row["pass"] == kind]
        for number, name in enumerate(names):
            places = [at + number * height for at in range(len(rows))]
            side.barh(places, [row["tflops"].get(name, 0.0) for row in rows], height, label=name)
        side.set_yticks([at + 0.4 - height / 2 for at in range(len(rows))])
        side.set_yticklabels([f"{row['case']}, {row['shape']}" for row in rows], fontsize=8)
        side.set_title(kind)
        side.set_xlabel("TFLOP/s of live pairs")
    axes[0].invert_yaxis()  # the other shares it
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper left", ncols=len(names))
    about = data["environment"]
    figure.suptitle(f"{about['device']}, torch {about['torch']}, triton {about['triton']}, {about['date']}", fontsize=9)
    figure.tight_layout()
    path = results.with_suffix(".svg")
    figure.savefig(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON; a page with the suffix .md is written beside it")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw such a file as an SVG beside it, and stop")
    arguments = parser.parse_args()
    if arguments.plot:
        print(plot(arguments.plot))
        return
    require_gpu("matrix")
    rows: list[dict[str, Any]] = []
    about = environment("matrix")
    for problem in problems():
        for row in measure(problem, arguments.rounds):
            rows.append(row)
            print(line(row), flush=True)
        if arguments.out:  # after each, so that a run that is cut short leaves what it has
            text = json.dumps({"environment": about, "rows": rows}, indent=1)
            arguments.out.write_text(text + "\n", encoding="utf-8")
            arguments.out.with_suffix(".md").write_text(report(rows, about), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Memory of a forward and backward of flexgen beside torch.compile(flex_attention), in one process.

    python -m benchmarks.memory --out benchmarks/results

Of each case, in MiB above query, key, value and the output's gradient: "first", the peak of making what the calls need
(a block mask, a table of blocks) and of the first forward and backward; "step", the peak of a later one; "kept", what
stays allocated between steps. Writes memory.md and .json.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment, require_gpu
from benchmarks.cases import Case, cases
from benchmarks.forward import Problem, inputs

Forward = Callable[[], torch.Tensor]
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes above the inputs; see the module."""

    first: int
    step: int
    kept: int


@dataclass(frozen=True, slots=True)
class Row:
    case: str
    length: int
    head_dim: int
    flexgen: Memory
    flex: Memory


def with_flexgen(case: Case, tensors: Sequence[torch.Tensor]) -> Forward:
    attention = flexgen.compile(case.score_mod, case.mask_mod)
    return lambda: attention(*tensors)


def with_torch_flex(case: Case, tensors: Sequence[torch.Tensor]) -> Forward:
    length = tensors[0].shape[2]
    mask = create_block_mask(case.mask_mod, None, None, length, length, "cuda") if case.mask_mod else None
    compiled = torch.compile(torch_flex, dynamic=False)
    return lambda: compiled(*tensors, score_mod=case.score_mod, block_mask=mask)


def measure(
    make: Callable[[Case, Sequence[torch.Tensor]], Forward],
    case: Case,
    tensors: Sequence[torch.Tensor],
    grad_output: torch.Tensor,
) -> Memory:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    forward = make(case, tensors)

    def step() -> None:
        torch.autograd.grad(forward(), tensors, grad_output)

    step()
    first = _peak()
    step()  # what the first one left to do, such as another layout of a gradient
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return Memory(first - before, _peak() - before, kept - before)


def _peak() -> int:
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def run(problem: Problem, names: Sequence[str]) -> list[Row]:
    tensors = [tensor.requires_grad_() for tensor in inputs(problem, torch.bfloat16)]
    grad_output, rows = torch.randn_like(tensors[0]), []
    for case in cases(problem.length, problem.heads, "cuda"):
        if names and case.name not in names:
            continue
        torch.compiler.reset()
        found = [measure(make, case, tensors, grad_output) for make in (with_flexgen, with_torch_flex)]
        rows.append(Row(case.name, problem.length, problem.head_dim, *found))
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: Row) -> str:
    both = (row.flexgen, row.flex)
    cells = [f"{getattr(one, column) / MIB:.1f}" for column in ("first", "step", "kept") for one in both]
    return f"| {row.length} | {row.head_dim} | {row.case} | " + " | ".join(cells) + " |"


def report(rows: Sequence[Row], about: Mapping[str, str]) -> str:
    columns = [f"{column} {name}" for column in ("first", "step", "kept") for name in ("flexgen", "flex")]
    lines = ["# Memory", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "MiB above query, key, value and the output's gradient, bf16, batch 1, heads x head dim = 1024. first: the",
        "peak of making masks and tables and of the first forward and backward; step: the peak of a later one; kept:",
        "what stays allocated between steps.",
        "",
        "| S | D | case | " + " | ".join(columns) + " |",
        "| --- | --- | --- | " + " | ".join("---:" for _ in columns) + " |",
    ]
    return "\n".join([*lines, *map(_line, rows)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--out", type=Path, help="folder to write the results to")
    arguments = parser.parse_args()
    require_gpu("memory")
    rows: list[Row] = []
    for length in arguments.length:
        rows += run(Problem(1, 1024 // arguments.head_dim, length, arguments.head_dim), arguments.case)
    about = environment("memory")
    text = report(rows, about)
    print(text)
    if arguments.out:
        (arguments.out / "memory.md").write_text(text, encoding="utf-8")
        data = {"environment": about, "rows": [asdict(row) for row in rows]}
        (arguments.out / "memory.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

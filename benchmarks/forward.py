"""Forward speed of flexgen beside torch.compile(flex_attention) and cuDNN, in one process, in interleaved rounds.

    python -m benchmarks.forward --out results.json

Every output is checked against float32 on two heads first. TFLOP/s count live (query, key) pairs only: 4 * B * H * D
operations each.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment
from benchmarks.cases import Case, cases
from benchmarks.timing import Contender, interleaved


@dataclass(frozen=True, slots=True)
class Problem:
    batch: int
    heads: int
    length: int
    head_dim: int


def inputs(problem: Problem, dtype: torch.dtype) -> list[torch.Tensor]:
    shape = (problem.batch, problem.heads, problem.length, problem.head_dim)
    return [torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3)]


def contenders(
    case: Case, tensors: list[torch.Tensor], variants: dict[str, dict], *, peers: bool
) -> dict[str, Contender]:
    query, key, value = tensors
    length = query.shape[2]
    found: dict[str, Contender] = {}
    for name, options in variants.items():
        attention = flexgen.compile(case.score_mod, case.mask_mod, options)
        found[name] = lambda attention=attention: attention(query, key, value)
    if not peers:
        return found
    mask = create_block_mask(case.mask_mod, None, None, length, length, "cuda") if case.mask_mod else None
    compiled = torch.compile(torch_flex, dynamic=False)
    found["flex"] = lambda: compiled(query, key, value, score_mod=case.score_mod, block_mask=mask)
    if case.is_causal is not None:
        found["cudnn"] = lambda: _cudnn(query, key, value, case.is_causal)
    return found


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def check(call: Contender, case: Case, tensors: list[torch.Tensor]) -> float:
    """Return the relative Frobenius error of the first two heads against float32."""
    query, key, value = (tensor[:1, :2].float() for tensor in tensors)
    length = query.shape[2]
    score = query @ key.mT / query.shape[3] ** 0.5
    q_idx, kv_idx = (torch.arange(length, device="cuda").view(s) for s in ((1, 1, -1, 1), (1, 1, 1, -1)))
    h = torch.arange(2, device="cuda").view(1, 2, 1, 1)
    if case.score_mod:
        score = case.score_mod(score, 0 * h, h, q_idx, kv_idx)
    if case.mask_mod:
        score = score.masked_fill(~case.mask_mod(0 * h, h, q_idx, kv_idx), float("-inf"))
    expected = torch.softmax(score, -1) @ value
    return ((call()[:1, :2].float() - expected).norm() / expected.norm()).item()


def run(problem: Problem, names: list[str], rounds: int, variants: dict[str, dict], *, peers: bool) -> list[dict]:
    rows = []
    tensors = inputs(problem, torch.bfloat16)
    for case in cases(problem.length, problem.heads, "cuda"):
        if names and case.name not in names:
            continue
        torch.compiler.reset()
        calls = contenders(case, tensors, variants, peers=peers)
        errors = {name: check(call, case, tensors) for name, call in calls.items()}
        wrong = {name: error for name, error in errors.items() if not error < 0.01}
        milliseconds = interleaved(calls, rounds)
        flops = 4 * problem.batch * problem.heads * problem.head_dim * case.live_pairs
        speeds = {name: flops / ms / 1e9 for name, ms in milliseconds.items()}
        rows.append(
            {"head_dim": problem.head_dim, "length": problem.length, "case": case.name, "ms": milliseconds}
            | {"tflops": speeds, "errors": errors, "wrong": sorted(wrong)}
        )
        print(table([rows[-1]], header=len(rows) == 1), flush=True)
    return rows


def table(rows: list[dict], header: bool = True) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row["tflops"]))
    lines = []
    if header:
        lines.append("| D | case | " + " | ".join(names) + " | flexgen / flex |")
        lines.append("| --- " * (len(names) + 3) + "|")
    for row in rows:
        cells = [f"{row['tflops'][name]:.0f}" if name in row["tflops"] else "" for name in names]
        best = row["tflops"]["flexgen"] / row["tflops"].get("flex", float("nan"))
        wrong = f" WRONG {row['wrong']}" if row["wrong"] else ""
        lines.append(f"| {row['head_dim']} | {row['case']} | " + " | ".join(cells) + f" | {best:.2f}{wrong} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default="{}", help="JSON: name -> options, timed beside the defaults")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="time flexgen's variants alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    variants = {"flexgen": {}, **json.loads(args.variants)}
    rows = []
    for head_dim in args.head_dim:
        rows += run(
            Problem(2, 2048 // head_dim, args.length, head_dim), args.case, args.rounds, variants, peers=args.peers
        )
        if args.out:  # after each head dim, so that a stop loses little
            results = {"environment": environment("forward"), "rows": rows}
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

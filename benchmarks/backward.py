"""Backward speed of flexgen beside torch.compile(flex_attention) and cuDNN, in one process, in interleaved rounds.

    python -m benchmarks.backward --out results.json

Gradients are checked against float32 on two heads first. TFLOP/s count live (query, key) pairs only: 10 * B * H * D
operations each, over the whole backward.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment
from benchmarks.cases import Case, cases
from benchmarks.forward import Problem, inputs, table
from benchmarks.timing import Contender, interleaved

Gradients = tuple[torch.Tensor, ...]


def differentiated(forward: Contender, tensors: list[torch.Tensor], grad_output: torch.Tensor) -> Contender:
    """Return a call that computes the gradients of one recorded forward."""
    output = forward()
    return lambda: torch.autograd.grad(output, tensors, grad_output, retain_graph=True)


def contenders(
    case: Case, tensors: list[torch.Tensor], grad_output: torch.Tensor, variants: dict[str, dict], *, peers: bool
) -> dict[str, Contender]:
    query, key, value = tensors
    length = query.shape[2]
    forwards: dict[str, Contender] = {}
    for name, options in variants.items():
        attention = flexgen.compile(case.score_mod, case.mask_mod, options)
        forwards[name] = lambda attention=attention: attention(query, key, value)
    if peers:
        mask = create_block_mask(case.mask_mod, None, None, length, length, "cuda") if case.mask_mod else None
        compiled = torch.compile(torch_flex, dynamic=False)
        forwards["flex"] = lambda: compiled(query, key, value, score_mod=case.score_mod, block_mask=mask)
        if case.is_causal is not None:
            forwards["cudnn"] = lambda: _cudnn(query, key, value, case.is_causal)
    return {name: differentiated(forward, tensors, grad_output) for name, forward in forwards.items()}


def _cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def expected(case: Case, tensors: list[torch.Tensor], grad_output: torch.Tensor) -> Gradients:
    """Return the float32 gradients of the first two heads."""
    query, key, value = (tensor[:1, :2].detach().float().requires_grad_() for tensor in tensors)
    length = query.shape[2]
    score = query @ key.mT / query.shape[3] ** 0.5
    q_idx, kv_idx = (torch.arange(length, device="cuda").view(s) for s in ((1, 1, -1, 1), (1, 1, 1, -1)))
    h = torch.arange(2, device="cuda").view(1, 2, 1, 1)
    if case.score_mod:
        score = case.score_mod(score, 0 * h, h, q_idx, kv_idx)
    if case.mask_mod:
        score = score.masked_fill(~case.mask_mod(0 * h, h, q_idx, kv_idx), float("-inf"))
    output = torch.softmax(score, -1) @ value
    return torch.autograd.grad(output, (query, key, value), grad_output[:1, :2].float())


def worst_error(found: Gradients, wanted: Gradients) -> float:
    pairs = ((f[:1, :2].float(), w) for f, w in zip(found, wanted, strict=True))
    return max(((f - w).norm() / w.norm()).item() for f, w in pairs)


def run(problem: Problem, names: list[str], rounds: int, variants: dict[str, dict], *, peers: bool) -> list[dict]:
    rows = []
    tensors = [tensor.requires_grad_() for tensor in inputs(problem, torch.bfloat16)]
    grad_output = torch.randn_like(tensors[0])
    for case in cases(problem.length, problem.heads, "cuda"):
        if names and case.name not in names:
            continue
        torch.compiler.reset()
        wanted = expected(case, tensors, grad_output)
        calls = contenders(case, tensors, grad_output, variants, peers=peers)
        errors = {name: worst_error(call(), wanted) for name, call in calls.items()}
        milliseconds = interleaved(calls, rounds)
        flops = 10 * problem.batch * problem.heads * problem.head_dim * case.live_pairs
        rows.append(
            {"head_dim": problem.head_dim, "length": problem.length, "case": case.name, "ms": milliseconds}
            | {"tflops": {name: flops / ms / 1e9 for name, ms in milliseconds.items()}, "errors": errors}
            | {"wrong": sorted(name for name, error in errors.items() if not error < 0.02)}
        )
        print(table([rows[-1]], header=len(rows) == 1), flush=True)
    return rows


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
        problem = Problem(2, 2048 // head_dim, args.length, head_dim)
        rows += run(problem, args.case, args.rounds, variants, peers=args.peers)
        if args.out:  # after each head dim, so that a stop loses little
            results = {"environment": environment("backward"), "rows": rows}
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()

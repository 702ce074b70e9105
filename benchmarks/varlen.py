"""Packed documents of random lengths: cu_seqlens beside document masks and torch's varlen_attn, on a GPU.

    python -m benchmarks.varlen --out benchmarks/results

One row of tokens holds all documents; each query sees the earlier keys of its own. In one process, in interleaved
rounds, forward and backward apart:

    packed          flexgen with cu_seqlens and a causal mask
    documents       flexgen with a document mask, whose table of blocks is kept from call to call
    new documents   the same, where the documents change at each call, so that the table is derived again
    flex            torch.compile(flex_attention) with a BlockMask of the documents, made once
    varlen          torch.nn.attention.varlen.varlen_attn, where torch has it

Results are checked against float32 on two heads first. TFLOP/s count live (query, key) pairs only: 4 * H * D operations
each forward, 10 * H * D backward.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment
from benchmarks.backward import differentiated
from benchmarks.cases import causal, documents
from benchmarks.timing import Contender, interleaved

HIDDEN = 2048  # heads times head dim
LIMITS = {"forward": 0.01, "backward": 0.02}  # relative Frobenius errors that bfloat16 explains
OPERATIONS = {"forward": 4, "backward": 10}


@dataclass(frozen=True, slots=True)
class Row:
    """One problem and direction: times in milliseconds and relative errors, by contender."""

    direction: str
    head_dim: int
    tokens: int
    documents: int
    live_pairs: int
    ms: dict[str, float]
    errors: dict[str, float]

    @property
    def tflops(self) -> dict[str, float]:
        operations = OPERATIONS[self.direction] * HIDDEN * self.live_pairs
        return {name: operations / ms / 1e9 for name, ms in self.ms.items()}

    @property
    def wrong(self) -> list[str]:
        return sorted(name for name, error in self.errors.items() if not error < LIMITS[self.direction])


def partition(tokens: int, count: int, seed: int = 0) -> list[int]:
    """Return `count` random positive lengths that sum to `tokens`: all ways to cut are equally likely."""
    cuts = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(seed))[: count - 1] + 1
    ends = [0, *sorted(cuts.tolist()), tokens]
    return [end - begin for begin, end in itertools.pairwise(ends)]


@dataclass(frozen=True, slots=True)
class Documents:
    """Packed documents: query, key and value [1, H, T, D] on the GPU, and where the documents lie."""

    tensors: list[torch.Tensor]
    lengths: list[int]

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0).int().cuda()

    @property
    def document_id(self) -> torch.Tensor:
        return torch.arange(len(self.lengths)).repeat_interleave(torch.tensor(self.lengths)).int().cuda()

    @property
    def live_pairs(self) -> int:
        return sum(length * (length + 1) // 2 for length in self.lengths)

    def slices(self) -> list[slice]:
        ends = self.cu_seqlens.tolist()
        return [slice(begin, end) for begin, end in itertools.pairwise(ends)]


def draw(tokens: int, count: int, head_dim: int) -> Documents:
    shape = (1, HIDDEN // head_dim, tokens, head_dim)
    tensors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    return Documents(tensors, partition(tokens, count))


def contenders(problem: Documents, variants: dict[str, dict], *, peers: bool) -> dict[str, Contender]:
    query, key, value = problem.tensors
    cu_seqlens, document_id = problem.cu_seqlens, problem.document_id
    found: dict[str, Contender] = {}
    for name, options in variants.items():
        packed = flexgen.compile(None, causal, options)
        found[name] = lambda packed=packed: packed(query, key, value, cu_seqlens_q=cu_seqlens)
    masked, changing = (flexgen.compile(None, documents(ids)) for ids in (document_id, document_id.clone()))
    changed = changing.mask_mod.__closure__[0].cell_contents

    def new_documents() -> Any:
        changed.add_(0)  # the same documents, but flexgen cannot know
        return changing(query, key, value)

    found |= {"documents": lambda: masked(query, key, value), "new documents": new_documents}
    if not peers:
        return found
    tokens = query.shape[2]
    mask = create_block_mask(documents(document_id), None, None, tokens, tokens, "cuda")
    compiled = torch.compile(torch_flex, dynamic=False)
    found["flex"] = lambda: compiled(query, key, value, block_mask=mask)
    varlen = varlen_contender(problem)
    return found if varlen is None else found | {"varlen": varlen}


def varlen_contender(problem: Documents) -> Contender | None:
    """Return torch's own kernels for packed sequences; None where torch has none for them."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # torch 2.10 and later
    except ImportError:
        return None
    takes_window = "window_size" in inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0)} if takes_window else {"is_causal": True}
    cu_seqlens, longest = problem.cu_seqlens, max(problem.lengths)

    def call() -> torch.Tensor:
        rows = [tensor[0].transpose(0, 1) for tensor in problem.tensors]
        return varlen_attn(*rows, cu_seqlens, cu_seqlens, longest, longest, **options).transpose(0, 1)[None]

    return call


def expected(problem: Documents, grad_output: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the float32 output and gradients of the first two heads."""
    tensors = [tensor[:, :2].detach().float().requires_grad_() for tensor in problem.tensors]
    query, key, value = tensors
    parts = []
    for rows in problem.slices():
        score = query[:, :, rows] @ key[:, :, rows].mT / query.shape[3] ** 0.5
        live = torch.ones(score.shape[2:], dtype=torch.bool, device="cuda").tril()
        parts.append(torch.softmax(score.masked_fill(~live, float("-inf")), -1) @ value[:, :, rows])
    output = torch.cat(parts, 2)
    return output.detach(), torch.autograd.grad(output, tensors, grad_output[:, :2].float())


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found[:, :2].float() - wanted).norm() / wanted.norm()).item()


def run(problem: Documents, rounds: int, variants: dict[str, dict], *, peers: bool) -> list[Row]:
    torch.compiler.reset()
    grad_output = torch.randn_like(problem.tensors[0])
    output, gradients = expected(problem, grad_output)
    calls = contenders(problem, variants, peers=peers)

    def forward(call: Contender) -> Contender:
        def without_grad() -> object:
            with torch.no_grad():
                return call()

        return without_grad

    def worst(found: tuple[torch.Tensor, ...]) -> float:
        return max(error(one, other) for one, other in zip(found, gradients, strict=True))

    forwards = {name: forward(call) for name, call in calls.items()}
    backwards = {name: differentiated(call, problem.tensors, grad_output) for name, call in calls.items()}
    backwards.pop("new documents")  # a backward alone keeps its forward's documents
    return [
        _row("forward", problem, forwards, lambda found: error(found, output), rounds),
        _row("backward", problem, backwards, worst, rounds),
    ]


def _row(
    direction: str, problem: Documents, calls: dict[str, Contender], judge: Callable[[Any], float], rounds: int
) -> Row:
    errors = {name: judge(call()) for name, call in calls.items()}
    _, _, tokens, head_dim = problem.tensors[0].shape
    ms = interleaved(calls, rounds)
    return Row(direction, head_dim, tokens, len(problem.lengths), problem.live_pairs, ms, errors)


def report(rows: list[Row], about: dict[str, str]) -> str:
    """Return the results as Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row.ms))
    lines = ["# Packed documents", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        f"bf16, heads x head dim = {HIDDEN}, documents of random lengths, causal in each; TFLOP/s over live pairs.",
        "The contenders are described in benchmarks/varlen.py.",
        "",
        "| direction | D | tokens | documents | " + " | ".join(names) + " |",
        "| --- | --- | --- | --- | " + " | ".join("---:" for _ in names) + " |",
    ]
    for row in rows:
        cells = [f"{row.tflops[name]:.0f}" if name in row.ms else "" for name in names]
        wrong = f" WRONG {row.wrong}" if row.wrong else ""
        lines.append(
            f"| {row.direction} | {row.head_dim} | {row.tokens} | {row.documents} | {' | '.join(cells)} |{wrong}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--documents", type=int, nargs="*", default=[16, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default="{}", help="JSON: name -> options of packed, timed beside the defaults")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="time flexgen alone")
    parser.add_argument("--out", type=Path, help="folder to write varlen.json and varlen.md to")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.varlen times kernels on a GPU, and there is none here")
    variants, rows, about = {"packed": {}, **json.loads(args.variants)}, [], environment("varlen")
    for head_dim in args.head_dim:
        for count in args.documents:
            rows += run(draw(args.tokens, count, head_dim), args.rounds, variants, peers=args.peers)
            if args.out:  # after each problem, so that a stop loses little
                data = {"environment": about, "rows": [asdict(row) | {"tflops": row.tflops} for row in rows]}
                (args.out / "varlen.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
                (args.out / "varlen.md").write_text(report(rows, about), encoding="utf-8")
    print(report(rows, about))


if __name__ == "__main__":
    main()

"""Host time of one warm call: until it returns, the device having so little to do that it is never waited for.

    python -m benchmarks.host_time --out benchmarks/results

On a GPU whole calls are timed, launches included, beside torch.compile(flex_attention) and
scaled_dot_product_attention. Elsewhere launches are replaced with nothing: what flexgen's own Python costs. Writes
host_time.md and .json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment
from flexgen.runtime import kernel, split_kernel

LENGTH, HEADS, HEAD_DIM = 128, 8, 64
Call = Callable[..., torch.Tensor]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def microseconds(call: Callable[[], object], rounds: int = 20, count: int = 200) -> float:
    """Return the median microseconds of a call over rounds; the device is idle before each."""
    for _ in range(20):
        call()
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


class _NoLaunch:
    def __call__(self, grid: object, values: object) -> None:
        pass

    def bound(self, grid: object, values: object) -> Callable[[object], None]:
        return lambda values: None


def calls(device: str) -> Mapping[str, Call]:
    slopes, table = torch.rand(HEADS, device=device), torch.rand(2 * LENGTH, device=device)

    def biased(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * table[q_idx - kv_idx + LENGTH - 1]

    document = (torch.arange(LENGTH, device=device) // 50).to(torch.int32)

    def documents(b, h, q_idx, kv_idx):
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    found: dict[str, Call] = {
        "flexgen, no mods": flexgen.compile(),
        "flexgen, causal": flexgen.compile(None, causal),
        "flexgen, two captured tensors": flexgen.compile(biased, causal),
        "flexgen, derived table": flexgen.compile(None, documents),
    }
    if device == "cuda":
        compiled = torch.compile(torch_flex, dynamic=False)
        found["flex, no mods"] = lambda *tensors: compiled(*tensors)
        found["scaled_dot_product_attention"] = torch.nn.functional.scaled_dot_product_attention
    return found


def decodes(device: str) -> Mapping[str, Callable[[], torch.Tensor]]:
    """Return calls without gradients, of one query to each of two caches."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    query, (key, value), pages = randn(2, 8, 1, 64), randn(2, 2, 2, 1024, 64), randn(2, 32, 2, 64, 64)
    lengths = torch.full((2,), 1000, dtype=torch.int32, device=device)
    page_table = torch.arange(32, device=device, dtype=torch.int32).view(2, 16)
    decode = flexgen.compile(options={"SPLIT_KV": 4})
    return {
        "flexgen, decode in 4 splits": lambda: decode(query, key, value),
        "flexgen, decode with kv_lengths": lambda: decode(query, key, value, kv_lengths=lengths),
        "flexgen, decode of pages": lambda: decode(query, *pages, kv_lengths=lengths, page_table=page_table),
    }


def rows(device: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    tensors = [torch.randn(1, HEADS, LENGTH, HEAD_DIM, device=device, dtype=torch.bfloat16) for _ in range(3)]
    grad = torch.randn_like(tensors[0])
    for name, call in calls(device).items():
        plain = microseconds(lambda call=call: call(*tensors))
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        recorded = microseconds(lambda call=call, inputs=inputs: call(*inputs))
        both = microseconds(
            lambda call=call, inputs=inputs: torch.autograd.grad(call(*inputs), inputs, grad), rounds=10
        )
        found.append({"call": name, "inference": plain, "recorded": recorded, "with gradients": both})
        print(f"{name:<32}{plain:8.1f}{recorded:10.1f}{both:10.1f} us", flush=True)
    for name, decode in decodes(device).items():
        found.append({"call": name, "inference": microseconds(decode)})
        print(f"{name:<32}{found[-1]['inference']:8.1f} us", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to write the results to")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        kernel.executor = split_kernel.executor = lambda *_: _NoLaunch()
    found = rows(device)
    if args.out:
        about = environment("host_time", gpu=device == "cuda")
        (args.out / "host_time.json").write_text(json.dumps({"environment": about, "rows": found}, indent=1) + "\n")
        (args.out / "host_time.md").write_text(report(about, found))


def report(about: Mapping[str, str], found: list[dict[str, Any]]) -> str:
    columns = ("inference", "recorded", "with gradients")
    lines = [
        "| "
        + " | ".join([str(row["call"]), *(f"{row[column]:.1f}" if column in row else "" for column in columns)])
        + " |"
        for row in found
    ]
    return (
        f"""# Host time

{about["device"]}, torch {about["torch"]}, triton {about["triton"]}, Python {about["python"]}, {about["date"]}:
`{about["command"]}`.
Microseconds on the host until a warm call returns, medians: without gradients, recorded by autograd, with a backward;
[1, {HEADS}, {LENGTH}, {HEAD_DIM}] bf16.

| call | inference | recorded | with backward |
| --- | ---: | ---: | ---: |
"""
        + "\n".join(lines)
        + "\n"
    )


if __name__ == "__main__":
    main()

"""Runs a kernel of each template once, on awkward sizes: what compute-sanitizer watches, and what float64 judges.

    python -m benchmarks.memcheck                       # on a GPU; plain
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m benchmarks.memcheck
    python -m benchmarks.memcheck --device cpu          # in the interpreter: what runs there

Without torch's cache of memory each tensor is an allocation of its own, so that an access behind its end is seen.
`--only TEXT` runs the cases whose name holds the text. The exit code is 1 if a case is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import flexgen
from benchmarks.about import require_gpu
from flexgen.fuzzing.check import check_call
from flexgen.fuzzing.inputs import drawn, lengths, offsets

Mod = Callable[..., Any]
GLUON = {"fwd_BACKEND": "GLUON"}
SMALL = {"BLOCK_M": 32, "BLOCK_N": 32}


@dataclass(frozen=True, slots=True)
class Case:
    """One call.

    Attributes:
        shape: batch, query heads, heads of keys, queries, keys, head dim, value dim.
        mods: makes score_mod and mask_mod from the tensors that they capture.
        layout: how inputs lie in memory: "part" at no multiple of 16 bytes, which the copy engine cannot read.
        ways: other ways to compute it, of `flexgen.fuzzing.ways.WAYS`.
        extras: makes more arguments of `check_call`.
        needs: "nothing", "gpu" or "hopper".
    """

    name: str
    shape: tuple[int, int, int, int, int, int, int]
    dtype: str = "bfloat16"
    mods: Callable[[str], tuple[Mod | None, Mod | None]] = field(default=lambda device: (None, causal))
    options: dict[str, Any] = field(default_factory=dict)
    backward: bool = False
    layout: str = "part"
    ways: tuple[str, ...] = ()
    extras: Callable[[str], dict[str, Any]] = field(default=lambda device: {})
    needs: str = "nothing"


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def tables(device: str) -> tuple[Mod, Mod]:
    """Mods that read captured tensors, some outside of them, and learn from one."""
    bias = drawn((3, 40), seed=5, layout="part", requires_grad=True, device=device)
    rows = drawn((70,), "int32", 6, "part", low=-9, high=90, device=device)
    return lambda s, b, h, q, k: s + bias[h, q - k], lambda b, h, q, k: (k < rows[q]) | (k - q < 3)


def documents(device: str) -> tuple[None, Mod]:
    ids = drawn((3, 500), "int32", 7, "part", low=0, high=9, ascending=True, device=device)
    return None, lambda b, h, q, k: ids[b, q] == ids[b, k]


def packed(device: str) -> dict[str, Any]:
    return {"cu_seqlens": tuple(offsets(it, device=device) for it in ((31, 0, 90, 1), (40, 7, 80, 20)))}


def cache(device: str) -> dict[str, Any]:
    return {"kv_lengths": lengths((0, 77, 301), device=device)}


def cases() -> list[Case]:
    found = [
        Case("forward, tails", (2, 2, 1, 131, 97, 80, 24)),
        Case("forward, float32", (1, 2, 2, 33, 129, 17, 5), "float32"),
        Case("forward, tables", (1, 3, 3, 131, 97, 64, 64), mods=tables),
        Case("forward, copy engine", (1, 2, 2, 300, 333, 64, 64), options={"USE_TMA": True}, layout="contiguous"),
        Case("forward, a table made before", (3, 2, 1, 300, 300, 64, 64), mods=documents, options=SMALL,
             ways=("with a table made before",)),
        Case("forward, a block mask", (3, 2, 2, 70, 97, 32, 32), mods=documents, ways=("with a block mask",)),
        Case("backward, tails", (2, 4, 2, 131, 97, 80, 24), backward=True),
        Case("backward, tables", (1, 3, 3, 70, 97, 64, 64), "float32", tables, backward=True),
        Case("backward, a derived table", (3, 2, 1, 300, 300, 32, 32), mods=documents, options=SMALL, backward=True),
        Case("packed sequences", (1, 2, 1, 130, 160, 64, 40), extras=packed, backward=True),
        Case("decode, split", (3, 4, 2, 1, 700, 64, 64), options={"SPLIT_KV": 5}),
        Case("decode, five queries", (3, 4, 2, 5, 333, 80, 24), mods=tables, options={"SPLIT_KV": 3}),
        Case("decode, lengths and pages", (3, 4, 2, 1, 301, 64, 64), extras=cache, ways=("in pages",)),
        Case("prefill, lengths and pages", (3, 4, 2, 70, 301, 64, 64), extras=cache, ways=("in pages",)),
        Case("a scaled cache", (3, 4, 2, 1, 301, 64, 64), extras=cache, ways=("with scales of keys and values",)),
    ]  # fmt: skip
    for head_dim in (64, 128, 256):
        gluon = {"options": GLUON, "layout": "contiguous", "needs": "hopper"}
        found.append(Case(f"Hopper, tails, D={head_dim}", (2, 4, 2, 333, 501, head_dim, head_dim), **gluon))
        found.append(
            Case(f"Hopper, tables, D={head_dim}", (1, 3, 3, 300, 300, head_dim, head_dim), mods=tables, **gluon)
        )
        found.append(
            Case(f"Hopper, few rows, D={head_dim}", (2, 2, 2, 40, 200, head_dim, head_dim), "float16", **gluon)
        )
    found.append(
        Case("Hopper, derived table", (3, 2, 2, 300, 300, 128, 128), mods=documents, options=GLUON, layout="contiguous",
             needs="hopper")
    )  # fmt: skip
    for head_dim in (80, 128, 256):
        found.append(
            Case(f"Hopper, backward, D={head_dim}", (1, 4, 2, 333, 300, head_dim, head_dim), mods=documents,
                 options={"bwd_BACKEND": "GLUON"}, backward=True, layout="contiguous", needs="hopper")
        )  # fmt: skip
    return found


def run(case: Case, device: str) -> None:
    """Run a case.

    Raises:
        Wrong: its results are further from float64 than their precision explains.
    """
    batch, heads, kv_heads, queries, keys, head_dim, value_dim = case.shape
    shapes = ((batch, heads, queries, head_dim), (batch, kv_heads, keys, head_dim), (batch, kv_heads, keys, value_dim))
    inputs = [
        drawn(shape, case.dtype, seed, case.layout, requires_grad=case.backward, device=device)
        for seed, shape in enumerate(shapes)
    ]
    attention = flexgen.compile(*case.mods(device), case.options)
    check_call(attention, *inputs, backward=case.backward, also=case.ways, **case.extras(device))


def drops(device: str) -> None:
    """Run dropout and sinks, whose values other tests check: here only what they touch is watched."""
    query, key, value = (
        drawn((2, 2, 131, 64), "bfloat16", n, "part", requires_grad=True, device=device) for n in range(3)
    )
    sinks = drawn((2,), seed=4, requires_grad=True, device=device)
    output = flexgen.compile(None, causal)(query, key, value, sinks=sinks, dropout_p=0.3)
    torch.autograd.grad(output.float().square().sum(), (query, key, value, sinks))


def blocks(device: str) -> None:
    """Make a block mask on the device, and check that it is the right one."""
    ids = drawn((500,), "int32", 7, "part", low=0, high=9, ascending=True, device=device)
    made = flexgen.create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 500, 333, device=device)
    live = ids[:, None] == ids[:333]
    padded = torch.nn.functional.pad(live, (0, 51, 0, 12))
    right = padded.view(4, 128, 3, 128).any(3).any(1)
    if not torch.equal(made.to_dense()[0, 0].bool(), right):
        raise AssertionError("the block mask is wrong")


def can_run(needs: str, device: str) -> bool:
    if device == "cpu":
        return needs == "nothing"
    return needs != "hopper" or torch.cuda.get_device_capability()[0] == 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        require_gpu("memcheck")
    jobs: dict[str, Callable[[str], None]] = {
        case.name: lambda device, case=case: run(case, device)  # type: ignore[misc]
        for case in cases()
        if can_run(case.needs, arguments.device)
    }
    jobs |= {"dropout and sinks": drops, "making a block mask": blocks}
    wrong = 0
    for name, job in jobs.items():
        if arguments.only not in name:
            continue
        start = time.monotonic()
        try:
            job(arguments.device)
            verdict = "right"
        except Exception as error:
            wrong += 1
            verdict = f"WRONG: {type(error).__name__}: {error}"
        print(f"{time.monotonic() - start:6.1f} s  {name}: {verdict}", flush=True)
    print(f"{len(jobs)} cases, {wrong} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()

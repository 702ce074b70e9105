"""Making block tables: flexgen's derived ones beside torch's create_block_mask, in one process.

    python -m benchmarks.block_table --out results.json

The mask is that of 16 documents of equal length (`document_id[q] == document_id[k]`), and the same with causal. Times
are medians of wall clock around a device synchronisation, after warming up. Memory is the most that was allocated
above what was before.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask

import flexgen
from benchmarks.about import environment
from benchmarks.cases import documents

Make = Callable[[], Any]
MIB = 1 << 20


def same_document(document_id: torch.Tensor) -> Callable[..., torch.Tensor]:
    def document_mask(b, h, q_idx, kv_idx):
        return document_id[q_idx] == document_id[kv_idx]

    return document_mask


def measured(make: Make, rounds: int) -> dict[str, Any]:
    """Return median milliseconds, peak MiB and MiB kept, or the error that making it raised."""
    try:
        for _ in range(2):
            make()
    except Exception as error:  # the other side's failures are results
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = make()
    torch.cuda.synchronize()
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    del kept
    return {"ms": statistics.median(_seconds(make) for _ in range(rounds)) * 1e3, "peak_mib": peak / MIB} | {
        "kept_mib": held / MIB
    }


def _seconds(make: Make) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    make()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def makers(length: int, mask: Callable[..., torch.Tensor], torch_too: bool) -> dict[str, Make]:
    query, key = (torch.empty(1, 1, length, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    attention = flexgen.compile(None, mask)
    at_128 = flexgen.compile(None, mask, {"BLOCK_M": 128, "BLOCK_N": 128, "num_warps": 8, "num_stages": 2})
    needed = attention.block_table(query, key).capacity
    found: dict[str, Make] = {
        "flexgen": lambda: attention.block_table(query, key),
        "flexgen, 128 x 128": lambda: at_128.block_table(query, key),
        "flexgen, max_blocks": lambda: attention.block_table(query, key, max_blocks=needed),
    }
    if torch_too:
        compiled = torch.compile(create_block_mask)
        found["torch, compiled"] = lambda: compiled(mask, None, None, length, length, "cuda")
    if torch_too and length <= 32768:
        found["torch, eager"] = lambda: create_block_mask(mask, None, None, length, length, "cuda")
    return found


def run(lengths: list[int], rounds: int, torch_up_to: int) -> list[dict[str, Any]]:
    rows = []
    for length in lengths:
        document_id = (torch.arange(length, device="cuda") // (length // 16)).to(torch.int32)
        for name, mask in (("documents", same_document(document_id)), ("causal documents", documents(document_id))):
            for maker, make in makers(length, mask, length <= torch_up_to).items():
                rows.append({"length": length, "mask": name, "maker": maker} | measured(make, rounds))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, nargs="*", default=[8192, 131072, 524288, 1048576])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torch-up-to", type=int, default=524288)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = run(args.length, args.rounds, args.torch_up_to)
    if args.out:
        args.out.write_text(json.dumps({"environment": environment("block_table"), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

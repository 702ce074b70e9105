"""How long a fresh process takes to its first output and gradients, with empty and with warm caches.

    python -m benchmarks.start_up --out benchmarks/results

The clock starts with torch imported, the CUDA context made and the inputs drawn, and stops when the device is done:
after the forward, and after the gradients. It includes importing flexgen, and making torch's block mask. Each number is
of a process of its own; with warm caches the median of several. flexgen's modules are compiled to Python's bytecode
beforehand, as installing a package does, and as torch's are. Writes start_up.md and .json.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

CACHES = {"FLEXGEN_CACHE_DIR": "flexgen", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
LENGTH, HEADS, HEAD_DIM = 8192, 16, 128
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Seconds = Mapping[str, float]


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def softcap(score, b, h, q_idx, kv_idx):
    return 30 * torch.tanh(score / 30)


def with_flexgen(tensors: Tensors) -> torch.Tensor:
    import flexgen

    return flexgen.compile(softcap, causal)(*tensors)


def with_flex(tensors: Tensors) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = torch.compile(create_block_mask)(causal, None, None, LENGTH, LENGTH, "cuda")
    return torch.compile(flex_attention)(*tensors, score_mod=softcap, block_mask=blocks)


CONTENDERS: Mapping[str, Callable[[Tensors], torch.Tensor]] = {"flexgen": with_flexgen, "flex": with_flex}


def child(name: str) -> Seconds:
    """Return the seconds to the output, and to the gradients, in this process."""
    query, key, value = (
        torch.randn(2, HEADS, LENGTH, HEAD_DIM, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    torch.cuda.synchronize()
    start = time.perf_counter()
    output = CONTENDERS[name]((query, key, value))
    torch.cuda.synchronize()
    forward = time.perf_counter() - start
    output.sum().backward()
    torch.cuda.synchronize()
    return {"output": forward, "gradients": time.perf_counter() - start}


def measured(name: str, caches: Path) -> Seconds:
    """Return what `child` does, of a fresh process with its caches in a folder."""
    environment = os.environ | {variable: str(caches / folder) for variable, folder in CACHES.items()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "benchmarks.start_up", "--child", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


def run(names: list[str], warm_rounds: int) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            empty = measured(name, Path(folder))
            warm = [measured(name, Path(folder)) for _ in range(warm_rounds)]
        median = {stage: statistics.median(one[stage] for one in warm) for stage in empty}
        for caches, seconds in (("empty", empty), ("warm", median)):
            rows.append({"contender": name, "caches": caches, **seconds})
            print(
                f"{name:<8} {caches:<6} output {seconds['output']:6.2f} s, gradients {seconds['gradients']:6.2f} s",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contender", nargs="*", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--warm-rounds", type=int, default=3)
    parser.add_argument("--child", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="folder to write the results to")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child)))
        return
    from benchmarks.about import environment, require_gpu

    require_gpu("start_up")
    compileall.compile_dir(Path(__file__).parents[1] / "flexgen", quiet=1)
    rows = run(args.contender, args.warm_rounds)
    if args.out:
        about = environment("start_up")
        (args.out / "start_up.json").write_text(json.dumps({"environment": about, "rows": rows}, indent=1) + "\n")
        (args.out / "start_up.md").write_text(report(about, rows))


def report(about: Mapping[str, str], rows: list[dict[str, object]]) -> str:
    lines = [f"| {row['contender']} | {row['caches']} | {row['output']:.2f} | {row['gradients']:.2f} |" for row in rows]
    head = (
        f"# Start-up\n\n{about['device']}, torch {about['torch']}, triton {about['triton']}, Python {about['python']}, "
        f"{about['date']}: `{about['command']}`.\nSeconds from a call, in a fresh process with torch imported and the "
        f"CUDA context made, to its output and to its gradients: a soft-capped causal attention, bf16, S={LENGTH}, "
        f"D={HEAD_DIM}. flex is torch.compile(flex_attention) with a compiled create_block_mask.\n\n"
        "| | caches | output | gradients |\n| --- | --- | ---: | ---: |\n"
    )
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()

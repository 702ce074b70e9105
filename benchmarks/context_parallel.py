"""One GPU against several that share a sequence, through flexgen.context_parallel over NCCL.

    python -m benchmarks.context_parallel --ranks 2 --out benchmarks/results

Each rank holds its shard of the sequence and one process has the whole; forward and backward are timed apart, in
interleaved rounds, by the host's clock around as many calls as fill a fifth of a second, from one barrier to the
slowest rank's end. While one GPU is timed the others wait. Outputs and gradients of the shards are put together and
compared with the one GPU's. TFLOP/s count live (query, key) pairs only, 4 * H * D operations each forward and
10 * H * D backward; `received` is what the plan says that a rank receives at most. Which chunks a rank holds follows
the predicted work of each mask, as flexgen.plan_context_parallel has it, unless --assignment says.

With --device cpu the processes talk over gloo and kernels are interpreted: that checks the benchmark, and times nothing
of interest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import flexgen
from benchmarks.about import environment, require_gpu
from benchmarks.backward import differentiated
from benchmarks.cases import causal, window

LIMITS = {"forward": 0.01, "backward": 0.02}  # relative Frobenius distances that bfloat16 explains
OPERATIONS = {"forward": 4, "backward": 10}
COLUMNS = (
    *("case", "direction", "S", "D", "GPUs", "assignment"),
    *("one, ms", "shared, ms", "speedup", "TFLOP/s", "received, MB", "distance"),
)
LEFT = ("case", "direction", "assignment")
TARGET_S = 0.2
MOST_CALLS = 50
TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class Row:
    """One case and direction.

    Attributes:
        ranks: how many GPUs share the sequence.
        assignment: which chunks of it each holds.
        one_ms, shared_ms: of one GPU, and of all of them together.
        live_pairs: of all heads.
        received: bytes that a rank receives at most.
        imbalance: live pairs of the rank with the most of them, over the mean.
        distance: between the two results: relative, the largest of output or gradients.
    """

    case: str
    direction: str
    ranks: int
    assignment: str
    length: int
    head_dim: int
    one_ms: float
    shared_ms: float
    live_pairs: int
    received: int
    imbalance: float
    distance: float

    @property
    def speedup(self) -> float:
        return self.one_ms / self.shared_ms

    @property
    def tflops(self) -> float:
        """TFLOP/s of each GPU, of those that share."""
        return OPERATIONS[self.direction] * self.head_dim * self.live_pairs / self.shared_ms / 1e9 / self.ranks

    @property
    def is_right(self) -> bool:
        return self.distance < LIMITS[self.direction]


@dataclass(frozen=True, slots=True)
class Clock:
    """Times calls that all ranks, or the first one alone, make."""

    device: torch.device

    def wait(self) -> None:
        """Wait until this rank's device has finished."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def milliseconds(self, call: Callable[[], object], calls: int, *, alone: bool) -> float:
        """Return the time of one of many calls, of the slowest rank; all ranks ask together."""
        self.wait()
        dist.barrier()
        began = time.perf_counter()
        if not alone or dist.get_rank() == 0:
            for _ in range(calls):
                call()
            self.wait()
        spent = torch.tensor([(time.perf_counter() - began) * 1e3 / calls], device=self.device)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        dist.barrier()
        return float(spent)

    def calls(self, call: Callable[[], object], *, alone: bool) -> int:
        """Return how many calls fill the target, after one that is not timed; the same on all ranks."""
        self.milliseconds(call, 1, alone=alone)
        once = self.milliseconds(call, 1, alone=alone)
        return max(1, min(MOST_CALLS, round(TARGET_S * 1e3 / once)))


@dataclass(frozen=True, slots=True)
class Problem:
    """Query, key and value of the whole sequence [1, H, L, D] and the output's gradient, alike on all ranks."""

    case: str
    mask_mod: Any
    tensors: list[Tensor]
    grad_output: Tensor


def problems(args: argparse.Namespace, device: torch.device) -> list[Problem]:
    masks = {"causal": causal, f"window {args.window}": window(args.window)}
    shape = (1, args.heads, args.length, args.head_dim)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    random = torch.Generator(device=device).manual_seed(0)
    drawn = [torch.randn(shape, generator=random, device=device, dtype=dtype) for _ in range(4)]
    return [Problem(name, mask, [t.requires_grad_() for t in drawn[:3]], drawn[3]) for name, mask in masks.items()]


def compare(problem: Problem, args: argparse.Namespace, mesh: Any, clock: Clock) -> list[Row]:
    """Time one process against all of them."""
    attention = flexgen.compile(mask_mod=problem.mask_mod)
    predicted = flexgen.plan_context_parallel(attention, *problem.tensors, ranks=args.ranks, assignment=args.assignment)
    parallel = flexgen.context_parallel(attention, mesh, assignment=predicted.assignment.name)
    parts = [parallel.shard(tensor.detach()).requires_grad_() for tensor in problem.tensors]
    grad_part = parallel.shard(problem.grad_output)
    alone = dist.get_rank() == 0
    whole_call = (lambda: attention(*problem.tensors)) if alone else (lambda: None)
    shared_call = lambda: parallel(*parts)  # noqa: E731
    calls = {
        "forward": (without_grad(whole_call), without_grad(shared_call)),
        "backward": (
            differentiated(whole_call, problem.tensors, problem.grad_output) if alone else whole_call,
            differentiated(shared_call, parts, grad_part),
        ),
    }
    plan = parallel.plan(*parts)
    rows = []
    for direction, (whole, shared) in calls.items():
        distance = farthest(whole(), [parallel.unshard(one) for one in as_list(shared())])
        counts = [clock.calls(call, alone=only) for call, only in ((whole, True), (shared, False))]
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(args.rounds):
            times[0].append(clock.milliseconds(whole, counts[0], alone=True))
            times[1].append(clock.milliseconds(shared, counts[1], alone=False))
        ranks = [plan.of_rank(rank) for rank in range(plan.ranks)]
        received = [one.received if direction == "forward" else one.received_backward for one in ranks]
        rows.append(
            Row(
                problem.case,
                direction,
                plan.ranks,
                plan.assignment.name,
                args.length,
                args.head_dim,
                median(times[0]),
                median(times[1]),
                sum(plan.pairs),
                max(received),
                plan.imbalance,
                distance,
            )
        )
    return rows


def without_grad(call: Callable[[], object]) -> Callable[[], object]:
    def called() -> object:
        with torch.no_grad():
            return call()

    return called


def as_list(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else list(found)


def farthest(whole: Any, joined: Sequence[Tensor]) -> float:
    """Return the largest relative distance of the joined results from the one process's, where this is that process."""
    if whole is None:
        return 0.0
    return max(distance(one, other) for one, other in zip(joined, as_list(whole), strict=True))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def report(rows: Sequence[Row], about: dict[str, str]) -> str:
    """Return the results as Markdown."""
    lines = ["# One GPU against several", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    lines += [
        "Each GPU holds a shard of the sequence. TFLOP/s a GPU over live pairs, of those that share; received: by a",
        "rank at most; distance: between the results, relative. See benchmarks/context_parallel.py.",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"| {' | '.join('---' if name in LEFT else '---:' for name in COLUMNS)} |",
    ]
    for row in rows:
        cells = [row.case, row.direction, row.length, row.head_dim, row.ranks, row.assignment]
        numbers = [f"{row.one_ms:.3f}", f"{row.shared_ms:.3f}", f"{row.speedup:.2f}", f"{row.tflops:.0f}"]
        ends = [f"{row.received / 1e6:.1f}", f"{row.distance:.1e}{'' if row.is_right else ' WRONG'}"]
        lines.append(f"| {' | '.join(map(str, [*cells, *numbers, *ends]))} |")
    return "\n".join(lines) + "\n"


def serve(rank: int, args: argparse.Namespace, meeting: str) -> None:
    """Run one rank; the first one writes and prints the results."""
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=args.ranks, timeout=TIMEOUT)
    mesh, clock = init_device_mesh(args.device, (args.ranks,)), Clock(device)
    rows: list[Row] = []
    for problem in problems(args, device):
        rows += compare(problem, args, mesh, clock)
    dist.destroy_process_group()
    if rank:
        return
    about = environment("context_parallel", gpu=device.type == "cuda")
    if args.out:
        derived = [asdict(row) | {"speedup": row.speedup, "tflops": row.tflops} for row in rows]
        data = {"environment": about, "rows": derived}
        (args.out / "context_parallel.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        (args.out / "context_parallel.md").write_text(report(rows, about), encoding="utf-8")
    print(report(rows, about))
    if wrong := [f"{row.case} {row.direction}" for row in rows if not row.is_right]:
        raise SystemExit(f"results differ: {', '.join(wrong)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--assignment", choices=["head-tail", "contiguous"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder to write context_parallel.json and context_parallel.md to")
    args = parser.parse_args()
    if args.device == "cuda":
        require_gpu("context_parallel")
        if torch.cuda.device_count() < args.ranks:
            raise SystemExit(f"--ranks {args.ranks} needs as many GPUs, and there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(serve, (args, f"{folder}/meeting"), nprocs=args.ranks)


if __name__ == "__main__":
    main()

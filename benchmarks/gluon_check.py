"""Checks the Gluon kernels on a Hopper GPU against float32, then times them beside plain Triton.

    python -m benchmarks.gluon_check --out $OUT/gluon_check.json              # on the GPU: the forward kernels
    python -m benchmarks.gluon_check --backward --out $OUT/gluon_check.json   # the backward kernels
    python -m benchmarks.gluon_check --record gluon_check.json                # afterwards: tests/gpu_verified.json

A kernel whose barriers are wrong hangs instead of failing, so cases run in a worker process that is killed, and
continued after the case that hung, when it has been silent for too long. Kernels are compiled first, in parallel.
`--sources DIR` writes the kernels of each check that fails.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import flexgen
from benchmarks import gluon_backward_check as backward
from benchmarks.about import environment
from benchmarks.cases import cases
from benchmarks.gluon_cases import Check, attention_of, aux_of, checks, reference, table_of, tensors_of
from benchmarks.gluon_verified import code_digest, record
from benchmarks.timing import interleaved

SILENCE = 25  # seconds after which a worker is taken to hang
MAX_HANGS = 4  # after so many nothing more is tried: each takes a fresh process


def run_check(check: Check) -> dict[str, Any]:
    tensors = tensors_of(check, "cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = reference(check, tensors)
    attention, table = attention_of(check, "cuda"), table_of(check, "cuda")
    source = attention.lower(*tensors, return_aux=aux_of(check), block_table=table).source["forward"]
    found = [poisoned(attention, tensors, aux_of(check), table) for _ in range(3)]
    output = found[0][0].transpose(1, 2) if check.layout == "bshd" else found[0][0]
    error = ((output.float() - expected[0]).norm() / expected[0].norm()).item()
    same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    aux_error = max((gap(a, e) for a, e in zip(found[0][1:], expected[1:], strict=False)), default=0.0)
    limit = 0.02 if check.mods == "softcap" else 0.006
    good = error < limit and aux_error < (0.02 if check.mods == "softcap" else 0.003) and same
    return {
        "error": error,
        "aux_error": aux_error,
        "same_bits": same,
        "ok": good,
        "digests": {"forward": code_digest(source)},
    }


def poisoned(attention: flexgen.Attention, tensors: list[torch.Tensor], aux: Any, table: Any) -> list[torch.Tensor]:
    """Call with outputs that the allocator takes from memory full of NaN."""
    query = tensors[0]
    for _ in range(2):
        poison = torch.full((4 * query.numel(),), float("nan"), device="cuda", dtype=query.dtype)
        small = [torch.full((query.numel() // query.shape[-1],), float("nan"), device="cuda") for _ in range(2)]
        del poison, small
    result = attention(*tensors, return_aux=aux, block_table=table)
    torch.cuda.synchronize()
    return [result] if aux is None else [result[0], result[1].lse, result[1].max_scores]


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; infinities must agree."""
    finite = torch.isfinite(expected)
    if not torch.equal(torch.isneginf(found), torch.isneginf(expected)) or found.isnan().any():
        return float("inf")
    return (found - expected)[finite].abs().max().item() if finite.any() else 0.0


# Timing.

VARIANTS: dict[str, dict[str, Any]] = {
    "warm": {"BACKEND": "TRITON"},  # the first contender of a round runs on a cooler chip: not shown
    "gluon": {"BACKEND": "GLUON"},
    "rows 64": {"BACKEND": "GLUON", "BLOCK_M": 64},
    "triton": {"BACKEND": "TRITON"},
}


def timed(head_dim: int, device: str) -> Iterator[tuple[Any, dict[str, flexgen.Attention], list[torch.Tensor]]]:
    heads = 2048 // head_dim
    shape = (2, heads, 8192, head_dim)
    make = torch.empty if device == "meta" else torch.randn
    tensors = [make(shape, device=device, dtype=torch.bfloat16) for _ in range(3)]
    for case in cases(8192, heads, "cpu" if device == "meta" else device):
        yield case, {n: flexgen.compile(case.score_mod, case.mask_mod, o) for n, o in VARIANTS.items()}, tensors


def run_timing(head_dim: int, is_backward: bool) -> Iterator[dict[str, Any]]:
    heads = 2048 // head_dim
    for case, attentions, tensors in (backward.timed if is_backward else timed)(head_dim, "cuda"):
        calls = {name: lambda a=a, t=tensors: a(*t) for name, a in attentions.items()}
        if case.is_causal is not None:
            calls["cudnn"] = lambda t=tensors, c=case.is_causal: cudnn(t, c)
        if is_backward:
            grad_output = torch.randn_like(tensors[0])
            made = {name: backward.differentiated(call, tensors, grad_output) for name, call in calls.items()}
            calls = {name: call for name, call in made.items() if call is not None}
        outputs = {name: attempt(call) for name, call in calls.items()}
        calls = {name: call for name, call in calls.items() if outputs[name] is not None}
        apart = {name: distance(outputs[name], outputs["triton"]) for name in calls}
        del outputs
        milliseconds = interleaved(calls, 5, 25.0)
        flops = (10 if is_backward else 4) * 2 * heads * head_dim * case.live_pairs
        speeds = {name: round(flops / ms / 1e9) for name, ms in milliseconds.items()}
        yield {"head_dim": head_dim, "case": case.name, "tflops": speeds, "apart": apart}


def distance(found: Any, expected: Any) -> float:
    """Return the largest relative difference of outputs or of gradients."""
    pairs = [(found, expected)] if isinstance(found, torch.Tensor) else zip(found, expected, strict=True)
    return max(((f.float() - e.float()).norm() / e.float().norm()).item() for f, e in pairs)


def attempt(call: Callable[[], Any]) -> Any:
    """Call; None where the options do not fit the case."""
    try:
        return call()
    except flexgen.FlexgenError:
        return None


def cudnn(tensors: list[torch.Tensor], is_causal: bool) -> torch.Tensor:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=is_causal)


# Compiling in parallel, and the worker.


def compile_job(job: tuple[str, Any]) -> str:
    """Compile the kernels of one problem into Triton's cache; return what is wrong with them, if anything."""
    kind, what = job
    try:
        if kind == "check" and what.backward:
            compile_all(backward.lowered(what))
        elif kind == "check":
            tensors, table = tensors_of(what, "meta"), table_of(what, "cpu")
            attention_of(what, "cpu").lower(
                *tensors, return_aux=aux_of(what), target="sm_90", block_table=table
            ).binary()
        else:
            head_dim, wanted, variant, is_backward = what
            for case, attentions, tensors in (backward.timed if is_backward else timed)(head_dim, "meta"):
                if case.name == wanted:
                    compile_all(attentions[variant].lower(*tensors, target="sm_90"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def compile_all(low: Any) -> None:
    for name in ("forward", *(low.backward.passes if low.backward else ())):
        low.binary(name)


def jobs(selected: list[Check], head_dims: list[int], is_backward: bool) -> list[tuple[str, Any]]:
    names = [case.name for case in cases(1024, 1, "cpu")]
    variants = backward.VARIANTS if is_backward else VARIANTS
    timings = [("time", (d, case, variant, is_backward)) for d in head_dims for case in names for variant in variants]
    return [*timings, *(("check", check) for check in selected)]


def selection(only: str, early: str, is_backward: bool) -> list[Check]:
    """Return the checks whose name holds `only`, those first whose name holds `early`."""
    found = [check for check in (backward.backward_checks() if is_backward else checks()) if only in check.name]
    return sorted(found, key=lambda check: early not in check.name)


def worker(first: int, only: str, early: str, head_dims: list[int], is_backward: bool) -> None:
    """Run steps from number `first` on, one line of JSON before and one after each."""
    selected = selection(only, early, is_backward)
    steps: list[tuple[str, Any]] = [("check", check) for check in selected]
    steps += [("time", head_dim) for head_dim in head_dims]
    for number, (kind, what) in list(enumerate(steps))[first:]:
        name = what.name if kind == "check" else f"timing D={what}"
        say({"step": number, "begin": name})
        try:
            if kind == "check":
                found = backward.run_backward_check(what) if is_backward else run_check(what)
                say({"step": number, "check": name, **found})
            else:
                for row in run_timing(what, is_backward):
                    say({"step": number, "timing": row})
        except Exception as error:
            say({"step": number, "failed": name, "error": f"{type(error).__name__}: {error}"[:400]})
            if "CUDA" in str(error):
                os._exit(3)
    say({"done": True})


def say(value: dict[str, Any]) -> None:
    print("@" + json.dumps(value), flush=True)


def supervise(
    only: str, head_dims: list[int], deadline: float, *, early: str = "", is_backward: bool = False
) -> list[dict[str, Any]]:
    """Run workers until every step is done, has failed, or time is up; return what they said."""
    said: list[dict[str, Any]] = []
    first = 0
    hangs = 0
    while time.monotonic() < deadline and hangs < MAX_HANGS:
        command = [sys.executable, "-m", "benchmarks.gluon_check", "--worker", str(first), "--only", only]
        command += ["--early", early]
        command += ["--head-dim", *map(str, head_dims), *["--backward"] * is_backward]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=pump, args=(process, lines), daemon=True).start()
        step, name, finished = first, "start", False
        while True:
            try:
                line = lines.get(timeout=SILENCE)
            except queue.Empty:
                said.append({"step": step, "failed": name, "error": f"HANG: silent for {SILENCE} s"})
                hangs += 1
                break
            if line is None or time.monotonic() > deadline:
                break
            if not line.startswith("@"):
                print(line, end="")
                continue
            value = json.loads(line[1:])
            step, name = value.get("step", step), value.get("begin", name)
            finished |= "done" in value
            if "begin" not in value:
                said.append(value)
        process.kill()
        process.wait()
        if finished:
            break
        if time.monotonic() > deadline:
            said.append({"failed": name, "error": "out of time"})
        first = step + 1
    return said


def pump(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def report(said: list[dict[str, Any]], errors: dict[str, str], variants: Sequence[str]) -> None:
    for name, error in errors.items():
        if "cannot be honoured" not in error:
            print(f"NOT COMPILED {name}: {error}")
    good = [row for row in said if row.get("ok")]
    for row in said:
        if "check" in row and not row["ok"]:
            print("WRONG", {k: v for k, v in row.items() if k not in ("step", "digests")})
        if "failed" in row:
            print("FAILED", row["failed"], row["error"])
    worst = max((row["error"] for row in good), default=0.0)
    print(f"{len(good)} checks passed of {sum('check' in row for row in said)}, worst error {worst:.4f}")
    names = [*list(variants)[1:], "cudnn"]
    print("| D | case | " + " | ".join(names) + " | gluon / triton |\n" + "| --- " * (len(names) + 3) + "|")
    for row in (row["timing"] for row in said if "timing" in row):
        speeds = row["tflops"]
        wrong = [name for name, apart in row["apart"].items() if not apart < 0.01]
        cells = " | ".join(str(speeds.get(name, "")) for name in names)
        ratio = speeds.get("gluon", 0) / speeds["triton"]
        print(f"| {row['head_dim']} | {row['case']} | {cells} | {ratio:.2f} |" + (f" APART {wrong}" if wrong else ""))


def write_sources(said: list[dict[str, Any]], selected: list[Check], folder: Path) -> None:
    """Write the kernels of each check that failed."""
    failed = {row.get("failed", row.get("check")) for row in said if "failed" in row or row.get("ok") is False}
    for check in selected:
        if check.name in failed:
            name = "".join(char if char.isalnum() else "_" for char in check.name)
            place = folder / name
            place.mkdir(parents=True, exist_ok=True)
            for entry, text in sources_of(check).items():
                (place / f"{entry}.py").write_text(text)


def sources_of(check: Check) -> dict[str, str]:
    if check.backward:
        return backward.sources_of(check)
    tensors, table = tensors_of(check, "meta"), table_of(check, "cpu")
    low = attention_of(check, "cpu").lower(*tensors, return_aux=aux_of(check), target="sm_90", block_table=table)
    return {"forward": low.source["forward"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=int)
    parser.add_argument("--only", default="", help="check only cases whose name holds this")
    parser.add_argument("--early", default="", help="check cases whose name holds this before others")
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256], help="of the timed cases")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--backward", action="store_true", help="the backward kernels instead of the forward's")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--sources", type=Path, help="write the kernels of checks that fail into this folder")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path, help="write tests/gpu_verified.json from these results, and stop")
    args = parser.parse_args()
    if args.record is not None:
        record(args.record)
        return
    if args.worker is not None:
        worker(args.worker, args.only, args.early, args.head_dim, args.backward)
        return
    deadline = time.monotonic() + args.seconds
    selected = selection(args.only, args.early, args.backward)
    todo = jobs(selected, args.head_dim, args.backward)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(compile_job, todo))
    names = [what.name if kind == "check" else str(what) for kind, what in todo]
    errors = {name: error for name, error in zip(names, results, strict=True) if error}
    print(f"compiled {len(todo)} kernels in {time.monotonic() - deadline + args.seconds:.0f} s", flush=True)
    said = (
        []
        if args.compile_only
        else supervise(args.only, args.head_dim, deadline, early=args.early, is_backward=args.backward)
    )
    report(said, errors, backward.VARIANTS if args.backward else tuple(VARIANTS))
    if args.sources:
        write_sources(said, selected, args.sources)
    if args.out:
        args.out.write_text(
            json.dumps({"environment": environment("gluon_check"), "said": said, "errors": errors}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

"""Checks the Gluon kernels on a Hopper GPU against float32, then times them beside plain Triton.

    python -m benchmarks.gluon_check --out $OUT/gluon_check.json     # on the GPU
    python -m benchmarks.gluon_check --record gluon_check.json      # afterwards: tests/gpu_verified.json

A kernel whose barriers are wrong hangs instead of failing, so cases run in a worker process that is killed, and
continued after the case that hung, when it has been silent for too long. Kernels are compiled first, in parallel.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import flexgen
from benchmarks.about import environment
from benchmarks.cases import alibi, cases, causal, documents, prefix, softcap, window
from benchmarks.timing import interleaved

VERIFIED = Path(__file__).parents[1] / "tests" / "gpu_verified.json"
SILENCE = 25  # seconds after which a worker is taken to hang
Mod = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Check:
    """One problem to check: sizes, mods by name, and options."""

    name: str
    head_dim: int
    mods: str = "none"
    value_dim: int = 0
    batch: int = 1
    heads: tuple[int, int] = (4, 4)
    lengths: tuple[int, int] = (1024, 1024)
    dtype: str = "bfloat16"
    options: dict[str, Any] = field(default_factory=dict)
    aux: bool = False
    layout: str = "bhsd"
    shared_batch: bool = False
    blocks: tuple[int, int] | None = None  # of a block mask, which the call then brings


def checks() -> list[Check]:
    found = []
    for head_dim in (64, 128, 256):
        for mods in ("none", "causal", "window 1024", "window 100"):
            found.append(Check(f"{mods} D={head_dim}", head_dim, mods, lengths=(2048, 2048), heads=(8, 8), batch=2))
        for rows in (64, 128):
            forced = {"BLOCK_M": rows}
            found.append(Check(f"causal rows={rows} D={head_dim}", head_dim, "causal", options=forced, aux=True))
            found.append(
                Check(f"tails rows={rows} D={head_dim}", head_dim, "causal", lengths=(1000, 777), options=forced)
            )
            found.append(
                Check(f"no mask tails rows={rows} D={head_dim}", head_dim, lengths=(333, 1501), options=forced)
            )
            found.append(Check(f"softcap rows={rows} D={head_dim}", head_dim, "softcap", options=forced))
        found.append(Check(f"fully masked rows D={head_dim}", head_dim, "future", lengths=(1000, 1000), aux=True))
        found.append(Check(f"fp16 D={head_dim}", head_dim, "causal", dtype="float16", aux=True))
        found.append(Check(f"many turns D={head_dim}", head_dim, "window 300", lengths=(4096, 4096), heads=(16, 16)))
    for head_dim, value_dim in ((32, 32), (40, 40), (80, 80), (96, 96), (192, 128), (64, 256)):
        found.append(Check(f"D={head_dim},{value_dim}", head_dim, "causal", value_dim, lengths=(700, 900), aux=True))
    for mods in ("alibi", "bias", "key table", "prefix", "sinks", "parity", "constant", "head bias", "two windows"):
        found.append(Check(mods, 64, mods, lengths=(1111, 1111), aux=True))
        found.append(Check(f"{mods} D=128", 128, mods, lengths=(1024, 1300), batch=2))
    for mods in ("documents", "document starts", "sinks in documents"):
        found.append(Check(mods, 64, mods, lengths=(1111, 1111), aux=True))
        found.append(Check(f"{mods} D=128", 128, mods, heads=(4, 2), lengths=(1024, 1024), batch=2))
        found.append(Check(f"{mods} D=256", 256, mods, lengths=(1500, 1500)))
        found.append(Check(f"{mods} rows=64", 128, mods, lengths=(1024, 1024), options={"BLOCK_M": 64}))
    for blocks in ((128, 128), (64, 192), (256, 128)):
        for mods in ("causal", "future", "documents"):
            name = f"block mask {blocks[0]}x{blocks[1]} {mods}"
            found.append(Check(name, 128, mods, lengths=(1024, 1000), aux=True, blocks=blocks))
            found.append(Check(f"{name} D=64", 64, mods, lengths=(700, 1024), batch=2, blocks=blocks))
    found.append(Check("softcap tails", 128, "softcap", lengths=(1000, 1300), aux=True))
    found.append(Check("GQA", 128, "causal", heads=(8, 2), batch=2, aux=True))
    found.append(Check("GQA window", 64, "window 100", heads=(6, 2), batch=2))
    found.append(Check("shared batch", 128, "causal", batch=3, shared_batch=True))
    found.append(Check("heads inside", 128, "causal", batch=2, layout="bshd"))
    found.append(Check("few keys", 128, "none", lengths=(512, 70)))
    found.append(Check("short queries", 64, "causal", lengths=(40, 2000)))
    return found


def mods_of(check: Check, device: str) -> tuple[Mod | None, Mod | None]:
    """Return score_mod and mask_mod; captured tensors are the same in each process."""
    generator = torch.Generator().manual_seed(7)
    q_len, kv_len = check.lengths
    heads = check.heads[0]

    def captured(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    match check.mods.split():
        case ["none"]:
            return None, None
        case ["causal"]:
            return None, causal
        case ["window", size]:
            return None, window(int(size))
        case ["prefix"]:
            return None, prefix(200)
        case ["softcap"]:
            return softcap(30.0), causal
        case ["alibi"]:
            return alibi(captured(heads).abs()), causal
        case ["future"]:
            return None, lambda b, h, q_idx, kv_idx: kv_idx >= q_idx + 100
        case ["documents"]:
            return None, documents(torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150)
        case ["document", "starts"]:
            first = torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150 * 150
            return None, lambda b, h, q_idx, kv_idx: (kv_idx >= first[q_idx]) & (kv_idx <= q_idx)
        case ["sinks", "in", "documents"]:
            first = torch.arange(max(q_len, kv_len), device=device, dtype=torch.int32) // 150 * 150
            return None, lambda b, h, q_idx, kv_idx: (kv_idx <= q_idx) & ((kv_idx >= first[q_idx]) | (kv_idx < 5))
        case ["sinks"]:
            return None, lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 4) | (q_idx - kv_idx <= 90))
        case ["two", "windows"]:
            return None, two_windows
        case ["parity"]:
            return (
                None,
                lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 200) & ((q_idx ^ kv_idx) % 2 == 0),
            )
        case ["constant"]:
            return (lambda score, b, h, q_idx, kv_idx: torch.zeros_like(score)), causal
    if check.mods == "bias":
        bias = captured(heads, q_len, kv_len)
        return (lambda score, b, h, q_idx, kv_idx: score + bias[h, q_idx, kv_idx]), causal
    if check.mods == "head bias":
        gain = captured(heads)
        return (lambda score, b, h, q_idx, kv_idx: score * gain[h] + torch.sigmoid(score)), None
    table = captured(kv_len)
    return (lambda score, b, h, q_idx, kv_idx: score + table[kv_idx]), None


def two_windows(b, h, q_idx, kv_idx):
    return (abs(q_idx - kv_idx) < 40) | (abs(q_idx - kv_idx - 500) < 40)


def tensors_of(check: Check, device: str) -> list[torch.Tensor]:
    dtype = getattr(torch, check.dtype)
    (q_heads, kv_heads), (q_len, kv_len) = check.heads, check.lengths
    key_batch = 1 if check.shared_batch else check.batch
    shapes = [
        (check.batch, q_heads, q_len, check.head_dim),
        (key_batch, kv_heads, kv_len, check.head_dim),
        (key_batch, kv_heads, kv_len, check.value_dim or check.head_dim),
    ]
    if check.layout == "bshd":
        shapes = [(b, s, h, d) for b, h, s, d in shapes]
    if device == "meta":
        return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]
    torch.manual_seed(len(check.name))
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def attention_of(check: Check, device: str) -> flexgen.Attention:
    return flexgen.compile(*mods_of(check, device), {"BACKEND": "GLUON", "layout": check.layout, **check.options})


def table_of(check: Check, device: str) -> Any:
    """Return the block mask that a call brings, if any."""
    if check.blocks is None:
        return None
    mask_mod = mods_of(check, device)[1]
    return flexgen.create_block_mask(mask_mod, None, None, *check.lengths, device=device, BLOCK_SIZE=check.blocks)


def aux_of(check: Check) -> flexgen.AuxRequest | None:
    return flexgen.AuxRequest(lse=True, max_scores=True) if check.aux else None


def reference(check: Check, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return output, logsumexp and maximum in float32, [B, H, L, ...]."""
    query, key, value = (t.transpose(1, 2).float() if check.layout == "bshd" else t.float() for t in tensors)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    score_mod, mask_mod = mods_of(check, "cuda")
    score = query @ key.mT / query.shape[3] ** 0.5
    b, h, q, k = torch.meshgrid(
        *(torch.arange(n, device="cuda") for n in score.shape),
        indexing="ij",
    )
    if score_mod is not None:
        score = score_mod(score, b, h, q, k)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(b, h, q, k), float("-inf"))
    empty = (score == float("-inf")).all(-1, keepdim=True)
    output = torch.softmax(score, -1).masked_fill(empty, 0.0) @ value
    return output, torch.logsumexp(score, -1), score.amax(-1)


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
    return {"error": error, "aux_error": aux_error, "same_bits": same, "ok": good, "digest": code_digest(source)}


def code_digest(text: str) -> str:
    """Return a digest of a kernel's code: neither comments nor docstrings nor line breaks change it."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()


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


def run_timing(head_dim: int) -> Iterator[dict[str, Any]]:
    heads = 2048 // head_dim
    for case, attentions, tensors in timed(head_dim, "cuda"):
        calls = {name: lambda a=a, t=tensors: a(*t) for name, a in attentions.items()}
        if case.is_causal is not None:
            calls["cudnn"] = lambda t=tensors, c=case.is_causal: cudnn(t, c)
        outputs = {name: attempt(call) for name, call in calls.items()}
        expected = outputs["triton"].float()
        calls = {name: call for name, call in calls.items() if outputs[name] is not None}
        apart = {name: ((outputs[name] - expected).norm() / expected.norm()).item() for name in calls}
        del outputs, expected
        milliseconds = interleaved(calls, 5, 25.0)
        flops = 4 * 2 * heads * head_dim * case.live_pairs
        speeds = {name: round(flops / ms / 1e9) for name, ms in milliseconds.items()}
        yield {"head_dim": head_dim, "case": case.name, "tflops": speeds, "apart": apart}


def attempt(call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
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
    """Compile one kernel into Triton's cache; return what is wrong with it, if anything."""
    kind, what = job
    try:
        if kind == "check":
            tensors, table = tensors_of(what, "meta"), table_of(what, "cpu")
            attention_of(what, "cpu").lower(
                *tensors, return_aux=aux_of(what), target="sm_90", block_table=table
            ).binary()
        else:
            head_dim, wanted, variant = what
            for case, attentions, tensors in timed(head_dim, "meta"):
                if case.name == wanted:
                    attentions[variant].lower(*tensors, target="sm_90").binary()
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def jobs(selected: list[Check], head_dims: list[int]) -> list[tuple[str, Any]]:
    names = [case.name for case in cases(1024, 1, "cpu")]
    timings = [("time", (d, case, variant)) for d in head_dims for case in names for variant in VARIANTS]
    return [*timings, *(("check", check) for check in selected)]


def worker(first: int, only: str, head_dims: list[int]) -> None:
    """Run steps from number `first` on, one line of JSON before and one after each."""
    selected = [check for check in checks() if only in check.name]
    steps = [("check", check) for check in selected] + [("time", head_dim) for head_dim in head_dims]
    for number, (kind, what) in list(enumerate(steps))[first:]:
        name = what.name if kind == "check" else f"timing D={what}"
        say({"step": number, "begin": name})
        try:
            if kind == "check":
                say({"step": number, "check": name, **run_check(what)})
            else:
                for row in run_timing(what):
                    say({"step": number, "timing": row})
        except Exception as error:
            say({"step": number, "failed": name, "error": f"{type(error).__name__}: {error}"[:400]})
            if "CUDA" in str(error):
                os._exit(3)
    say({"done": True})


def say(value: dict[str, Any]) -> None:
    print("@" + json.dumps(value), flush=True)


def supervise(only: str, head_dims: list[int], deadline: float) -> list[dict[str, Any]]:
    """Run workers until every step is done, has failed, or time is up; return what they said."""
    said: list[dict[str, Any]] = []
    first = 0
    while time.monotonic() < deadline:
        command = [sys.executable, "-m", "benchmarks.gluon_check", "--worker", str(first), "--only", only]
        command += ["--head-dim", *map(str, head_dims)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=pump, args=(process, lines), daemon=True).start()
        step, name, finished = first, "start", False
        while True:
            try:
                line = lines.get(timeout=SILENCE)
            except queue.Empty:
                said.append({"step": step, "failed": name, "error": f"HANG: silent for {SILENCE} s"})
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


def report(said: list[dict[str, Any]], errors: dict[str, str]) -> None:
    for name, error in errors.items():
        if "cannot be honoured" not in error or "rows" not in name:
            print(f"NOT COMPILED {name}: {error}")
    good = [row for row in said if row.get("ok")]
    for row in said:
        if "check" in row and not row["ok"]:
            print("WRONG", {k: v for k, v in row.items() if k != "step"})
        if "failed" in row:
            print("FAILED", row["failed"], row["error"])
    worst = max((row["error"] for row in good), default=0.0)
    print(f"{len(good)} checks passed of {sum('check' in row for row in said)}, worst error {worst:.4f}")
    names = [*list(VARIANTS)[1:], "cudnn"]
    print("| D | case | " + " | ".join(names) + " | gluon / triton |\n" + "| --- " * (len(names) + 3) + "|")
    for row in (row["timing"] for row in said if "timing" in row):
        speeds = row["tflops"]
        wrong = [name for name, apart in row["apart"].items() if not apart < 0.01]
        cells = " | ".join(str(speeds.get(name, "")) for name in names)
        ratio = speeds.get("gluon", 0) / speeds["triton"]
        print(f"| {row['head_dim']} | {row['case']} | {cells} | {ratio:.2f} |" + (f" APART {wrong}" if wrong else ""))


def record(results: Path) -> None:
    """Write tests/gpu_verified.json from the results of a run: what was checked, by the digest of its code."""
    found = json.loads(results.read_text())
    about = {name: found["environment"][name] for name in ("device", "date", "torch", "triton")}
    kernels = {
        row["digest"]: {"check": row["check"], "error": round(row["error"], 5), **about}
        for row in found["said"]
        if row.get("ok")
    }
    VERIFIED.write_text(json.dumps(dict(sorted(kernels.items())), indent=1) + "\n")
    print(f"{len(kernels)} kernels in {VERIFIED}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=int)
    parser.add_argument("--only", default="", help="check only cases whose name holds this")
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 128, 256], help="of the timed cases")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path, help="write tests/gpu_verified.json from these results, and stop")
    args = parser.parse_args()
    if args.record is not None:
        record(args.record)
        return
    if args.worker is not None:
        worker(args.worker, args.only, args.head_dim)
        return
    deadline = time.monotonic() + args.seconds
    todo = jobs([check for check in checks() if args.only in check.name], args.head_dim)
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(compile_job, todo))
    names = [what.name if kind == "check" else str(what) for kind, what in todo]
    errors = {name: error for name, error in zip(names, results, strict=True) if error}
    print(f"compiled {len(todo)} kernels in {time.monotonic() - deadline + args.seconds:.0f} s", flush=True)
    said = [] if args.compile_only else supervise(args.only, args.head_dim, deadline)
    report(said, errors)
    if args.out:
        args.out.write_text(
            json.dumps({"environment": environment("gluon_check"), "said": said, "errors": errors}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()

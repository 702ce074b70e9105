"""Decode speed of flexgen beside torch.compile(flex_attention) and scaled_dot_product_attention, in one process.

    python -m benchmarks.decode --out results.json
    python -m benchmarks.decode --case b1_131k --peers sdpa --grid "BLOCK_N=64,128 num_stages=3,4 SPLIT_KV=16,33"

Every output is checked against float32 first. Times are of the device: each contender is captured in a CUDA graph of
calls over several caches, which are read in turn so that none is found in the L2 cache; graphs run in interleaved
rounds, and the median counts. TB/s count the live keys and values, read once, as bf16. Host time is that of a warm
call.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import flexgen
from benchmarks.about import environment
from benchmarks.timing import Contender, interleaved

HEAD_DIM = 128
COLD_BYTES = 512 << 20  # read between two reads of one cache; several times the L2 cache of any device
WINDOW, CAP = 4096, 30.0

PAGED = ("b8_32k", "b1_131k")  # cases that are timed in pages too

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Call = Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Case:
    """One step of decoding: one query of each sequence, at the end of its cache.

    Attributes:
        windowed: only the last WINDOW keys are live, and scores are soft-capped.
    """

    name: str
    batch: int
    kv_len: int
    q_heads: int
    kv_heads: int
    windowed: bool = False

    @property
    def live_keys(self) -> int:
        return WINDOW if self.windowed else self.kv_len

    @property
    def live_bytes(self) -> int:
        return 2 * 2 * self.batch * self.kv_heads * self.live_keys * HEAD_DIM

    def mods(self) -> tuple[Any, Any]:
        if not self.windowed:
            return None, None
        position = torch.full((self.batch,), self.kv_len - 1, device="cuda", dtype=torch.int32)

        def softcap(score, b, h, q_idx, kv_idx):
            return CAP * torch.tanh(score / CAP)

        def window(b, h, q_idx, kv_idx):
            distance = position[b] + q_idx - kv_idx
            return (distance >= 0) & (distance < WINDOW)

        return softcap, window


CASES = (
    Case("b8_32k", 8, 32768, 32, 8),
    Case("b1_131k", 1, 131072, 32, 8),
    Case("b32_8k", 32, 8192, 16, 16),
    Case("b1_131k_window_softcap", 1, 131072, 32, 8, windowed=True),
)


def caches(case: Case) -> list[Tensors]:
    """Return so many inputs that reading them in turn finds none in the L2 cache."""
    shape = (case.batch, case.kv_heads, case.kv_len, HEAD_DIM)
    query = torch.randn(case.batch, case.q_heads, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    count = max(2, -(-COLD_BYTES // case.live_bytes))
    count = min(count, max(2, (48 << 30) // (2 * 2 * case.batch * case.kv_heads * case.kv_len * HEAD_DIM)))
    made = (torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(count))
    return [(query, *pair.unbind()) for pair in made]


def flexgen_calls(case: Case, variants: dict[str, dict[str, Any]]) -> dict[str, Call]:
    lengths = torch.full((case.batch,), case.kv_len, device="cuda", dtype=torch.int32)
    calls: dict[str, Call] = {}
    for name, options in variants.items():
        attention = flexgen.compile(*case.mods(), options)
        calls[name] = lambda tensors, attention=attention: attention(*tensors)
    plain = flexgen.compile(*case.mods())
    calls["kv_lengths"] = lambda tensors: plain(*tensors, kv_lengths=lengths)
    return calls


def paged_calls(case: Case, page_sizes: list[int], variants: dict[str, dict[str, Any]]) -> dict[str, Call]:
    """Return a call for each page size and each variant: the cache in pages, which a random table puts in order."""
    lengths = torch.full((case.batch,), case.kv_len, device="cuda", dtype=torch.int32)
    attentions = {name: flexgen.compile(*case.mods(), options) for name, options in variants.items()}
    calls: dict[str, Call] = {}
    for page_size in page_sizes:
        table, kept = _page_table(case, page_size), {}

        def call(
            tensors: Tensors, attention: Any, table: torch.Tensor = table, kept: dict = kept, size: int = page_size
        ):
            if id(tensors) not in kept:  # brought to [n_pages, Hkv, page_size, D] once
                kept[id(tensors)] = [_in_pages(tensor, table, size) for tensor in tensors[1:]]
            return attention(tensors[0], *kept[id(tensors)], kv_lengths=lengths, page_table=table)

        for name, attention in attentions.items():
            calls[f"pages of {page_size}{' ' if name else ''}{name}"] = partial(call, attention=attention)
    return calls


def _page_table(case: Case, page_size: int) -> torch.Tensor:
    pages = case.kv_len // page_size
    return torch.randperm(case.batch * pages, device="cuda").view(case.batch, pages).int()


def _in_pages(tensor: torch.Tensor, table: torch.Tensor, page_size: int) -> torch.Tensor:
    batch, heads, length, head_dim = tensor.shape
    pages = tensor.new_empty(batch * length // page_size, heads, page_size, head_dim)
    pages[table.long()] = tensor.view(batch, heads, length // page_size, page_size, head_dim).transpose(1, 2)
    return pages


def float8_calls(case: Case, options: dict[str, Any]) -> dict[str, Call]:
    """Return a call with keys and values in float8_e4m3fn; its inputs are converted once and kept."""
    attention, kept = flexgen.compile(*case.mods(), options), {}

    def call(tensors: Tensors) -> torch.Tensor:
        if id(tensors) not in kept:
            kept[id(tensors)] = [tensor.to(torch.float8_e4m3fn) for tensor in tensors[1:]]
        return attention(tensors[0], *kept[id(tensors)], k_scale=1.0, v_scale=1.0)

    return {"float8": call}


def peer_calls(case: Case, names: list[str]) -> dict[str, Call]:
    calls: dict[str, Call] = {}
    if "flex" in names:
        score_mod, mask_mod = case.mods()
        mask = create_block_mask(mask_mod, case.batch, None, 1, case.kv_len, "cuda") if mask_mod else None
        compiled = torch.compile(torch_flex, dynamic=False)
        calls["flex"] = lambda tensors: compiled(*tensors, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    if "sdpa" in names and not case.windowed:
        attend = torch.nn.functional.scaled_dot_product_attention
        calls["sdpa"] = lambda tensors: attend(*tensors, enable_gqa=True)
    return calls


def expected(case: Case, tensors: Tensors) -> torch.Tensor:
    """Return the float32 output of the first sequence and of the first query head of each group."""
    query, key, value = tensors
    group = case.q_heads // case.kv_heads
    start = case.kv_len - case.live_keys
    score = query[:1, ::group].float() @ key[:1, :, start:].float().mT / HEAD_DIM**0.5
    if case.windowed:
        score = CAP * torch.tanh(score / CAP)
    return torch.softmax(score, -1) @ value[:1, :, start:].float()


def error_of(call: Call, case: Case, tensors: Tensors) -> float:
    wanted = expected(case, tensors)
    found = call(tensors)[:1, :: case.q_heads // case.kv_heads].float()
    return float((found - wanted).norm() / wanted.norm())


def captured(call: Call, inputs: list[Tensors]) -> Contender:
    """Return a replay of one call over each of the inputs."""
    for tensors in inputs[:2]:
        call(tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call(tensors) for tensors in inputs]

    def replay(kept: object = outputs) -> None:
        graph.replay()

    return replay


def host_microseconds(call: Contender, repeats: int = 20, count: int = 100) -> float:
    """Return the median time of a warm call on the host; the device is idle before each batch of calls."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def host_times(peers: list[str]) -> dict[str, float]:
    """Return microseconds of a call of few keys, by contender: of one split, of several, of pages, and of the peers."""
    case = Case("host", 1, 1024, 32, 8)
    tensors = caches(case)[0]
    calls = flexgen_calls(case, {"flexgen, one split": {"SPLIT_KV": 1}, "flexgen, 4 splits": {"SPLIT_KV": 4}})
    calls |= paged_calls(case, [64], {"": {"SPLIT_KV": 4}}) | peer_calls(case, peers)
    with torch.no_grad():
        for call in calls.values():
            call(tensors)
        return {name: host_microseconds(lambda call=call: call(tensors)) for name, call in calls.items()}


@dataclass(frozen=True, slots=True)
class Contest:
    """What is timed of a case.

    Attributes:
        variants: options by name.
        page_sizes, page_variants: of paged caches, each size with each of the options.
        peers: of torch.
        float8: keys and values in 8 bits too.
    """

    variants: dict[str, dict[str, Any]]
    page_sizes: list[int]
    page_variants: dict[str, dict[str, Any]]
    peers: list[str]
    float8: bool

    def calls(self, case: Case) -> dict[str, Call]:
        calls = flexgen_calls(case, self.variants)
        calls |= paged_calls(case, self.page_sizes if case.name in PAGED else [], self.page_variants)
        calls |= float8_calls(case, {}) if self.float8 else {}
        return calls | peer_calls(case, self.peers)


def run(case: Case, rounds: int, contest: Contest) -> dict[str, Any]:
    torch.compiler.reset()
    inputs, calls = caches(case), contest.calls(case)
    with torch.no_grad():
        errors = {name: error_of(call, case, inputs[0]) for name, call in calls.items()}
        replays = {name: captured(call, inputs) for name, call in calls.items()}
        milliseconds = {name: ms / len(inputs) for name, ms in interleaved(replays, rounds).items()}
    speeds = {name: case.live_bytes / ms / 1e9 for name, ms in milliseconds.items()}
    wrong = sorted(name for name, error in errors.items() if not error < (0.1 if name == "float8" else 0.01))
    return {"case": case.name, "ms": milliseconds, "tb_per_s": speeds, "errors": errors, "wrong": wrong}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| case | contender | ms | TB/s | of sdpa | of flex |", "| --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        peers = [row["ms"].get(name) for name in ("sdpa", "flex")]
        for name, ms in row["ms"].items():
            ratios = " | ".join(f"{peer / ms:.2f}" if peer else "" for peer in peers)
            wrong = " WRONG" if name in row["wrong"] else ""
            lines.append(f"| {row['case']} | {name}{wrong} | {ms:.4f} | {row['tb_per_s'][name]:.2f} | {ratios} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """Return the results as a page."""
    about = results["environment"]
    versions = ", ".join(f"{name} {about[name]}" for name in ("flexgen", "torch", "triton", "python"))
    host = "\n".join(f"| {name} | {microseconds:.1f} |" for name, microseconds in results["host_us"].items())
    return (
        f"# Decode\n\n{about['device']}, bf16, head dim {HEAD_DIM}, one query a sequence.\n"
        f"{versions}, {about['date']}.\n"
        f"Medians of interleaved rounds in one process: `{about['command']}`. Times are of the device, in CUDA graphs\n"
        "over several caches; TB/s count the live keys and values once, as bf16. Outputs checked against float32\n"
        "first.\n\n"
        f"{table(results['rows'])}\n\nHost time of a warm call:\n\n| contender | us |\n| --- | ---: |\n{host}\n"
    )


def grid_variants(text: str) -> dict[str, dict[str, Any]]:
    """Return one variant for each combination in a text such as "BLOCK_N=64,128 num_stages=2,3"."""
    axes = [(name, [int(value) for value in values.split(",")]) for name, _, values in map(_split, text.split())]
    names = [name for name, _ in axes]
    products = itertools.product(*(values for _, values in axes))
    return {
        " ".join(f"{name}={value}" for name, value in zip(names, chosen, strict=True)): dict(
            zip(names, chosen, strict=True)
        )
        for chosen in products
        if chosen
    }


def _split(part: str) -> tuple[str, str, str]:
    return part.partition("=")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", default="{}", help="JSON: name -> options, timed beside the defaults")
    parser.add_argument("--grid", default="", help='variants of all combinations: "BLOCK_N=64,128 SPLIT_KV=4,8"')
    parser.add_argument("--page-size", nargs="*", type=int, default=[16, 32, 64, 128], help=f"of {', '.join(PAGED)}")
    parser.add_argument("--page-variants", default="{}", help="JSON: name -> options, timed with each page size")
    parser.add_argument("--no-float8", dest="float8", action="store_false", help="leave out float8 keys and values")
    parser.add_argument("--peers", nargs="*", default=["flex", "sdpa"], help="time these beside flexgen")
    parser.add_argument("--no-host", dest="host", action="store_false", help="leave out the host's time of a call")
    parser.add_argument("--out", type=Path, help="JSON; a page with the suffix .md is written beside it")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark times a GPU, and there is no CUDA device")
    variants = {"flexgen": {}, **json.loads(args.variants), **grid_variants(args.grid)}
    page_variants = {"": {}, **json.loads(args.page_variants)}
    contest = Contest(variants, args.page_size, page_variants, args.peers, args.float8)
    results: dict[str, Any] = {"environment": environment("decode"), "host_us": {}, "rows": []}
    for case in CASES:
        if case.name not in args.case:
            continue
        results["rows"].append(run(case, args.rounds, contest))
        print(table(results["rows"][-1:]), flush=True)
        torch.cuda.empty_cache()
    results["host_us"] = host_times(args.peers) if args.host else {}
    print(report(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
        args.out.with_suffix(".md").write_text(report(results))


if __name__ == "__main__":
    main()

"""Compile two attention variants: print each decision, write the kernels, run them, check them, and time them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import document_mask
import flexgen
import sliding_window
import softcap

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TOLERANCE = 1e-4  # float32 throughout, against float64
TIMED_SHAPE = (4, 16, 8192, 128)  # B, H, L, D


@dataclass(frozen=True)
class Job:
    """One attention variant, its mods made for a sequence length."""

    name: str
    score_mod: Callable[..., torch.Tensor] | None
    mask_mod: Callable[[int], Callable[..., torch.Tensor]]


def documents(length: int) -> Callable[..., torch.Tensor]:
    """Pack the example's documents until `length` tokens are full."""
    lengths = document_mask.LENGTHS * (length // sum(document_mask.LENGTHS))
    rest = length - sum(lengths)
    return document_mask.packed([*lengths, rest] if rest else lengths)


JOBS = (
    Job("sliding_window", None, lambda length: sliding_window.mask_mod),
    Job("softcapped_documents", softcap.score_mod, documents),
)


def dense(query, key, value, score_mod, mask_mod):
    """Attention as its definition says, in float64 and with the whole matrix of scores."""
    query, key, value = query.double(), key.double(), value.double()
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    indices = torch.meshgrid(*(torch.arange(size, device=DEVICE) for size in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    return scores.masked_fill(~mask_mod(*indices), -torch.inf).softmax(-1) @ value


def dump(job: Job, lowered, folder: Path | None) -> None:
    """Print the decisions, and write each kernel under `folder`, or print it where there is none."""
    print(lowered.explain())
    for entry, source in lowered.source.items():
        if folder is None:
            print(source)
            continue
        path = folder / job.name / f"{entry}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        print(f"wrote {path}")


def check(job: Job, folder: Path | None) -> bool:
    """Compile for a small case, show what was decided, run it and compare; return whether it agrees."""
    batch, heads, _, length, _, head_dim, _ = document_mask.SHAPE
    query, key, value = torch.randn(3, batch, heads, length, head_dim, device=DEVICE)
    mask_mod = job.mask_mod(length)
    attention = flexgen.compile(job.score_mod, mask_mod)
    dump(job, attention.lower(query, key, value, target=None if ON_GPU else "sm_90"), folder)
    expected = dense(query, key, value, job.score_mod, mask_mod)
    error = (attention(query, key, value) - expected).abs().max().item()
    agrees = error <= TOLERANCE
    print(f"{'pass' if agrees else 'FAIL'}: largest difference from float64 {error:.1e}, allowed {TOLERANCE:.0e}\n")
    return agrees


def time_beside_torch(job: Job) -> None:
    """Time the forward pass in bfloat16 beside torch.compile(flex_attention)."""
    from triton.testing import do_bench

    length = TIMED_SHAPE[2]
    query, key, value = torch.randn(3, *TIMED_SHAPE, device=DEVICE, dtype=torch.bfloat16)
    mask_mod = job.mask_mod(length)
    ours = flexgen.compile(job.score_mod, mask_mod)
    theirs = torch.compile(flex_attention)
    block_mask = create_block_mask(mask_mod, None, None, length, length, DEVICE)
    ours_ms = do_bench(lambda: ours(query, key, value))
    theirs_ms = do_bench(lambda: theirs(query, key, value, score_mod=job.score_mod, block_mask=block_mask))
    print(f"{job.name} {TIMED_SHAPE} bfloat16: flexgen {ours_ms:.3f} ms, torch.compile {theirs_ms:.3f} ms\n")


def parse_folder() -> Path | None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dump-code",
        metavar="DIR",
        nargs="?",
        default="demo_out",
        help="where to write the kernels (default: demo_out); without DIR they are printed",
    )
    folder = parser.parse_args().dump_code
    return None if folder is None else Path(folder)


def main() -> int:
    folder = parse_folder()
    on_cpu = "the CPU, in Triton's interpreter; the decisions and kernels shown are those for sm_90"
    print(f"running on {torch.cuda.get_device_name() if ON_GPU else on_cpu}\n")
    torch.manual_seed(0)
    results = []
    for job in JOBS:
        print(f"=== {job.name}")
        results.append(check(job, folder))
        if ON_GPU:
            time_beside_torch(job)
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())

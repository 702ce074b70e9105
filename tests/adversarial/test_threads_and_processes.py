"""One Attention called from threads, from forked and spawned processes, and from workers of a DataLoader."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.runtime import kernel as kernels

SECONDS = 240  # after which a run counts as a deadlock


def inputs(length: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, 2, length, 16, generator=generator) for _ in range(3)]


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int) -> torch.Tensor:
    at = torch.arange(query.shape[2])
    live = (at[:, None] >= at) & (at[:, None] - at < window)
    return (query @ key.mT / 4).masked_fill(~live, -torch.inf).softmax(-1) @ value


def test_eight_threads_share_an_attention_and_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    make = kernels.executor
    monkeypatch.setattr(kernels, "executor", lambda source, *rest: built.append(source.key) or make(source, *rest))
    window = 7
    mask = lambda b, h, q, k: (q >= k) & (q - k < window)  # noqa: E731
    together = threading.Barrier(8)
    failures: list[str] = []

    def work(attention: flexgen.Attention, number: int) -> None:
        for turn in range(6):
            query, key, value = inputs((20, 40, 70)[(number + turn) % 3], number)
            query.requires_grad_(number % 2 == 0)
            output = attention(query, key, value)
            error = float((output - dense(query, key, value, 7)).detach().abs().max())
            if query.requires_grad:
                (found,) = torch.autograd.grad(output.square().sum(), query)
                (right,) = torch.autograd.grad(dense(query, key, value, 7).square().sum(), query)
                error = max(error, float((found - right).abs().max()))
            if error > 1e-4:
                failures.append(f"thread {number}, turn {turn}: off by {error}")

    alone = flexgen.compile(None, mask)
    for number in range(8):
        work(alone, number)
    built_alone, shared = Counter(built), flexgen.compile(None, mask)
    built.clear()

    def guarded(number: int) -> None:
        try:
            together.wait()
            work(shared, number)
        except BaseException as error:
            failures.append(f"thread {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    assert failures == []
    assert Counter(built) == built_alone, "a kernel was built twice"


def run(tmp_path: Path, script: str) -> str:
    """Run a script as a program of its own, as these tests' own process has threads; return what it prints."""
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(HEAD) + textwrap.dedent(script))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLEXGEN_CACHE_DIR": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


HEAD = """
    import multiprocessing, os, sys, threading
    import torch
    import flexgen

    window = 7

    def mask_mod(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score - 0.1 * (q_idx - kv_idx)

    def is_right(attention, length):
        query, key, value = torch.randn(3, 1, 2, length, 16).unbind()
        query.requires_grad_()
        at = torch.arange(length)
        gap = at[:, None] - at
        score = (query @ key.mT / 4 - 0.1 * gap).masked_fill((gap < 0) | (gap >= 7), -torch.inf)
        right = score.softmax(-1) @ value
        output = attention(query, key, value)
        grads = [torch.autograd.grad(it.square().sum(), query)[0] for it in (output, right)]
        return torch.allclose(output, right, atol=1e-4) and torch.allclose(*grads, atol=1e-4)
"""


def test_a_fork_goes_on_with_what_its_parent_made(tmp_path: Path) -> None:
    script = """
        attention = flexgen.compile(score_mod, mask_mod)
        assert is_right(attention, 20)
        enough = threading.Event()
        busy = threading.Thread(target=lambda: [enough.is_set() or is_right(attention, n) for n in range(20, 200)])
        busy.start()  # holds locks now and then
        children = []
        for number in range(4):
            child = os.fork()
            if child == 0:
                good = all(is_right(attention, length) for length in (20, 33 + number, 150))
                os._exit(0 if good else 1)
            children.append(child)
        print([os.waitpid(child, 0)[1] for child in children])
        enough.set()
        busy.join()
    """
    assert run(tmp_path, script).strip() == "[0, 0, 0, 0]"


def test_an_attention_is_pickled_to_spawned_processes(tmp_path: Path) -> None:
    script = """
        if __name__ == "__main__":
            attention = flexgen.compile(score_mod, mask_mod)
            assert is_right(attention, 20)
            with multiprocessing.get_context("spawn").Pool(3) as pool:
                print(pool.starmap(is_right, [(attention, length) for length in (20, 20, 33, 70)]))
    """
    assert run(tmp_path, script).strip() == "[True, True, True, True]"


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_may_call_it(tmp_path: Path, start: str) -> None:
    script = f"""
        class Rows(torch.utils.data.Dataset):
            def __init__(self):
                self.attention = flexgen.compile(score_mod, mask_mod)

            def __len__(self):
                return 8

            def __getitem__(self, at):
                return is_right(self.attention, 17 + 5 * at)

        if __name__ == "__main__":
            rows = Rows()
            assert rows[0]
            loader = torch.utils.data.DataLoader(rows, num_workers=2, multiprocessing_context="{start}")
            print(all(bool(good) for good in loader))
    """
    assert run(tmp_path, script).strip() == "True"

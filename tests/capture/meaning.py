"""The oracle of the capture tests: a captured graph computes what the user's own callable computes on 0-d tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from flexgen.capture.live import LiveMods, Reading
from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph
from flexgen.ir.verify import verify

SHAPE = (2, 3, 5, 7)  # b, h, q, kv


def score_table() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 2


def direct(mod: Callable[..., object], kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Call the user's mod once an element, with 0-d tensors."""
    scores = score_table().to(dtype)
    out = torch.empty(SHAPE, dtype=torch.bool if kind == "mask" else dtype)
    for place in itertools.product(*(range(size) for size in SHAPE)):
        indices = [torch.tensor(i) for i in place]
        value = mod(scores[place].clone(), *indices) if kind == "score" else mod(*indices)
        out[place] = value.to(out.dtype) if isinstance(value, torch.Tensor) else value
    return out


def captured(reading: Reading, graph: Graph) -> torch.Tensor:
    """Evaluate a captured graph over all elements."""
    mods = reading.captured.mods
    buffers = {buffer.name: tensor for buffer, tensor in zip(mods.buffers, reading.buffers, strict=True)}
    scalars = {scalar.name: number for scalar, number in zip(mods.scalars, reading.scalars, strict=True)}
    names = ("b", "h", "q_idx", "kv_idx")
    inputs = {
        name: torch.arange(size).view([-1 if i == j else 1 for j in range(4)])
        for i, (name, size) in enumerate(zip(names, SHAPE, strict=True))
    }
    if graph.kind == "score":
        inputs["score"] = score_table().to(reading.captured.score_dtype)
    return evaluate(graph, inputs, buffers, scalars).expand(SHAPE)


def assert_same_meaning(mod: Callable[..., object], kind: str = "score") -> Reading:
    """Capture the mod, check the graph's rules, and compare it with the mod itself."""
    live = LiveMods(**{f"{kind}_mod": mod})
    reading = live.current()
    verify(reading.captured.mods)
    (graph,) = reading.captured.mods.graphs()
    torch.testing.assert_close(captured(reading, graph), direct(mod, kind), rtol=2e-5, atol=1e-5, equal_nan=True)
    return reading

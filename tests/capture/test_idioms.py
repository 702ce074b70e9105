"""Ways of writing mods that users have: devices, modules, configuration objects, numpy, constants made inside."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flexgen.capture.live import LiveMods
from tests.capture.meaning import assert_same_meaning

TABLE = torch.randn(9, generator=torch.Generator().manual_seed(2))
BYTES = torch.arange(250, 259).to(torch.uint8)
EMBEDDING, LINEAR = torch.nn.Embedding(4, 3), torch.nn.Linear(1, 1)
CONFIG = {"window": 3, "scale": 2.0}
ARRAY = np.array([1.0, 2.0, 3.0])


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    window: int = 3


@functools.lru_cache
def slopes() -> torch.Tensor:
    return torch.tensor([0.5, 0.25, 0.125])


SETTINGS = Settings()

IDIOMS: dict[str, Callable[..., object]] = {
    "new_tensor": lambda s, b, h, q, k: s + s.new_tensor(2.0),
    "constants on the input's device": lambda s, b, h, q, k: (
        s
        + torch.full((), 2.0, device=s.device, dtype=s.dtype)
        + torch.as_tensor(3.0, device=q.device)
        + torch.arange(9, device=q.device)[q]
    ),
    "minus infinity as a tensor": lambda s, b, h, q, k: torch.where(
        q > k, s, torch.tensor(-torch.inf, device=s.device)
    ),
    "moved": lambda s, b, h, q, k: s.cpu() + TABLE.to(s.device)[q] + q.to("cpu", torch.float32),
    "tables like a table": lambda s, b, h, q, k: s + torch.zeros_like(TABLE)[q] + torch.ones_like(TABLE[:4])[h],
    "in-place activation": lambda s, b, h, q, k: F.relu(s, inplace=True).clamp_(0.1),
    "bytes wrap": lambda s, b, h, q, k: s + (BYTES[q] == 255) + (BYTES[k] + 3) + BYTES[q].float(),
    "embedding module": lambda s, b, h, q, k: s + EMBEDDING(h)[2] + EMBEDDING.weight[b, 0],
    "linear module": lambda s, b, h, q, k: LINEAR(s.unsqueeze(0))[0],
    "configuration dict": lambda s, b, h, q, k: s * CONFIG["scale"] + (q - k < CONFIG["window"]),
    "configuration object": lambda s, b, h, q, k: s + SETTINGS.window,
    "numpy numbers": lambda s, b, h, q, k: s * np.pi + np.float32(2.0) + np.int64(3) + float(ARRAY[0]),
    "numpy array": lambda s, b, h, q, k: s + torch.from_numpy(ARRAY)[h],
    "cached table": lambda s, b, h, q, k: s + slopes()[h],
    "linspace": lambda s, b, h, q, k: s + torch.linspace(0, 1, 5)[q],
    "narrow integers wrap": lambda s, b, h, q, k: s + q.to(torch.int8) * 100 + (q.to(torch.uint8) - 1),
    "64-bit integers": lambda s, b, h, q, k: s + (q * 2**40 + k) // 2**40,
    "spread": lambda s, b, h, q, k: s + TABLE.norm() + TABLE.var() + TABLE.std(),
    "buckets": lambda s, b, h, q, k: s + torch.bucketize(q - k, torch.tensor([-2, 0, 3])),
    "buckets from the right": lambda s, b, h, q, k: s + torch.searchsorted(torch.tensor([1, 3, 5]), q, right=True),
    "one hot": lambda s, b, h, q, k: s + (F.one_hot(h, 3) * TABLE[:3]).sum() + torch.isin(q, torch.tensor([1, 3])),
    "outer product": lambda s, b, h, q, k: s + torch.outer(TABLE[:3], TABLE[:4])[h, b],
    "detached constants": lambda s, b, h, q, k: s + TABLE.data[q] + TABLE.detach()[k],
}


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_means_what_torch_means(name: str) -> None:
    assert_same_meaning(IDIOMS[name])


def test_number_in_a_slotted_object_becomes_a_run_time_scalar() -> None:
    settings = Settings(3)
    mods = LiveMods(lambda s, b, h, q, k: s + settings.window)
    mods.current()
    settings = Settings(5)
    assert mods.current().scalars == (5,)


def test_condition_on_a_captured_bool_or_none_is_python() -> None:
    bias, causal = None, True

    def mod(b, h, q_idx, kv_idx):
        if bias is not None:
            return bias[q_idx]
        return q_idx >= kv_idx if causal and not False else q_idx > kv_idx

    assert_same_meaning(mod, "mask")

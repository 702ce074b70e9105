"""torch's own recipe for paged caches, torch.nn.attention.experimental, through the drop-in flex_attention."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import create_block_mask

import flexgen
from flexgen import attention as attention_module
from tests.reference import dense_attention

BATCH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 2, 16
PAGE_SIZE, PAGES, LONGEST = 16, 20, 96


def softcap(score, b, h, q_idx, kv_idx):
    return 5.0 * torch.tanh(score / 5.0) - 0.01 * kv_idx


@dataclass(frozen=True, slots=True)
class Cache:
    """Keys and values as torch's recipe keeps them, [1, Hkv, pages * page_size, D], and one after the other."""

    paged: PagedAttention
    keys: Tensor
    values: Tensor
    flat_keys: Tensor
    flat_values: Tensor

    def write(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store [B, Hkv, S, D] at positions [B, S]."""
        self.paged.assign(torch.arange(BATCH, device=keys.device), positions, keys, values, self.keys, self.values)
        at = positions[:, None, :, None].expand(-1, KV_HEADS, -1, HEAD_DIM)
        self.flat_keys.scatter_(2, at, keys)
        self.flat_values.scatter_(2, at, values)


@pytest.fixture
def cache(device) -> Cache:
    """A cache whose pages are handed out in turns, so that no sequence has two pages next to each other."""
    torch.manual_seed(0)
    paged = PagedAttention(PAGES, PAGE_SIZE, BATCH, device=str(device))
    for length in range(PAGE_SIZE, LONGEST + 1, PAGE_SIZE):
        for row in range(BATCH):
            paged.reserve(torch.tensor([row], device=device), torch.tensor([length], device=device))
    keys, values = torch.full((2, 1, KV_HEADS, PAGES * PAGE_SIZE, HEAD_DIM), 7.0, device=device)
    return Cache(paged, keys, values, *torch.zeros(2, BATCH, KV_HEADS, LONGEST, HEAD_DIM, device=device))


@pytest.fixture
def emitted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The forward kernels that are emitted."""
    found: list[object] = []
    compile_forward = attention_module.compile_forward
    monkeypatch.setattr(attention_module, "compile_forward", lambda *args: found.append(args) or compile_forward(*args))
    return found


def drawn(length: int, device) -> tuple[Tensor, Tensor, Tensor]:
    sizes = [(BATCH, heads, length, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    query, key, value = (torch.randn(size, device=device) for size in sizes)
    return query, key, value


def attend(
    cache: Cache, query: Tensor, mask_mod, lengths: Tensor, block: int, attention=flexgen.flex_attention
) -> Tensor:
    """Attend as the recipe says: a block mask of logical positions, converted to those of pages."""
    rows = query.shape[2]
    logical = create_block_mask(
        mask_mod, BATCH, None, rows, LONGEST, device=str(query.device), BLOCK_SIZE=(block, PAGE_SIZE)
    )
    converted = cache.paged.convert_logical_block_mask(logical, kv_len=lengths)
    score_mod = cache.paged.get_score_mod(softcap, kv_len=lengths)
    return attention(query, cache.keys, cache.values, score_mod=score_mod, block_mask=converted, enable_gqa=True)


def check(cache: Cache, query: Tensor, mask_mod, lengths: Tensor, block: int, **given) -> None:
    def live(b, h, q_idx, kv_idx):
        return (kv_idx < lengths[b]) & mask_mod(b, h, q_idx, kv_idx)

    output = attend(cache, query, mask_mod, lengths, block, **given)
    expected = dense_attention(query, cache.flat_keys, cache.flat_values, softcap, live).out
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)


def test_prefill_and_decode_steps_emit_a_kernel_each(cache, device, emitted):
    prompts = torch.tensor([40, 25], device=device)
    query, key, value = drawn(40, device)
    cache.write(torch.arange(40, device=device).expand(BATCH, -1), key, value)
    check(cache, query, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, prompts, 64)
    assert len(emitted) == 1
    for step in range(12):  # past the end of a page of each
        position = prompts + step

        def up_to_now(b, h, q_idx, kv_idx, position=position):
            return kv_idx <= position[b]

        query, key, value = drawn(1, device)
        cache.write(position[:, None], key, value)
        check(cache, query, up_to_now, position + 1, 1)
    assert len(emitted) == 2, "each step's mods are fresh closures of the same code"


def test_compiled_steps_share_a_graph(cache, device):
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flexgen.flex_attention, backend=graphs, fullgraph=True)
    _, key, value = drawn(40, device)
    cache.write(torch.arange(40, device=device).expand(BATCH, -1), key, value)
    for step in range(4):
        position = torch.tensor([35, 20], device=device) + step

        def up_to_now(b, h, q_idx, kv_idx, position=position):
            return kv_idx <= position[b]

        with torch.no_grad():
            check(cache, drawn(1, device)[0], up_to_now, position + 1, 1, attention=compiled)
    assert graphs.frame_count == 1


def test_pages_that_were_freed_belong_to_another_sequence(cache, device):
    query, key, value = drawn(LONGEST, device)
    everywhere = torch.arange(LONGEST, device=device).expand(BATCH, -1)
    lengths = torch.tensor([LONGEST, LONGEST], device=device)
    cache.write(everywhere, key, value)
    first = torch.tensor([0], device=device)
    cache.paged.erase(first)
    cache.paged.physical_to_logical[0] = -1  # which erase of torch 2.13 leaves as it was
    cache.paged.empty_pages.sort()
    cache.paged.reserve(first, torch.tensor([LONGEST], device=device))
    cache.write(everywhere, key.flip(0), value.flip(0))
    check(cache, query, lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, lengths, 32)


def test_fresh_closures_over_numbers_share_a_kernel(device, emitted):
    """The drop-in sees new functions at each step; their number becomes an argument of one kernel."""

    def biased(offset: int, bias: Tensor):
        return lambda score, b, h, q_idx, kv_idx: score + bias[h] * (kv_idx - offset)

    for step in range(8):
        bias = torch.randn(HEADS, device=device)
        query, key, value = drawn(1, device)
        output = flexgen.flex_attention(query, key, value, biased(step, bias), enable_gqa=True)
        expected = dense_attention(query, key, value, biased(step, bias)).out
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    assert len(emitted) == 2

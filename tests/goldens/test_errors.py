"""What each class of errors says: one golden a class, as a user would read it."""

from __future__ import annotations

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

import flexgen
from flexgen import errors
from flexgen.errors import FlexgenError
from flexgen.ir.graph import Graph, make
from flexgen.ir.parse import parse_graph
from flexgen.ir.verify import verify
from flexgen.runtime.build import out_of_resources
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.interpret import interpret
from flexgen.runtime.load import load_module


def tensors(heads: int = 2, kv_heads: int = 2, length: int = 20) -> list[Tensor]:
    return [torch.zeros(1, count, length, 16) for count in (heads, kv_heads, kv_heads)]


def branches() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if q_idx >= kv_idx:
            return kv_idx >= 0
        return kv_idx < 0

    flexgen.compile(mask_mod=mask_mod)(*tensors())


def uses_what_is_not_compiled() -> None:
    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.atan(score) + torch.lgamma(score)

    flexgen.compile(score_mod)(*tensors())


def misspells_an_option() -> None:
    flexgen.compile(options={"BLOCK_MM": 64})


def shares_heads_unevenly() -> None:
    flexgen.compile()(*tensors(heads=3))


def mixes_dtypes() -> None:
    query, key, value = tensors()
    flexgen.compile()(query, key.half(), value)


def pickles_a_local_function() -> None:
    pickle.dumps(flexgen.compile(lambda score, b, h, q_idx, kv_idx: score))


def forces_a_tile_that_does_not_fit() -> None:
    meta = [torch.empty(1, 1, 1024, 128, dtype=torch.bfloat16, device="meta") for _ in range(3)]
    flexgen.compile(options={"BLOCK_M": 128, "BLOCK_N": 256, "num_stages": 8}).lower(*meta, target="sm_80")


def needs_more_than_the_device_has() -> None:
    raise out_of_resources("forward", OutOfResources(245_760, 232_448, "shared memory"), num_warps=8, num_stages=3)


def runs_what_is_no_kernel() -> None:
    head = "import triton\nimport triton.language as tl\n\n\n"
    text = f"{head}@triton.jit\ndef broken(x_ptr):\n    tl.store(x_ptr, missing)\n"
    source = SourceCache(None).keep("0123456789abcdef", text)
    interpret(load_module(source), "broken", (1, 1, 1), [torch.zeros(4)])


def follows_a_page_that_is_none() -> None:
    query, pages = torch.zeros(1, 2, 1, 16), torch.zeros(3, 2, 16, 16)
    table, lengths = torch.tensor([[5]], dtype=torch.int32), torch.tensor([9], dtype=torch.int32)
    flexgen.compile()(query, pages, pages, kv_lengths=lengths, page_table=table)


def reads_a_text_of_nothing() -> None:
    parse_graph("mask m(b, h, q_idx, kv_idx)\n  x = ge(q_idx, nothing)   bool  {q}\n  return x\n")


def breaks_the_ir() -> None:
    query, key = (make("input", attr=name, dtype=torch.int64) for name in ("q_idx", "kv_idx"))
    verify(Graph("mask", "causal", make("add", query, key, dtype=torch.int32)))


CASES: dict[str, Callable[[], None]] = {
    "CaptureError": branches,
    "UnsupportedOpError": uses_what_is_not_compiled,
    "OptionError": misspells_an_option,
    "UnsupportedProblemError": shares_heads_unevenly,
    "ProblemTypeError": mixes_dtypes,
    "ModPicklingError": pickles_a_local_function,
    "NoFeasiblePlanError": forces_a_tile_that_does_not_fit,
    "OutOfResourcesError": needs_more_than_the_device_has,
    "KernelCompileError": runs_what_is_no_kernel,
    "KernelMemoryError": follows_a_page_that_is_none,
    "IRTextError": reads_a_text_of_nothing,
    "InternalError": breaks_the_ir,
}


@pytest.mark.parametrize("name", CASES)
def test_message(name: str, golden: Callable[[str, str], None]) -> None:
    with pytest.raises(FlexgenError) as caught:
        CASES[name]()
    assert type(caught.value).__name__ == name
    told = re.sub(rf"{re.escape(__file__)}:\d+", "mods.py:LINE", str(caught.value))
    told = re.sub(r"/\S+/[0-9a-f]{16,}\.py:\d+", "CACHE/KERNEL.py:LINE", told)
    golden(f"errors/{name}.txt", told + "\n")


@pytest.mark.parametrize("name", CASES)
def test_an_error_of_another_process_says_the_same(name: str) -> None:
    with pytest.raises(FlexgenError) as caught:
        CASES[name]()
    there = pickle.loads(pickle.dumps(caught.value))
    assert type(there) is type(caught.value) and str(there) == str(caught.value)
    assert vars(there).keys() == vars(caught.value).keys()


def test_every_class_has_a_message() -> None:
    classes = [it for _, it in inspect.getmembers(errors, inspect.isclass) if issubclass(it, FlexgenError)]
    assert {it.__name__ for it in classes} - {"FlexgenError"} == set(CASES)

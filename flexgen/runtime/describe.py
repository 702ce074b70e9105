"""Turns the tensors of a call into what is static about it (`Problem`) and what only the run knows (`Launch`)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flexgen.errors import ProblemTypeError, UnsupportedProblemError
from flexgen.ir.sizes import size_name
from flexgen.lowering.host_value import all_hold
from flexgen.lowering.proofs import Proof
from flexgen.options import Layout
from flexgen.problem import DIVISOR, GRID_LIMIT, INDEX_LIMIT, SIZE_LIMIT, Guard, Problem, TableForm, bucket
from flexgen.runtime.dropout import Dropout

STORED = (torch.float8_e4m3fn, torch.float8_e5m2)  # of keys and values beside a half-precision query
HALF = (torch.float16, torch.bfloat16)
LARGEST_SCALE = 2.3e38  # float32's largest number over log2(e), rounded down
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INT32_END = 1 << 31
TRUSTED_SCALAR = 1 << 48  # bounds of masks are derived for captured numbers below this


@dataclass(frozen=True, slots=True)
class Launch:
    """What only the run knows.

    Attributes:
        batch, q_heads, kv_heads, q_len, kv_len: sizes; of packed sequences, of the tensors that hold them all.
        q_offset, kv_offset: logical index of the first query and key.
        tensors: query, key, value in [B, H, L, D] order (views of the caller's tensors).
        table: the block table's lists, by name, if the call brings one.
        buffers, scalars: captured values by name.
        sides: what the call brings besides query, key and value, by name: kv_lengths, page_table, k_scale, v_scale.
        scale: the softmax scale.
        splits: how many programs share the keys of a row.
        dropout: which softmax weights are dropped; None for none.
        cu_seqlens: where packed sequences begin, int32 or int64 [sequences + 1] each, by name; empty where none are.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    tensors: Mapping[str, torch.Tensor]
    scale: float
    q_offset: int = 0
    kv_offset: int = 0
    table: Mapping[str, torch.Tensor] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    sides: Mapping[str, torch.Tensor | float] = field(default_factory=dict)
    splits: int = 1
    dropout: Dropout | None = None
    cu_seqlens: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sequences(self) -> int:
        """How many sequences are packed along the length."""
        return self.cu_seqlens["cu_seqlens_q"].shape[0] - 1 if self.cu_seqlens else self.batch

    @property
    def device(self) -> torch.device:
        return self.tensors["query"].device

    @property
    def page_size(self) -> int:
        """Keys of a page; 0 where they do not lie in pages."""
        return self.tensors["key"].shape[2] if "page_table" in self.sides else 0

    def side_tensor(self, name: str) -> torch.Tensor:
        """Return one of the sides that is a tensor."""
        side = self.sides[name]
        assert isinstance(side, torch.Tensor)
        return side


def check_tensors(query: Any, key: Any, value: Any, layout: Layout, *, paged: bool = False) -> None:
    """Refuse tensors that do not form an attention problem.

    Args:
        paged: key and value are pages of keys, whose first dimension is no batch.

    Raises:
        ProblemTypeError: not tensors, or dtypes that do not go together.
        UnsupportedProblemError: ranks, shapes or devices that do not fit.
    """
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, torch.Tensor):
            raise ProblemTypeError(f"{name} is {type(tensor).__name__}, not a tensor", fix="pass torch tensors")
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise ProblemTypeError(
                f"{name} is a {kind} tensor",
                why="kernels read tensors by address and strides",
                fix="pass a dense tensor, for example with .to_dense() or torch.nested.to_padded_tensor",
            )
        if tensor.dim() != 4:
            order = "[B, H, L, D]" if layout == "bhsd" else "[B, L, H, D]"
            raise UnsupportedProblemError(
                f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}",
                why=f"layout {layout!r} takes tensors of shape {order}",
                fix="add or remove dimensions with unsqueeze or reshape",
            )
    _check_dtypes(named)
    _check_devices(named)
    _check_shapes(query, key, value, layout, paged=paged)


def _check_dtypes(named: Mapping[str, torch.Tensor]) -> None:
    dtypes = {name: tensor.dtype for name, tensor in named.items()}
    listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
    if dtypes["key"] in STORED and dtypes["value"] in STORED and dtypes["query"] not in STORED:
        if dtypes["query"] not in HALF:
            raise ProblemTypeError(
                f"keys and values of 8 bits go with a float16 or bfloat16 query: {listed}",
                why="they are converted to the query's dtype, in which half precision is exact",
                fix="convert the query with .to(torch.bfloat16)",
            )
        return
    if len(set(dtypes.values())) > 1:
        raise ProblemTypeError(
            f"query, key and value have different dtypes: {listed}",
            why="flexgen multiplies in one dtype and converts nothing silently",
            fix=f"convert them to one dtype, for example with .to({dtypes['query']})",
        )
    if dtypes["query"] not in DTYPES:
        raise ProblemTypeError(
            f"attention over {dtypes['query']} is not supported: {listed}",
            why="scores are computed from floating-point queries and keys",
            fix=f"use one of {', '.join(str(dtype) for dtype in DTYPES)}",
        )


def _check_devices(named: Mapping[str, torch.Tensor]) -> None:
    devices = {name: tensor.device for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UnsupportedProblemError(
            f"query, key and value are on different devices: {listed}", fix="move them to one device"
        )


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, *, paged: bool) -> None:
    heads, length = (1, 2) if layout == "bhsd" else (2, 1)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}, layout {layout!r}"

    def refuse(what: str, fix: str) -> UnsupportedProblemError:
        return UnsupportedProblemError(f"{what}: {shapes}", fix=fix)

    if surely(key.shape[3] != query.shape[3]):
        raise refuse("query and key have different head dims", "project them to one head dim")
    outer, inner = ("numbers of pages", "page sizes") if paged else ("batch sizes", "lengths")
    for dim, name in ((0, outer), (heads, "head counts"), (length, inner)):
        if surely(key.shape[dim] != value.shape[dim]):
            raise refuse(f"key and value have different {name}", "make key and value describe the same keys")
    if not paged and surely(key.shape[0] != 1) and surely(key.shape[0] != query.shape[0]):
        raise refuse(
            f"key has batch size {key.shape[0]}, query {query.shape[0]}", "give key the query's batch size, or 1"
        )
    q_heads, kv_heads = query.shape[heads], key.shape[heads]
    if q_heads and (kv_heads == 0 or q_heads % kv_heads):
        raise refuse(
            f"{q_heads} query heads cannot be shared by {kv_heads} key heads",
            "make the number of query heads a multiple of the number of key heads",
        )


def surely(condition: Any) -> bool:
    """Whether a condition over sizes or strides holds; False where torch.compile knows too little about them."""
    if isinstance(condition, bool):
        return condition
    return bool(torch.fx.experimental.symbolic_shapes.guard_or_false(condition))  # an import would load sympy


def softmax_scale(scale: Any, head_dim: int) -> float:
    """Return the scale as a float; 1/sqrt(head_dim) by default.

    Raises:
        UnsupportedProblemError: not a finite number, or one that float32 cannot hold in base 2.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real | int | float):
        raise ProblemTypeError(
            f"scale={scale!r} is {type(scale).__name__}, not a number",
            fix="pass a float; a learned scale belongs into score_mod, where it gets a gradient",
        )
    limits = torch.finfo(torch.float32)
    try:
        number = float(scale)
    except OverflowError:
        number = math.inf
    if not -limits.max <= number <= limits.max:
        raise UnsupportedProblemError(
            f"scale={scale!r} is not a finite float32 number",
            why="scores are computed in float32",
            fix="pass a finite scale, such as 0.125",
        )
    if abs(number) > LARGEST_SCALE:
        raise UnsupportedProblemError(
            f"scale={scale!r} is too large",
            why="exponentials are computed in base 2, and the scale times log2(e) passes float32's largest number",
            fix=f"pass one of at most {LARGEST_SCALE:.3g}",
        )
    return number if abs(number) >= limits.tiny else 0.0


def to_bhsd(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a view in [B, H, L, D] order."""
    return tensor if layout == "bhsd" else tensor.transpose(1, 2)


def describe_problem(
    launch: Launch,
    *,
    constant_scale: bool,
    table: TableForm | None,
    output_logsumexp: bool,
    output_max: bool,
    has_offsets: bool,
) -> Problem:
    """Return what is static about a launch."""
    query, key, value = (launch.tensors[name] for name in ("query", "key", "value"))
    return Problem(
        query_dtype=query.dtype,
        key_dtype=key.dtype,
        value_dtype=value.dtype,
        qk_head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        group=launch.q_heads // launch.kv_heads if launch.kv_heads else 1,
        unit_stride=frozenset(name for name, t in launch.tensors.items() if t.stride(3) == 1 or t.shape[3] == 1),
        scale=launch.scale if constant_scale else None,
        table=table,
        output_logsumexp=output_logsumexp,
        output_max=output_max,
        has_offsets=has_offsets,
        lengths_dtype=launch.side_tensor("kv_lengths").dtype if "kv_lengths" in launch.sides else None,
        page_size=launch.page_size,
        k_scale="k_scale" in launch.sides,
        v_scale=_side_kind(launch.sides.get("v_scale")),
        dropout=launch.dropout is not None,
        cu_seqlens=launch.cu_seqlens["cu_seqlens_q"].dtype if launch.cu_seqlens else None,
    )


def _side_kind(side: torch.Tensor | float | None) -> Literal["", "head", "number"]:
    if side is None:
        return ""
    return "head" if isinstance(side, torch.Tensor) else "number"


def describe_guard(launch: Launch, output_span: int, rows_safe: Proof) -> Guard:
    """Return the class of run-time facts that a plan for this launch may rely on.

    Args:
        output_span: one past the largest element offset of the output inside one (batch, head).
    """
    wide = {name for name, tensor in launch.tensors.items() if _row_span(tensor) >= INT32_END}
    wide |= {"output"} if output_span >= INT32_END else set()
    wide |= {name for name, buffer in launch.buffers.items() if is_wide(buffer)}
    wide |= {name for name, number in launch.scalars.items() if isinstance(number, int) and abs(number) > INDEX_LIMIT}
    length = max(launch.q_offset + launch.q_len, launch.kv_offset + launch.kv_len)
    return Guard(
        q_bucket=bucket(launch.q_len),
        kv_bucket=bucket(launch.kv_len),
        q_divisible=launch.q_len % DIVISOR == 0,
        kv_divisible=launch.kv_len % DIVISOR == 0,
        wide=frozenset(wide),
        aligned=frozenset(name for name, tensor in launch.tensors.items() if _is_aligned(tensor)),
        rows_safe_holds=not launch.cu_seqlens and rows_safe.holds and all_hold(rows_safe.assumptions, _numbers(launch)),
        wide_index=length >= INDEX_LIMIT,
        crowded=max(launch.batch, launch.q_heads) > GRID_LIMIT,
    )


def _numbers(launch: Launch) -> dict[str, int | float]:
    """Everything that conditions over a launch may name."""
    ends = (launch.q_offset + launch.q_len, launch.kv_offset + launch.kv_len)
    return condition_names(launch.buffers, launch.scalars, *ends)


def condition_names(
    buffers: Mapping[str, torch.Tensor], scalars: Mapping[str, int | float], q_end: int, kv_end: int
) -> dict[str, int | float]:
    """Return the values of what conditions may name: sizes of captured tensors, captured numbers, lengths."""
    sizes = {size_name(name, dim): size for name, tensor in buffers.items() for dim, size in enumerate(tensor.shape)}
    return {**sizes, **scalars, "Q_LEN": q_end, "KV_LEN": kv_end}


def scalars_are_trusted(scalars: Mapping[str, int | float]) -> bool:
    """Whether captured numbers lie in the range that mask bounds are derived for."""
    return all(abs(number) < TRUSTED_SCALAR for number in scalars.values() if isinstance(number, int))


def _row_span(tensor: torch.Tensor) -> int:
    """Return one past the largest element offset inside one (batch, head)."""
    length, head_dim = tensor.shape[2], tensor.shape[3]
    return max(length - 1, 0) * tensor.stride(2) + max(head_dim - 1, 0) * tensor.stride(3) + 1


def _span(tensor: torch.Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1) + 1


def address(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 for meta and fake tensors, which have none."""
    if tensor.device.type == "meta" or isinstance(tensor, FakeTensor):
        return 0
    return tensor.data_ptr()


def is_wide(buffer: torch.Tensor) -> bool:
    """Whether a captured tensor has sizes or element offsets that need 64 bits."""
    return _span(buffer) >= INT32_END or max(buffer.shape, default=0) >= SIZE_LIMIT


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether the copy engine can address the rows: distinct 16-byte rows on a 16-byte address."""
    strides = (tensor.stride(dim) * tensor.element_size() % 16 for dim in range(3) if tensor.shape[dim] > 1)
    repeats = tensor.stride(2) == 0 and tensor.shape[2] > 1
    return not any(strides) and not repeats and address(tensor) % 16 == 0

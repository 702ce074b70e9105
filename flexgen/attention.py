"""`Attention`: a compiled pair of mods that is called like a function."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.capture.live import LiveMods, Reading
from flexgen.errors import OptionError, ProblemTypeError, UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.targets import DEFAULT_TARGET, Target, target_named
from flexgen.options import BACKWARD_ONLY, KernelOptions, Options
from flexgen.pipeline import ForwardKernel, Understood, compile_forward, understand
from flexgen.problem import Guard, Problem
from flexgen.runtime.autograd import mark_no_backward
from flexgen.runtime.bind import bind
from flexgen.runtime.block_table import BlockTable, check_block_table, read_block_mask
from flexgen.runtime.describe import (
    Launch,
    check_tensors,
    describe_guard,
    describe_problem,
    scalars_are_trusted,
    softmax_scale,
    to_bhsd,
)
from flexgen.runtime.device_target import target_of
from flexgen.runtime.kernel import Kernel, divisible_positions
from flexgen.runtime.lists import check_contiguous, table_lists

CONSTANT_SCALES = 2  # more values than this make the scale a run-time argument


@dataclass(frozen=True, slots=True)
class AuxRequest:
    """Auxiliary outputs to return.

    Attributes:
        lse: natural logarithm of the sum of exponentials of each row's scores, [B, Hq, Lq], float32.
        max_scores: each row's largest score after score_mod, [B, Hq, Lq], float32.
    """

    lse: bool = False
    max_scores: bool = False


@dataclass(frozen=True, slots=True)
class AuxOutput:
    """Auxiliary outputs; None where not asked for. A row without a live key has -inf in both."""

    lse: torch.Tensor | None = None
    max_scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, described: what lowering and launching need."""

    understood: Understood
    reading: Reading
    launch: Launch
    problem: Problem
    guard: Guard
    outputs: Mapping[str, torch.Tensor]


class Attention:
    """Attention with a score_mod and a mask_mod, compiled on first use for each configuration it meets.

    Calls of one Attention may come from several threads. Use `flexgen.compile` to make one.
    """

    def __init__(self, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, options: Options):
        for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if mod is not None and not callable(mod):
                raise ProblemTypeError(f"{name} is {type(mod).__name__}, not a callable", fix="pass a function")
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.options = options
        self._forward_options = _forward_options(options)
        self._mods = LiveMods(score_mod, mask_mod)
        self._understood: OrderedDict[int, Understood] = OrderedDict()
        self._kernels: dict[Hashable, Kernel] = {}
        self._scales: dict[float, None] = {}
        self._lock = threading.RLock()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        return_aux: AuxRequest | None = None,
        *,
        block_table: Any = None,
        validate: bool = False,
    ) -> Any:
        """Compute attention.

        Args:
            query: [B, Hq, Lq, Dqk]; with layout "bshd", [B, Lq, Hq, Dqk]. float16, bfloat16 or float32
                (float64 on CPU); key and value have the same dtype and device.
            key: [B or 1, Hkv, Lk, Dqk]; Hq is a multiple of Hkv.
            value: [B or 1, Hkv, Lk, Dv].
            scale: multiplies the products before score_mod; 1/sqrt(Dqk) by default.
            return_aux: auxiliary outputs to return.
            block_table: a torch BlockMask: only its listed blocks are visited, and mask_mod is applied on partial
                blocks only.
            validate: check the block table's lists; waits for the device.

        Returns:
            [B, Hq, Lq, Dv] in the query's dtype and layout; with return_aux, a pair with an AuxOutput. A row without
            a live key is 0.

        Raises:
            CaptureError: a mod cannot be traced or uses operations that are not compiled.
            UnsupportedProblemError, ProblemTypeError: the tensors do not form an attention problem.
            OptionError: an option cannot be honoured for this problem.
        """
        call = self._describe(query, key, value, scale, return_aux, block_table, validate)
        launch = call.launch
        target = target_of(launch.device)
        self._run(call, target)
        output = to_bhsd(call.outputs["output"], self.options.layout)
        output = mark_no_backward(output, (query, key, value, *call.reading.buffers))
        if return_aux is None:
            return output
        return output, AuxOutput(call.outputs.get("logsumexp"), call.outputs.get("max_scores"))

    def lower(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        return_aux: AuxRequest | None = None,
        *,
        target: str | None = None,
        block_table: Any = None,
    ) -> Lowered:
        """Lower for the given tensors without running; they may be real, meta or fake.

        Args:
            target: a chip such as "sm_90", or "interpret"; by default the tensors' device, and sm_90 without a GPU.
        """
        call = self._describe(query, key, value, scale, return_aux, block_table, False)
        device = call.launch.device
        chip = target_named(target) if target else target_of(device) if device.type == "cuda" else None
        forward = self._compile(call, chip or target_named(DEFAULT_TARGET))
        values = bind(forward.source.args, call.launch, call.outputs)
        return Lowered(call.understood, forward, divisible_positions(forward.source.args, values))

    def _describe(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        return_aux: AuxRequest | None,
        block_table: Any,
        validate: bool,
    ) -> _Call:
        layout = self.options.layout
        check_tensors(query, key, value, layout)
        aux = _aux_request(return_aux)
        query, key, value = (to_bhsd(tensor, layout) for tensor in (query, key, value))
        reading = self._mods.current(torch.float64 if query.dtype == torch.float64 else torch.float32)
        batch, q_heads, q_len, head_dim = query.shape
        table = self._table(block_table, query, key, validate)
        launch = Launch(
            batch=batch,
            q_heads=q_heads,
            kv_heads=key.shape[1],
            q_len=q_len,
            kv_len=key.shape[2],
            tensors={"query": query, "key": _broadcast(key, batch), "value": _broadcast(value, batch)},
            scale=softmax_scale(scale, head_dim),
            table=table_lists(table) if table else {},
            buffers=_named_buffers(reading, query.device),
            scalars=dict(zip((s.name for s in reading.captured.mods.scalars), reading.scalars, strict=True)),
        )
        outputs = _allocate(launch, aux, layout)
        problem = describe_problem(
            launch,
            constant_scale=self._scale_is_constant(launch.scale, scale),
            table=table,
            output_logsumexp=aux.lse,
            output_max=aux.max_scores,
            has_offsets=False,
        )
        understood = self._understand(reading)
        guard = describe_guard(launch, outputs["output"], understood.facts.rows_safe)
        return _Call(understood, reading, launch, problem, guard, outputs)

    def _table(self, block_table: Any, query: torch.Tensor, key: torch.Tensor, validate: bool) -> BlockTable | None:
        if block_table is None:
            return None
        self._check_mask_of(block_table)
        table = read_block_mask(
            block_table,
            batch=query.shape[0],
            query_heads=query.shape[1],
            query_length=query.shape[2],
            key_length=key.shape[2],
            device=query.device if query.device.type != "meta" else None,
        )
        if validate:
            check_block_table(table)
        if self._forward_options.BLOCKS_ARE_CONTIGUOUS:
            check_contiguous(table)
        return table

    def _check_mask_of(self, block_table: Any) -> None:
        theirs = getattr(block_table, "mask_mod", None)
        if self.mask_mod is None and theirs is not None and getattr(theirs, "__name__", "") != "noop_mask":
            raise UnsupportedProblemError(
                "the block mask has a mask_mod, and this attention was compiled without one",
                why="partial blocks would be computed without their mask",
                fix="compile with flexgen.compile(score_mod, block_mask.mask_mod), or call flexgen.flex_attention",
            )

    def _scale_is_constant(self, scale: float, given: float | None) -> bool:
        """The default scale and the first few given ones are constants of the kernel; more become an argument."""
        if given is None or scale in self._scales:
            return True
        if len(self._scales) >= CONSTANT_SCALES:
            return False
        self._scales[scale] = None
        return True

    def _understand(self, reading: Reading) -> Understood:
        key = id(reading.captured)
        found = self._understood.get(key)
        if found is None or found.captured is not reading.captured:
            with self._lock:
                found = self._understood[key] = understand(reading.captured)
        return found

    def _compile(self, call: _Call, target: Target) -> ForwardKernel:
        trusted = scalars_are_trusted(call.launch.scalars)
        return compile_forward(call.understood, call.problem, call.guard, target, self._forward_options, trusted)

    def _run(self, call: _Call, target: Target) -> None:
        captured, trusted = call.reading.captured, scalars_are_trusted(call.launch.scalars)
        key = (id(captured), call.problem, call.guard, target.name, trusted)
        kernel = self._kernels.get(key)
        if kernel is None or kernel.owner is not captured:
            with self._lock:
                forward = self._compile(call, target)
                kernel = self._kernels[key] = Kernel(forward.source, forward.plan, captured)
        kernel.run(call.launch, call.outputs)


def _forward_options(options: Options) -> KernelOptions:
    given = options.forward().given()
    backward = sorted(BACKWARD_ONLY & given.keys()) or sorted(options.bwd.given())
    if backward:
        raise OptionError(
            f"{', '.join(backward)}: options of backward kernels",
            why="this version of flexgen compiles forward kernels only, and ignores no option",
            fix="drop them",
        )
    return options.forward()


def _aux_request(return_aux: Any) -> AuxRequest:
    if return_aux is None:
        return AuxRequest()
    if not hasattr(return_aux, "lse") or not hasattr(return_aux, "max_scores"):
        raise ProblemTypeError(
            f"return_aux is {type(return_aux).__name__}, not an AuxRequest",
            fix="pass flexgen.AuxRequest(lse=True, max_scores=True)",
        )
    return AuxRequest(bool(return_aux.lse), bool(return_aux.max_scores))


def _broadcast(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    return tensor if tensor.shape[0] == batch else tensor.expand(batch, -1, -1, -1)


def _named_buffers(reading: Reading, device: torch.device) -> dict[str, torch.Tensor]:
    named = dict(zip((b.name for b in reading.captured.mods.buffers), reading.buffers, strict=True))
    return {name: _on_device(name, buffer, device) for name, buffer in named.items()}


def _on_device(name: str, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    if buffer.device == device or device.type == "meta":
        return buffer
    if buffer.dim() == 0 and buffer.device.type == "cpu":  # as torch: a CPU scalar goes with tensors of any device
        return buffer.to(device)
    raise UnsupportedProblemError(
        f"the captured tensor {name} is on {buffer.device}, query on {device}",
        why="a kernel reads captured tensors directly",
        fix=f"move {name} to {device} before calling",
    )


def _allocate(launch: Launch, aux: AuxRequest, layout: str) -> dict[str, torch.Tensor]:
    """Allocate the outputs: `output` in [B, H, L, D] order over memory in the caller's layout."""
    query, value = launch.tensors["query"], launch.tensors["value"]
    b, h, s, d = launch.batch, launch.q_heads, launch.q_len, value.shape[3]
    rows = query.stride()[:3]
    heads_inside = layout == "bshd" or (h > 1 and s > 1 and rows[1] < rows[2])
    output = query.new_empty((b, s, h, d)).transpose(1, 2) if heads_inside else query.new_empty((b, h, s, d))
    outputs = {"output": output}
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if aux.lse:
        outputs["logsumexp"] = query.new_empty((b, h, s), dtype=dtype)
    if aux.max_scores:
        outputs["max_scores"] = query.new_empty((b, h, s), dtype=dtype)
    return outputs

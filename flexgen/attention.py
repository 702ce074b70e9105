"""`Attention`: a compiled pair of mods that is called like a function."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from flexgen.aux_outputs import AuxOutput, AuxRequest, read_aux_request
from flexgen.capture.live import LiveMods, Reading
from flexgen.errors import OptionError, ProblemTypeError, UnsupportedProblemError
from flexgen.lowered import Lowered
from flexgen.lowering.targets import DEFAULT_TARGET, Target, target_named
from flexgen.options import BACKWARD_ONLY, KernelOptions, Options
from flexgen.pipeline import ForwardKernel, Understood, compile_forward, understand
from flexgen.problem import INDEX_LIMIT, Guard, Problem
from flexgen.runtime.autograd import mark_no_backward
from flexgen.runtime.bind import bind
from flexgen.runtime.block_table import BlockTable, check_block_table, read_block_mask
from flexgen.runtime.describe import (
    TRUSTED_SCALAR,
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
from flexgen.runtime.lists import check_contiguous, table_form, table_lists
from flexgen.runtime.outputs import OutputForm, output_form
from flexgen.runtime.prepared import Prepared, tensor_form

CONSTANT_SCALES = 2  # more values than this make the scale a run-time argument
MAX_PREPARED = 1024  # forms of call kept; the least recently made go first


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, described: what lowering and launching need."""

    understood: Understood
    launch: Launch
    problem: Problem
    guard: Guard
    outputs: OutputForm


class Attention:
    """Attention with a score_mod and a mask_mod, compiled on first use for each configuration it meets.

    Calls of one Attention may come from several threads. Use `flexgen.compile` to make one.
    """

    def __init__(
        self, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, options: Options
    ) -> None:
        for name, mod in (("score_mod", score_mod), ("mask_mod", mask_mod)):
            if mod is not None and not callable(mod):
                raise ProblemTypeError(f"{name} is {type(mod).__name__}, not a callable", fix="pass a function")
        self.score_mod = score_mod
        self.mask_mod = mask_mod
        self.options = options
        self._forward_options = _forward_options(options)
        self._mods = LiveMods(score_mod, mask_mod)
        self._understood: dict[int, Understood] = {}
        self._kernels: dict[Hashable, Kernel] = {}
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._scales: dict[float, None] = {}
        self._lock = threading.RLock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the callables and options alone."""
        return Attention, (self.score_mod, self.mask_mod, self.options)

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
        aux = read_aux_request(return_aux)
        reading = self._read(query, key, value)
        form = self._form(reading, query, key, value, scale, aux, block_table)
        prepared = None if validate else self._prepared.get(form)
        if prepared is None:
            call = self._describe(reading, query, key, value, scale, aux, block_table, validate)
            prepared = self._prepare(form, call, block_table)
            buffers: Any = tuple(call.launch.buffers.values())
        else:
            buffers = reading.buffers
        outputs = prepared.run(query, key, value, buffers, reading.scalars)
        output = mark_no_backward(outputs["output"], (query, key, value, *buffers))
        if self.options.layout == "bshd":
            output = output.transpose(1, 2)
        if return_aux is None:
            return output
        return output, AuxOutput(outputs.get("logsumexp"), outputs.get("max_scores"))

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
        aux = read_aux_request(return_aux)
        reading = self._read(query, key, value)
        call = self._describe(reading, query, key, value, scale, aux, block_table, False)
        device = call.launch.device
        chip = target_named(target) if target else target_of(device) if device.type == "cuda" else None
        forward = self._compile(call, chip or target_named(DEFAULT_TARGET))
        values = bind(forward.source.args, call.launch, call.outputs.allocate(query.to("meta")))
        return Lowered(call.understood, forward, divisible_positions(forward.source.args, values))

    # Describing a call.

    def _read(self, query: Any, key: Any, value: Any) -> Reading:
        """Check the tensors where that is cheap enough to do at every call, and re-read what the mods captured."""
        if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
            check_tensors(query, key, value, self.options.layout)
        return self._mods.current(torch.float64 if query.dtype == torch.float64 else torch.float32)

    def _form(
        self,
        reading: Reading,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: Any,
        aux: AuxRequest,
        block_table: Any,
    ) -> Hashable:
        """Return what decides everything about a call but addresses and values; None where that is not settled."""
        device = query.get_device()
        if type(scale) not in (float, int, type(None)) or query.device.type == "meta":
            return None
        if any(buffer.get_device() != device for buffer in reading.buffers):
            return None
        return (
            id(reading.captured),
            tensor_form(query),
            tensor_form(key),
            tensor_form(value),
            scale,
            aux,
            table_form(block_table) if block_table is not None else None,
            tuple([tensor_form(buffer) for buffer in reading.buffers]),
            self._scalar_form(reading),
        )

    def _scalar_form(self, reading: Reading) -> Hashable:
        """Return what a kernel's choice depends on in captured numbers: their size classes, or their values."""
        if not reading.scalars:
            return None
        if self._understand(reading).facts.rows_safe.assumptions:
            return reading.scalars
        return tuple([(abs(n) > INDEX_LIMIT, abs(n) >= TRUSTED_SCALAR) for n in reading.scalars])

    def _describe(
        self,
        reading: Reading,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        aux: AuxRequest,
        block_table: Any,
        validate: bool,
    ) -> _Call:
        layout = self.options.layout
        check_tensors(query, key, value, layout)
        query, key, value = (to_bhsd(tensor, layout) for tensor in (query, key, value))
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
        outputs = output_form(launch, layout, logsumexp=aux.lse, max_scores=aux.max_scores)
        problem = describe_problem(
            launch,
            constant_scale=self._scale_is_constant(launch.scale, scale),
            table=table,
            output_logsumexp=aux.lse,
            output_max=aux.max_scores,
            has_offsets=False,
        )
        understood = self._understand(reading)
        guard = describe_guard(launch, outputs.row_span, understood.facts.rows_safe)
        return _Call(understood, launch, problem, guard, outputs)

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

    # Compiling.

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

    def _kernel(self, call: _Call) -> Kernel:
        """Return the kernel of a call's configuration, emitted and loaded once."""
        target = target_of(call.launch.device)
        trusted = scalars_are_trusted(call.launch.scalars)
        captured = call.understood.captured
        key = (id(captured), call.problem, call.guard, target.name, trusted)
        with self._lock:
            kernel = self._kernels.get(key)
            if kernel is None or kernel.owner is not captured:
                forward = self._compile(call, target)
                kernel = self._kernels[key] = Kernel(forward.source, forward.plan, captured)
        return kernel

    def _prepare(self, form: Hashable, call: _Call, block_table: Any) -> Prepared:
        table = tuple(call.launch.table.values())
        prepared = Prepared(self._kernel(call), call.launch, call.outputs, (call.understood, block_table, table))
        if form is not None:
            with self._lock:
                self._prepared[form] = prepared
                if len(self._prepared) > MAX_PREPARED:
                    self._prepared.popitem(last=False)
        return prepared


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

"""`ContextParallel`: an attention over sequences that are sharded over the ranks of a mesh, called like a function."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexgen.attention import Attention
from flexgen.aux_outputs import AuxRequest, aux_output, read_aux_request
from flexgen.capture.live import Captured, Reading
from flexgen.distributed.assignment import Assignment, assignment_named, check_cut
from flexgen.distributed.checks import check_is_plain, check_made_of, refuse_others
from flexgen.distributed.exchange import Exchange
from flexgen.distributed.offsets import ShiftedMods
from flexgen.distributed.plan import ContextPlan, Step, make_plan
from flexgen.distributed.ring import run_ring
from flexgen.distributed.ring_call import RingCall
from flexgen.distributed.whole_mask import Extent, WholeMask
from flexgen.errors import UnsupportedProblemError
from flexgen.pipeline import Understood, has_tail
from flexgen.runtime.derived_table import MaskValues
from flexgen.runtime.describe import check_tensors, to_bhsd
from flexgen.runtime.table_cache import MaskPlaces
from flexgen.sinks import add_sinks, check_sinks
from flexgen.torch_library.call import autocast

MAX_PLANS = 16  # kept; the least recently used go first
_SEQUENCE_DIMS = {"bhsd": 2, "bshd": 1}


@dataclass(frozen=True, slots=True)
class _Kept:
    """A plan, what it was made for, and this rank's part of it."""

    captured: Captured
    values: MaskValues
    plan: ContextPlan
    steps: tuple[Step, ...]


class ContextParallel:
    """Attention over sequences that are sharded over the ranks of a mesh; see `flexgen.context_parallel`.

    All ranks make the same calls, in the same order, with what the mods capture being the same on all.
    """

    def __init__(self, attention: Attention, mesh: DeviceMesh, assignment: str) -> None:
        check_made_of(attention, mesh)
        self.attention = attention
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.assignment: Assignment = assignment_named(assignment, mesh.size())
        self._exchange = Exchange(mesh.get_group())
        self._layout = attention.options.layout
        self._kernels = attention if self._layout == "bhsd" else attention.with_options({"layout": "bhsd"})
        self._shifted: dict[int, ShiftedMods] = {}
        self._plans: OrderedDict[Hashable, _Kept] = OrderedDict()

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        return_aux: AuxRequest | None = None,
        *,
        sinks: Tensor | None = None,
        **refused: Any,
    ) -> Any:
        """Compute this rank's part of the attention.

        Args:
            query: [B, Hq, Lq / ranks, Dqk], the rows that `shard` gives this rank; with layout "bshd",
                [B, Lq / ranks, Hq, Dqk].
            key: [B or 1, Hkv, Lk / ranks, Dqk], this rank's rows; Hq is a multiple of Hkv.
            value: [B or 1, Hkv, Lk / ranks, Dv], this rank's rows.
            scale: multiplies the products before score_mod; 1/sqrt(Dqk) by default.
            return_aux: auxiliary outputs to return, of this rank's rows.
            sinks: [Hq], as for an Attention; the same on all ranks.

        Returns:
            [B, Hq, Lq / ranks, Dv] in the query's dtype and layout: the rows of what one device would compute; with
            return_aux, a pair with an AuxOutput. Gradients are those of the sum of all ranks' losses: query, key and
            value get their own rows', captured tensors and sinks that of all ranks, the same on each.

        Raises:
            UnsupportedProblemError: the tensors do not form an attention problem, cannot be cut in chunks, or come with
                what is not computed over ranks; or ranks called with different shapes or captured values.
        """
        refuse_others(refused)
        run = self._untraced if "torch._dynamo" in sys.modules else self._run
        return run(query, key, value, scale, return_aux, sinks)

    @cached_property
    def _untraced(self) -> Any:
        """`_run`, over which torch.compile steps: what ranks send each other is no part of a graph."""
        return torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        return_aux: AuxRequest | None,
        sinks: Tensor | None,
    ) -> Any:
        aux = read_aux_request(return_aux)
        tensors = self._checked(query, key, value)
        reading = self.attention.read(*tensors)
        views = tuple(to_bhsd(tensor, self._layout) for tensor in tensors)
        understood = self.attention.understand(reading)
        kept = self._plan(understood, reading, *views)
        call = self._call(understood, reading, kept, scale, aux, views[0])
        outputs = run_ring(call, views, self._shared(reading))
        if sinks is not None:
            check_sinks(sinks, query, views[0].shape[1])
            shared = self._exchange.with_summed_gradient(sinks)
            output, lse = add_sinks(outputs["output"], outputs["logsumexp"], shared, heads_dim=1)
            outputs |= {"output": output, "logsumexp": lse}
        if self._layout == "bshd":
            outputs["output"] = outputs["output"].transpose(1, 2)
        return outputs["output"] if return_aux is None else (outputs["output"], aux_output(outputs, aux))

    def shard(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return this rank's rows of a tensor that every rank has whole; gradients flow back to them.

        Args:
            tensor: of any shape.
            dim: the dimension of the sequence; by default that of query, key and value in this attention's layout.

        Raises:
            UnsupportedProblemError: the sequence cannot be cut in equal chunks.
        """
        dim = self._sequence_dim(dim)
        check_cut("a sequence", tensor.shape[dim], self.assignment)
        parts = tensor.chunk(self.assignment.chunks, dim)
        return torch.cat([parts[chunk] for chunk in self.assignment.of_rank(self.rank)], dim)

    def unshard(self, tensor: Tensor, dim: int | None = None) -> Tensor:
        """Return the whole of a tensor of which each rank has its rows: on every rank, without gradients.

        Args:
            tensor: this rank's rows, of the same shape on all ranks.
            dim: as for `shard`.
        """
        dim = self._sequence_dim(dim)
        gathered = self._exchange.gathered(tensor.detach())
        chunks: dict[int, Tensor] = {}
        for rank, rows in enumerate(gathered):
            own = self.assignment.of_rank(rank)
            chunks |= zip(own, rows.chunk(len(own), dim), strict=True)
        return torch.cat([chunks[number] for number in range(self.assignment.chunks)], dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return which tokens of a sequence this rank's rows are, as for rotary embeddings: int64 [length / ranks]."""
        return self.shard(torch.arange(length, device=device), 0)

    def plan(self, query: Tensor, key: Tensor, value: Tensor) -> ContextPlan:
        """Return who computes and sends what for a call with these tensors; all ranks call it together.

        Args:
            query, key, value: as for a call.
        """
        tensors = self._checked(query, key, value)
        reading = self.attention.read(*tensors)
        views = (to_bhsd(tensor, self._layout) for tensor in tensors)
        return self._plan(self.attention.understand(reading), reading, *views).plan

    # A call.

    def _sequence_dim(self, dim: int | None) -> int:
        return _SEQUENCE_DIMS[self._layout] if dim is None else dim

    def _checked(self, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor, Tensor]:
        check_tensors(query, key, value, self._layout)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_is_plain(name, tensor)
            rows, cuts = tensor.shape[_SEQUENCE_DIMS[self._layout]], self.assignment.per_rank
            if rows % cuts:
                raise UnsupportedProblemError(
                    f"{name} has {rows} rows on this rank, which cannot be cut in {cuts} equal chunks",
                    why=f"with assignment={self.assignment.name!r}, {self.assignment.why()}",
                    fix="shard the whole with .shard(), which says how long it may be",
                )
        if torch._C._is_any_autocast_enabled():
            query, key, value = autocast((query, key, value))
        return query, key, value

    def _shared(self, reading: Reading) -> list[Tensor]:
        """Return the captured tensors; of those that require grad, what each rank has of the gradient is summed."""
        summed = self._exchange.with_summed_gradient
        return [
            summed(buffer) if buffer.requires_grad and torch.is_grad_enabled() else buffer for buffer in reading.buffers
        ]

    def _call(
        self,
        understood: Understood,
        reading: Reading,
        kept: _Kept,
        scale: float | None,
        aux: AuxRequest,
        query: Tensor,
    ) -> RingCall:
        shifted = self._shifted.get(id(reading.captured))
        if shifted is None or shifted.whole is not reading.captured:
            shifted = self._shifted[id(reading.captured)] = ShiftedMods.of(reading.captured)
        tail = has_tail(understood, query.dtype)
        own = shifted

        def begin_at(q_start: int, kv_start: int) -> Reading:
            return own.reading(reading, q_start, kv_start)

        part = (kept.plan, self.rank, kept.steps)
        return RingCall(self._kernels, begin_at, *part, self._exchange, scale, aux.max_scores, tail)

    def _plan(self, understood: Understood, reading: Reading, query: Tensor, key: Tensor, value: Tensor) -> _Kept:
        """Return the plan of a call, made once for what it depends on, and then compared with the other ranks'."""
        extent = Extent.of(query, key, value, self.assignment.ranks)
        tensors, scalars = _mask_values(reading)
        key_of_plan = (id(reading.captured), extent, tuple(map(id, tensors)), tuple(scalars))
        kept = self._plans.get(key_of_plan)
        if kept is None or kept.captured is not reading.captured or not _holds(kept.values, tensors, scalars):
            plan = make_plan(WholeMask.of(understood, reading, extent), extent, self.assignment, count=False)
            self._agree(plan, query.device)
            values, steps = MaskValues(tensors, scalars), plan.steps(self.rank)
            kept = self._plans[key_of_plan] = _Kept(reading.captured, values, plan, steps)
        self._plans.move_to_end(key_of_plan)
        if len(self._plans) > MAX_PLANS:
            self._plans.popitem(last=False)
        return kept

    def _agree(self, plan: ContextPlan, device: torch.device) -> None:
        """Compare the plan with the other ranks'; also lets all of them take part in the group's first message."""
        if not self._exchange.same_everywhere(plan.digest(), device):
            raise UnsupportedProblemError(
                "the ranks of the mesh do not plan the same attention",
                why="they called with different shapes, or what the mask captured differs between them: one would wait "
                "for messages that another does not send",
                fix="call with shards of equal shape, and broadcast what the mask captures from one rank",
            )


def _mask_values(reading: Reading) -> tuple[list[Tensor], list[int | float]]:
    """Return the tensors and numbers that the mask reads."""
    mods = reading.captured.mods
    if mods.mask is None:
        return [], []
    places = MaskPlaces.of(mods, mods.mask)
    return [reading.buffers[place] for _, place in places.buffers], [reading.scalars[at] for _, at in places.scalars]


def _holds(values: MaskValues, tensors: list[Tensor], scalars: list[int | float]) -> bool:
    return values.can_tell and values.still_hold(tensors, scalars)


def context_parallel(attn: Attention, mesh: DeviceMesh, *, assignment: str = "head-tail") -> ContextParallel:
    """Return the attention for sequences that are sharded over the ranks of a mesh.

    Its mods see the indices of the whole sequence. Of what the mask proves dead, nothing is sent or computed. Output,
    logsumexp and gradients equal those of one device, up to rounding.

    Args:
        attn: what `flexgen.compile` returned.
        mesh: of one dimension; several ranks that each hold a part of every sequence.
        assignment: "head-tail", where rank r of R holds chunks r and 2 R - 1 - r of 2 R, which gives each rank the same
            work under a causal mask, a window or none; "contiguous", where it holds chunk r of R. All attentions of a
            model need the same one, as they share the sharded sequence; `flexgen.plan_context_parallel` compares them.

    Raises:
        UnsupportedProblemError: the mesh has several dimensions.
        OptionError: there is no such assignment.
    """
    return ContextParallel(attn, mesh, assignment)

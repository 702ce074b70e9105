"""`Attention`: a compiled pair of mods that is called like a function."""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from flexgen.aux_outputs import NO_AUX, AuxRequest, aux_output, read_aux_request
from flexgen.backends import relevant_guard
from flexgen.capture.live import LiveMods, Reading
from flexgen.collector import collector_paused
from flexgen.dropout import read_dropout, read_probability
from flexgen.errors import (
    NoFeasiblePlanError,
    OptionError,
    OutOfResourcesError,
    ProblemTypeError,
    UnsupportedProblemError,
)
from flexgen.export import export_module
from flexgen.extras import NO_EXTRAS, Extras, given_sides
from flexgen.fitting import Fitting, nothing_smaller
from flexgen.ir.graph import Axis
from flexgen.jagged import is_nested, read_jagged
from flexgen.lowered import Lowered
from flexgen.lowering.targets import DEFAULT_TARGET, Target, target_named
from flexgen.options import Options
from flexgen.pickling import check_pickles
from flexgen.pipeline import ForwardKernel, Understood, compile_forward, compile_table, has_tail, understand
from flexgen.problem import INDEX_LIMIT, Guard, Problem, TableForm
from flexgen.runtime.bind import bind
from flexgen.runtime.block_table import BlockTable, check_block_table, read_block_mask
from flexgen.runtime.compile_ahead import is_known
from flexgen.runtime.derived_table import DerivedTable, Lists, refuse_capture
from flexgen.runtime.describe import (
    TRUSTED_SCALAR,
    Launch,
    check_tensors,
    condition_names,
    describe_guard,
    describe_problem,
    scalars_are_trusted,
    softmax_scale,
    to_bhsd,
)
from flexgen.runtime.device_target import target_of
from flexgen.runtime.differentiable import Gradients, Saved, Step, attend, grad_is_needed, refuse_gradients
from flexgen.runtime.dropout import SEED, Dropout
from flexgen.runtime.given_table import GivenTable, Sizes, given_table
from flexgen.runtime.kernel import Kernel, divisible_positions
from flexgen.runtime.lists import check_contiguous, table_form, table_lists
from flexgen.runtime.outputs import OutputForm, output_form
from flexgen.runtime.packing import (
    Packing,
    check_contents,
    check_packing,
    packing_of,
    refuse_lengths,
    refuse_table,
)
from flexgen.runtime.prepared import Prepared, tensor_form
from flexgen.runtime.sides import Extents, Side, checked_sides, room
from flexgen.runtime.split_kernel import kernel_of
from flexgen.runtime.table_cache import TableRequest, Values
from flexgen.sinks import add_sinks, check_sinks
from flexgen.tables import Tables, check_derived, placeholder_lists
from flexgen.torch_library.call import (
    OperatorForm,
    OperatorForms,
    autocast,
    call_operator,
    needs_operator,
    refuse_unreadable,
    share_of,
)
from flexgen.torch_library.cells import forget_cells, share_cells
from flexgen.torch_library.refuse import refuse
from flexgen.torch_library.spec import AT_ZERO, Starts, print_options
from flexgen.torch_library.traced import call_recorded
from flexgen.training import Basis, Called, Training
from flexgen.tuning.autotune import autotuned_settings, refuse_autotune
from flexgen.tuning.tune import TuningSubject
from flexgen.warm_calls import WarmCalls

_log = logging.getLogger("flexgen")
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
    derived: TableForm | None = None  # of the table derived from the mask
    table: BlockTable | None = None  # the caller's block mask


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
        self._forward_options = options.forward()
        self._mods = LiveMods(score_mod, mask_mod)
        self._forms = OperatorForms(self._mods, options)
        self._understood: dict[int, Understood] = {}
        self._kernels: dict[Hashable, Kernel] = {}
        self._prepared: OrderedDict[Hashable, Prepared] = OrderedDict()
        self._warm = self._warm_calls()
        self._requests: OrderedDict[Hashable, TableRequest] = OrderedDict()  # of explicit tables
        self._tables = Tables(self._forward_options)
        self._training = Training(options.backward(), self._tables)
        self._fitting = Fitting()
        self._scales: dict[float, None] = {}
        self._tuned: dict[Hashable, Attention] = {}
        self._lock = threading.RLock()

    @property
    def understood(self) -> tuple[Understood, ...]:
        """What is known of the mods, once for each capture that a call needed."""
        return tuple(self._understood.values())

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the callables and options alone.

        Raises:
            ModPicklingError: a mod could not be found again by its name.
        """
        check_pickles(self.score_mod, self.mask_mod)
        return Attention, (self.score_mod, self.mask_mod, self.options)

    def __copy__(self) -> Attention:
        return Attention(self.score_mod, self.mask_mod, self.options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Attention:
        """Copy as the callables and options alone: a copied module's mods read the copy."""
        return Attention(copy.deepcopy(self.score_mod, memo), copy.deepcopy(self.mask_mod, memo), self.options)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        return_aux: AuxRequest | None = None,
        *,
        block_table: Any = None,
        kv_lengths: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        dropout_p: float = 0,  # no float, of which torch.compile makes a symbol
        generator: torch.Generator | None = None,
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
            block_table: what `block_table(query, key)` returned; or a torch BlockMask: only its listed blocks are
                visited, and mask_mod is applied on partial blocks only.
            kv_lengths: [B], int32 or int64, on the query's device: the number of keys that each batch row has, at most
                Lk; keys from there on do not exist. Read on the device, so that one captured CUDA graph serves every
                step over a cache. No gradients.
            page_table: [B, max_pages], int32: which pages hold the keys of each batch row, in their order. key is then
                [n_pages, Hkv, page_size, Dqk], with layout "bshd" [n_pages, page_size, Hkv, Dqk], value alike, and
                page_size a multiple of 16. Needs kv_lengths; entries past a row's last page are never followed. Mods
                see positions in the sequence, not in pages. No gradients.
            k_scale, v_scale: a number, or [Hkv], float32: what keys and values are multiplied by, as part of the scale
                and of the output. Meant for keys and values in float8_e4m3fn or float8_e5m2, which go with a float16 or
                bfloat16 query and are converted to its dtype after they are read. No gradients.
            cu_seqlens_q: [sequences + 1], int32 or int64, on the query's device: the batch is 1, and sequence i is the
                queries [cu_seqlens_q[i], cu_seqlens_q[i + 1]), which see the keys of the same sequence alone. It begins
                with 0 and never decreases; queries behind its last entry give 0 and a logsumexp of -inf. For the mods
                b is i, and q_idx and kv_idx count from the sequence's first token. Contents may change freely: nothing
                is waited for and nothing compiled again.
            cu_seqlens_k: the same of keys and values; None where they are packed as the queries are.
            sinks: [Hq], floating: a logit for each query head that only enlarges the softmax's denominator; it may
                require grad. The logsumexp includes it, max_scores do not.
            dropout_p: the probability, from 0 to 1, that a softmax weight is dropped; those kept are divided by
                1 - dropout_p. It does not touch logsumexp and max_scores, and may change from call to call at no cost.
            generator: of the query's device, draws what is dropped; torch's default generator if None.
            validate: check the contents of block table, kv_lengths, page table and cu_seqlens; waits for the device.

        query, key and value may be nested tensors of the jagged layout: their sequences are packed, each by itself, and
        what is returned is nested as the query is.

        Returns:
            [B, Hq, Lq, Dv] in the query's dtype and layout; with return_aux, a pair with an AuxOutput. A row without
            a live key is 0.

        Raises:
            CaptureError: a mod cannot be traced or uses operations that are not compiled.
            UnsupportedProblemError, ProblemTypeError: the tensors do not form an attention problem, or `dropout_p` is
                no probability.
            OptionError: an option cannot be honoured for this problem.
        """
        # The whole of a usual inference call, whose form is known.
        if (
            return_aux is block_table is cu_seqlens_q is cu_seqlens_k is sinks is None
            and generator is None
            and dropout_p == 0
            and dropout_p is not False
            and not validate
        ):
            sides = given_sides(kv_lengths, page_table, k_scale, v_scale)
            output = self._warm.output(query, key, value, scale, sides)
            if output is not None:
                return output
        aux = read_aux_request(return_aux)
        packing = packing_of(cu_seqlens_q, cu_seqlens_k)
        jagged = None
        if is_nested(query, key, value):
            jagged = read_jagged(query, key, value, self.options.layout, packing)
            packing, (query, key, value) = jagged.packing, jagged.tensors
        tensors = (query, key, value)
        if torch._C._is_any_autocast_enabled():
            tensors = autocast(tensors)
        sides = given_sides(kv_lengths, page_table, k_scale, v_scale)
        if self.options.autotune:  # measured without dropout
            given = dict(packing.named if packing is not None else {}, block_table=block_table, **sides)
            result = self._tuned_for(*tensors, given)(
                *tensors,
                scale,
                return_aux,
                sinks=sinks,
                dropout_p=dropout_p,
                generator=generator,
                validate=validate,
                **given,
            )
            return result if jagged is None else jagged.nested(result)
        dropout = read_dropout(dropout_p, generator, query)
        aux_needed = aux if sinks is None else aux._replace(lse=True)
        extras = Extras(scale, aux_needed, block_table, packing, validate, dropout, sides)
        if needs_operator(query, key, value):
            outputs = self._through_operator(tensors, extras)
        else:
            reading = self.read(*tensors)
            query, key, value = tensors
            if query.is_neg() or key.is_neg() or value.is_neg():  # torch has yet to negate what lies in memory
                tensors = (query.resolve_neg(), key.resolve_neg(), value.resolve_neg())
            outputs = self.run(reading, tensors, extras)
        if sinks is not None:
            outputs |= self._with_sinks(outputs, sinks)
        result = outputs["output"] if return_aux is None else (outputs["output"], aux_output(outputs, aux))
        return result if jagged is None else jagged.nested(result)

    def _tuned_for(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: Mapping[str, Any]
    ) -> Attention:
        """Return the attention with the options that are fastest for a call, which are searched the first time."""
        tensors = (query, key, value)
        refuse_autotune(*tensors)
        check_tensors(*tensors, self.options.layout, paged="page_table" in given)
        backward = grad_is_needed(*tensors, self.read(*tensors).buffers)
        forms = [
            table_form(it) if name == "block_table" else _side_form(name, it)
            for name, it in given.items()
            if it is not None
        ]
        key_of_call = (query.device, backward, *forms, *((t.dtype, t.shape, t.stride()) for t in tensors))
        tuned = self._tuned.get(key_of_call)
        if tuned is None:
            with self._lock:
                tuned = self._tuned.get(key_of_call)
                if tuned is None:
                    subject = TuningSubject(self.with_options, tensors, self.options.layout, given)
                    tuned = self._tuned[key_of_call] = self.with_options(autotuned_settings(subject, backward))
        return tuned

    def with_options(self, settings: Mapping[str, Any]) -> Attention:
        """Return an attention of the same captured mods, so that block tables made for one serve the other."""
        made = Attention(self.score_mod, self.mask_mod, self.options.over({**settings, "autotune": False}))
        made._mods, made._understood = self._mods, self._understood
        made._warm = made._warm_calls()
        return made

    def of_the_same_code(self, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None) -> Attention:
        """Return an attention of other mods, which shares all that was captured, compiled and prepared.

        Args:
            score_mod, mask_mod: usually fresh closures of the code of this one's; others are captured anew.
        """
        made = object.__new__(Attention)
        vars(made).update(vars(self))
        made.score_mod, made.mask_mod = score_mod, mask_mod
        made._mods = self._mods.of_the_same_code(score_mod, mask_mod)
        made._forms = OperatorForms(made._mods, made.options)
        made._warm = made._warm_calls()
        return made

    def _with_sinks(self, outputs: dict[str, torch.Tensor], sinks: torch.Tensor) -> dict[str, torch.Tensor]:
        output, lse = outputs["output"], outputs["logsumexp"]
        check_sinks(sinks, output, lse.shape[1])
        output, lse = add_sinks(output, lse, sinks, 1 if self.options.layout == "bhsd" else 2)
        return {"output": output, "logsumexp": lse}

    def run(
        self,
        reading: Reading,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: Extras,
    ) -> dict[str, torch.Tensor]:
        """Run a call whose captured values have been read, recorded for autograd where that is wanted.

        Args:
            reading: what to run, and the captured values; need not be of this Attention's own mods.
            tensors: query, key and value.
            extras: the call's other arguments; more outputs than it asks for may be returned.

        Returns:
            "output" in the query's layout, "logsumexp" and "max_scores".
        """
        query, key, value = tensors
        extras = self._with_given_table(extras, query, key)
        records = grad_is_needed(query, key, value, reading.buffers)
        asked = extras.aux
        if records:  # the backward recomputes weights from it
            refuse_gradients(extras.sides, key)
            extras = extras.with_lse()
        prepared, buffers = self._ready(reading, tensors, extras, trained=asked if records else None)
        try:
            outputs = self._launched(prepared, reading, tensors, buffers, extras, records=records)
        except OutOfResourcesError as error:
            return self._run_with_less(prepared, error, lambda: self.run(reading, tensors, extras))
        if self.options.layout == "bshd":
            outputs["output"] = outputs["output"].transpose(1, 2)
        return outputs

    def _launched(
        self,
        prepared: Prepared,
        reading: Reading,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        buffers: Any,
        extras: Extras,
        *,
        records: bool,
    ) -> dict[str, torch.Tensor]:
        lists: Mapping[str, Any] = {}
        if isinstance(extras.block_table, GivenTable):
            lists = table_lists(extras.block_table.table)
        elif prepared.request is not None:
            values = Values(reading.buffers, buffers, reading.scalars)
            lists = self._tables.lists(prepared.request, extras.block_table, values)
        if records:
            return self._recorded(prepared, reading, tensors, buffers, lists, extras)
        return prepared.run(_named(tensors, extras), buffers, reading.scalars, lists)

    def _run_with_less(
        self, prepared: Prepared, error: OutOfResourcesError, run: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Run a call again with a plan that takes less, as the kernel of the first one did not fit the device."""
        with self._lock:
            key = next((key for key, kernel in self._kernels.items() if kernel is prepared.kernel), None)
            if key is not None:  # else another thread has been here
                kernel = self._kernels.pop(key)
                self._fitting.take_less(key, kernel.plan, error)
                for form in [form for form, kept in self._prepared.items() if kept.kernel is kernel]:
                    del self._prepared[form]
        try:
            return run()
        except (NoFeasiblePlanError, OptionError):
            raise nothing_smaller(error, self._forward_options) from error

    def _ready(
        self,
        reading: Reading,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: Extras,
        trained: AuxRequest | None = None,
    ) -> tuple[Prepared, Any]:
        """Return the prepared launch for calls of this form, and the captured tensors on the call's device.

        Args:
            trained: of a call that autograd records, the outputs that its loss may read beside the main one.
        """
        form = self._form(reading, *tensors, extras)
        prepared = None if extras.validate else self._prepared.get(form)
        if prepared is not None:
            return prepared, reading.buffers
        with collector_paused():
            call = self._describe(reading, *tensors, extras, target_of(tensors[0].device))
            prepared = self._prepare(form, call, extras.block_table)
            if trained is not None:
                self._foresee_gradients(prepared, call, trained)
            return prepared, tuple(call.launch.buffers.values())

    def _foresee_gradients(self, prepared: Prepared, call: _Call, trained: AuxRequest) -> None:
        """Have the backward compiled by other processes while this one compiles the forward, where that is new.

        Where the forward is compiled, the backward usually is too.
        """
        if prepared.basis.target.backend != "interpret":
            outputs = call.outputs.allocate(torch.empty(0, dtype=call.launch.tensors["query"].dtype, device="meta"))
            if not is_known(prepared.kernel.compile_job(call.launch, outputs)):
                self._training.compile_ahead(replace(prepared.basis, table=call.table), call.launch, trained.lse)

    def gradients(
        self,
        reading: Reading,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: Extras,
        saved: Saved,
        grad_output: torch.Tensor,
        grad_logsumexp: torch.Tensor | None,
        wanted: frozenset[str],
    ) -> Gradients:
        """Return the wanted gradients of a call that `run` made; see `Step.backward`."""
        extras = self._with_given_table(extras, tensors[0], tensors[1])
        prepared, _ = self._ready(reading, tensors, extras)
        called = Called(prepared.basis, reading.scalars, table=_given_lists(extras.block_table))
        return self._training.backward(called, saved, grad_output, grad_logsumexp, wanted)

    def _through_operator(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        extras: Extras,
    ) -> dict[str, torch.Tensor]:
        """Make the call as one operator that whatever traces the program can see; torch.compile traces this."""
        if extras.validate:
            refuse(
                "validate=True was passed to a call that is being traced, or is made of DTensors",
                why="it looks at the lists' contents, which a trace does not have",
                fix="validate the block table in a call of plain tensors, outside of a compiled region",
            )
        if extras.sides:
            refuse(
                f"{next(iter(extras.sides))} was passed to a call that is being traced, or is made of DTensors",
                why="the operator that stands for such a call does not take it yet",
                fix="call this attention outside of the traced region, or with each rank's own tensors, .to_local()",
            )
        if extras.block_table is not None:
            self._check_mask_of(extras.block_table)
        traced = torch.compiler.is_dynamo_compiling()
        if traced and self._shares_cells():
            return call_recorded(self.score_mod, self.mask_mod, self._all_options(), tensors, extras)
        share = share_of(tensors, self.options.layout)
        form = self._operator_form(tensors[0].dtype, AT_ZERO if share is None else share.starts)
        outputs = call_operator(form, self.score_mod, self.mask_mod, tensors, extras, share)
        if traced:
            self._forget_cells()
        return outputs

    def _operator_form(self, query_dtype: torch.dtype, starts: Starts) -> OperatorForm:
        return self._forms.of(query_dtype, starts)

    # torch.compile runs this while it traces and takes the result for a constant: what the result depends on is read,
    # and so guarded, by `call_operator`.
    _operator_form._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _shares_cells(self) -> bool:
        return share_cells(self.score_mod, self.mask_mod)

    _shares_cells._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _forget_cells(self) -> None:
        forget_cells(self.score_mod, self.mask_mod)

    _forget_cells._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _all_options(self) -> tuple[tuple[str, Any], ...]:
        return tuple(json.loads(print_options(self.options)).items())

    _all_options._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def _recorded(
        self,
        prepared: Prepared,
        reading: Reading,
        tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        buffers: Any,
        lists: Any,
        extras: Extras,
    ) -> dict[str, torch.Tensor]:
        """Run a prepared forward under autograd."""
        given = extras.block_table if isinstance(extras.block_table, DerivedTable) else None
        called = Called(prepared.basis, reading.scalars, given, _given_lists(extras.block_table))
        query, key, value = tensors
        if self.options.layout != "bhsd":
            query, key, value = (to_bhsd(tensor, self.options.layout) for tensor in tensors)
        batch = query.shape[0]
        inputs = (query, _broadcast(key, batch), _broadcast(value, batch), *buffers)
        step = Step(
            lambda _: prepared.run(_named(tensors, extras), buffers, reading.scalars, lists),
            partial(self._training.backward, called),
            extras.packing,
            extras.dropout,
        )
        return attend(step, inputs)

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
        kv_lengths: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        dropout_p: float = 0,
    ) -> Lowered:
        """Lower for the given tensors without running; they may be real, meta or fake.

        Args:
            query, key, value, scale, return_aux, block_table, kv_lengths, page_table, k_scale, v_scale, cu_seqlens_q,
                cu_seqlens_k: as for a call.
            target: a chip such as "sm_90", or "interpret"; by default the tensors' device, and sm_90 without a GPU.
            dropout_p: as for a call; only whether it is 0 matters, and nothing is drawn.

        Returns:
            The forward; and the backward kernels, if one of the tensors or of the captured ones requires grad.
        """
        aux = read_aux_request(return_aux)
        packing = packing_of(cu_seqlens_q, cu_seqlens_k)
        if is_nested(query, key, value):
            jagged = read_jagged(query, key, value, self.options.layout, packing)
            packing, (query, key, value) = jagged.packing, jagged.tensors
        reading = self.read(query, key, value)
        trains = any(tensor.requires_grad for tensor in (query, key, value, *reading.buffers))
        loss_reads_lse, aux = aux.lse, aux._replace(lse=aux.lse or trains)
        chip = target_named(target) if target else _offline_target(query)
        p = read_probability(dropout_p)
        dropout = Dropout(p, torch.empty(2, dtype=torch.int64, device="meta")) if p > 0.0 else None
        sides = given_sides(kv_lengths, page_table, k_scale, v_scale)
        extras = Extras(scale, aux, block_table, packing, dropout=dropout, sides=sides)
        if trains:
            refuse_gradients(sides, key)
        call = self._describe(reading, query, key, value, extras, chip)
        forward = self._compile(call, chip)
        outputs, second = call.outputs.allocate(query.to("meta")), forward.source.second
        divisible, second_divisible = (
            divisible_positions(args, bind(args, call.launch, outputs))
            for args in (forward.source.args, second.args if second else ())
        )
        form = call.derived
        table = compile_table(call.understood, form, call.guard, chip, Axis.KV) if form else None
        backward = self._training.lower(_basis(call, chip), call.launch, loss_reads_lse) if trains else None
        return Lowered(call.understood, forward, divisible, second_divisible, table, backward)

    def export(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None = None,
        return_aux: AuxRequest | None = None,
        *,
        target: str | None = None,
        kv_lengths: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k: torch.Tensor | None = None,
        dropout_p: float = 0,
    ) -> str:
        """Return the text of a stand-alone Python module for calls like this one; see docs/export.md.

        It imports torch and triton alone, holds the kernels and the exact plans, and its `attention` takes query, key
        and value, then what the mods captured, and refuses calls that it was not compiled for.

        Args:
            query, key, value: as for a call; real, meta or fake. If one of them or of the captured tensors requires
                grad, the module has the backward too, for the gradients of those that do.
            scale: is a constant of the module.
            return_aux: with `lse`, its `attention` returns the logsumexp beside the output.
            target: as for `lower`.
            kv_lengths, page_table, k_scale, v_scale: as for a call; `attention` takes what is given, but for a k_scale
                that is a number and part of the constant scale.
            cu_seqlens_q, cu_seqlens_k: as for a call; only their dtype matters. With them, `attention` takes both.
            dropout_p: as for a call. With more than 0, `attention` takes `dropout_p` and `generator`.

        Raises:
            UnsupportedProblemError: the maxima of scores are asked for, or the kernels cannot stand alone.
        """
        aux = read_aux_request(return_aux)
        lowered = self.lower(
            query,
            key,
            value,
            scale,
            aux,
            target=target,
            kv_lengths=kv_lengths,
            page_table=page_table,
            k_scale=k_scale,
            v_scale=v_scale,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout_p=dropout_p,
        )
        return export_module(lowered, layout=self.options.layout, aux=aux, how="attention.export(query, key, value)")

    def block_table(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None = None,
        *,
        max_blocks: int | None = None,
    ) -> DerivedTable | None:
        """Derive, on the device, which blocks of keys each block of queries visits, to pass as `block_table=`.

        Calls do this by themselves, and again when what the mask captured has changed. Making a table once saves
        them the check, makes room for exactly what is needed, and is needed before capturing a CUDA graph.

        Args:
            query, key, value: as for a call, of which only shapes, dtypes and the device matter; value defaults to
                key's shape.
            max_blocks: how many blocks to make room for, so that nothing is waited for. Rows of blocks whose list
                does not fit visit every block, which is right but slow; `DerivedTable.check()`, and `validate=True`
                at a call, raise then. By default the device is waited for once, and there is room for all.

        Returns:
            The table; None, which `block_table=` takes too, where a kernel needs none: the mask is an interval for
            each query, or every block would be listed.

        Raises:
            UnsupportedProblemError: a CUDA graph is being captured, or the tensors form no attention problem.
        """
        if max_blocks is not None and (type(max_blocks) is not int or max_blocks < 0):
            raise ProblemTypeError(f"max_blocks={max_blocks!r} is no count", fix="pass a non-negative int, or None")
        value = key if value is None else value
        reading = self.read(query, key, value)
        refuse_capture(query.device)
        form = self._form(reading, query, key, value, NO_EXTRAS)
        request, buffers = self._requests.get(form), reading.buffers
        if request is None:
            target = target_of(query.device)
            call = self._describe(reading, query, key, value, NO_EXTRAS, target)
            request = self._tables.explicit(call.understood, call.launch, call.problem, call.guard, target)
            if request is None:
                return None
            buffers = tuple(call.launch.buffers.values())
            self._keep(self._requests, form, request)
        return request.build(Values(reading.buffers, buffers, reading.scalars), max_blocks)

    # Describing a call.

    def read(self, query: Any, key: Any, value: Any) -> Reading:
        """Return what the mods are now; of the tensors, what is cheap to check is checked."""
        tensors = isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        if not tensors or not query.layout is key.layout is value.layout is torch.strided or query.is_nested:
            check_tensors(query, key, value, self.options.layout)
        return self._mods.current(torch.float64 if query.dtype == torch.float64 else torch.float32)

    def _form(
        self,
        reading: Reading,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extras: Extras,
    ) -> Hashable:
        """Return what decides everything about a call but addresses and values; None where that is not settled."""
        scale, block_table, sides = extras.scale, extras.block_table, extras.sides
        if (scale is not None and type(scale) not in (float, int)) or query.is_meta or key.is_meta or value.is_meta:
            return None
        if reading.buffers:
            refuse_unreadable(reading.buffers)
            device = query.get_device()
            if any([buffer.get_device() != device for buffer in reading.buffers]):  # noqa: C419 (faster)
                return None
        return (  # of query, key and value what tensor_form says, without the calls
            id(reading.captured),
            *(query.shape, query.stride(), query.dtype, query.get_device(), query.data_ptr() & 15),
            *(key.shape, key.stride(), key.dtype, key.get_device(), key.data_ptr() & 15),
            *(value.shape, value.stride(), value.dtype, value.get_device(), value.data_ptr() & 15),
            scale,
            extras.aux.lse,
            extras.aux.max_scores,
            extras.packing.form if extras.packing is not None else None,
            _form_of_table(block_table),
            tuple([_side_form(*named) for named in sides.items()]) if sides else None,
            tuple([tensor_form(buffer) for buffer in reading.buffers]) if reading.buffers else None,
            self._scalar_form(reading, query, key) if reading.scalars else None,
            extras.dropout is not None,
        )

    def _found(
        self,
        reading: Reading,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        sides: Mapping[str, Any],
        records: bool,
    ) -> Prepared | None:
        """Return the launch that was prepared for a call that brings nothing else, if it was.

        Args:
            records: autograd records the call.
        """
        extras = Extras(scale, NO_AUX, sides=sides)
        if records:
            if self.options.layout != "bhsd" or not query.shape[0] == key.shape[0] == value.shape[0]:
                return None  # inputs are views, which autograd sees being made
            extras = extras.with_lse()
        return self._prepared.get(self._form(reading, query, key, value, extras))

    def _warm_calls(self) -> WarmCalls:
        return WarmCalls(self._mods, self._found, self._scalar_form, self._lists_of, self._backward_of)

    def _lists_of(self, request: TableRequest, values: Values) -> Lists:
        return self._tables.lists(request, None, values)

    def _backward_of(self, basis: Basis, scalars: Sequence[int | float]) -> Callable[..., Gradients]:
        return partial(self._training.backward, Called(basis, tuple(scalars)))

    def _scalar_form(self, reading: Reading, query: torch.Tensor, key: torch.Tensor) -> Hashable:
        """Return what a kernel's choice depends on in captured numbers: size classes, and whether a proof holds."""
        if not reading.scalars:
            return None
        sizes = tuple([(abs(n) > INDEX_LIMIT, abs(n) >= TRUSTED_SCALAR) for n in reading.scalars])
        hold = self.understand(reading).numbers_hold
        if hold is None or query.dim() != 4 or key.dim() != 4:
            return sizes
        at, mods = 2 if self.options.layout == "bhsd" else 1, reading.captured.mods
        buffers = dict(zip([buffer.name for buffer in mods.buffers], reading.buffers, strict=True))
        scalars = dict(zip([scalar.name for scalar in mods.scalars], reading.scalars, strict=True))
        return sizes, hold(condition_names(buffers, scalars, query.shape[at], key.shape[at]))

    def _describe(
        self,
        reading: Reading,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        extras: Extras,
        target: Target,
    ) -> _Call:
        layout, aux = self.options.layout, extras.aux
        paged = "page_table" in extras.sides
        check_tensors(query, key, value, layout, paged=paged)
        query, key, value = (to_bhsd(tensor, layout) for tensor in (query, key, value))
        batch, q_heads, q_len, head_dim = query.shape
        packing = _checked_packing(extras, query, key)
        extents = Extents(batch, key.shape[1], key.shape[2], key.shape[0], query.device)
        sides = checked_sides(extras.sides, extents, validate=extras.validate)
        kv_len = room(sides, key.shape[2])
        table = self._table(extras, reading, query, kv_len)
        scale, scale_is_constant = self._scale(extras.scale, sides, head_dim)
        if not paged:
            key, value = _broadcast(key, batch), _broadcast(value, batch)
        launch = Launch(
            batch=batch,
            q_heads=q_heads,
            kv_heads=key.shape[1],
            q_len=q_len,
            kv_len=kv_len,
            tensors={"query": query, "key": key, "value": value},
            scale=scale,
            table=table_lists(table) if isinstance(table, BlockTable) else {},
            buffers=_named_buffers(reading, query.device),
            scalars=dict(zip((s.name for s in reading.captured.mods.scalars), reading.scalars, strict=True)),
            dropout=extras.dropout,
            cu_seqlens=packing.named if packing else {},
            sides=sides,
        )
        tail = aux.lse and has_tail(self.understand(reading), query.dtype)
        outputs = output_form(launch, layout, logsumexp=aux.lse, max_scores=aux.max_scores, tail=tail)
        problem = describe_problem(
            launch,
            constant_scale=scale_is_constant,
            table=table.form if table else None,
            output_logsumexp=aux.lse,
            output_max=aux.max_scores,
            has_offsets=False,
        )
        understood = self.understand(reading)
        guard = describe_guard(launch, outputs.row_span, understood.facts.rows_safe)
        form = table.form if table else self._tables.implicit(understood, launch, problem, guard, target)
        if form is None or not form.derived:
            own = table if isinstance(table, BlockTable) else None
            guard = relevant_guard(problem, guard, self._forward_options)
            return _Call(understood, launch, problem, guard, outputs, table=own)
        launch = replace(launch, table=placeholder_lists(understood, launch, form))
        return _Call(understood, launch, replace(problem, table=form), guard, outputs, form)

    def _table(
        self, extras: Extras, reading: Reading, query: torch.Tensor, kv_len: int
    ) -> BlockTable | DerivedTable | None:
        block_table, validate = extras.block_table, extras.validate
        if block_table is None:
            return None
        if isinstance(block_table, DerivedTable):
            check_derived(block_table, reading.captured, query, kv_len)
            if validate:
                block_table.check()
            return block_table
        if isinstance(block_table, GivenTable):
            if validate:
                check_block_table(block_table.table)
            return block_table.table
        self._check_mask_of(block_table)
        table = read_block_mask(
            block_table,
            batch=query.shape[0],
            query_heads=query.shape[1],
            query_length=query.shape[2],
            key_length=kv_len,
            device=query.device if query.device.type != "meta" else None,
        )
        if validate:
            check_block_table(table)
        if self._forward_options.BLOCKS_ARE_CONTIGUOUS:
            check_contiguous(table)
        return table

    def _with_given_table(self, extras: Extras, query: torch.Tensor, key: torch.Tensor) -> Extras:
        """Return the same with the caller's block mask read, where the call is a usual one."""
        mask = extras.block_table
        if mask is None or isinstance(mask, DerivedTable | GivenTable):
            return extras
        if extras.sides or extras.packing is not None or query.dim() != 4 or key.dim() != 4 or query.is_meta:
            return extras  # read, or refused, where the call is described
        heads, rows = (1, 2) if self.options.layout == "bhsd" else (2, 1)
        self._check_mask_of(mask)
        sizes = Sizes(query.shape[0], query.shape[heads], query.shape[rows], key.shape[rows], query.device)
        read = given_table(mask, sizes, contiguous=bool(self._forward_options.BLOCKS_ARE_CONTIGUOUS))
        return extras.with_table(read)

    def _check_mask_of(self, block_table: Any) -> None:
        theirs = getattr(block_table, "mask_mod", None)
        if self.mask_mod is None and theirs is not None and getattr(theirs, "__name__", "") != "noop_mask":
            raise UnsupportedProblemError(
                "the block mask has a mask_mod, and this attention was compiled without one",
                why="partial blocks would be computed without their mask",
                fix="compile with flexgen.compile(score_mod, block_mask.mask_mod), or call flexgen.flex_attention",
            )

    def _scale(self, given: float | None, sides: dict[str, Side], head_dim: int) -> tuple[float, bool]:
        """Return what scores are multiplied by, a k_scale that is a number included, and whether it is a constant."""
        scale, of_keys = softmax_scale(given, head_dim), sides.get("k_scale")
        if isinstance(of_keys, float):
            scale = given = softmax_scale(scale * of_keys, head_dim)
            del sides["k_scale"]
        return scale, self._scale_is_constant(scale, given)

    def _scale_is_constant(self, scale: float, given: float | None) -> bool:
        """The default scale and the first few given ones are constants of the kernel; more become an argument."""
        if given is None or scale in self._scales:
            return True
        if len(self._scales) >= CONSTANT_SCALES:
            return False
        self._scales[scale] = None
        return True

    # Compiling.

    def understand(self, reading: Reading) -> Understood:
        """Return what is known of the mods that were read, found once for each capture."""
        key = id(reading.captured)
        found = self._understood.get(key)
        if found is None or found.captured is not reading.captured:
            with self._lock:
                found = self._understood[key] = understand(reading.captured)
                _log.debug("analysed the mask: %s", found.facts.tier.value)
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
                forward = self._compile(call, self._fitting.target(key, target))
                plan, source = forward.plan, forward.source
                _log.info(
                    "forward for %s, query %s: tile %s x %s, emitted as %s",
                    *(target.name, tuple(call.launch.tensors["query"].shape)),
                    *(plan.BLOCK_M, plan.BLOCK_N, source.key),
                )
                kernel = self._kernels[key] = kernel_of(source, plan, captured)
        return kernel

    def _prepare(self, form: Hashable, call: _Call, block_table: Any) -> Prepared:
        lists_come = isinstance(block_table, DerivedTable | GivenTable)  # with each call
        kept = None if lists_come else (block_table, tuple(call.launch.table.values()))
        target = target_of(call.launch.device)
        derived, parts = call.derived, (call.understood, call.launch)
        request = self._tables.request(*parts, derived, call.guard, target) if derived else None
        layout, keep = self.options.layout, (call.understood, kept)
        lists_change = isinstance(block_table, GivenTable)
        prepared = Prepared(
            self._kernel(call), call.launch, call.outputs, layout, keep, request, lists_change=lists_change
        )
        prepared.basis = _basis(replace(call, table=None) if lists_change else call, target)
        self._keep(self._prepared, form, prepared)
        return prepared

    def _keep(self, kept: OrderedDict[Hashable, Any], form: Hashable, value: object) -> None:
        """Keep what was worked out for a form of call, if it has one."""
        if form is not None:
            with self._lock:
                kept[form] = value
                if len(kept) > MAX_PREPARED:
                    kept.popitem(last=False)


def _basis(call: _Call, target: Target) -> Basis:
    """Return what the backward needs to know of calls of this form."""
    launch = call.launch
    return Basis(call.understood, call.problem, target, call.table, launch.scale, tuple(launch.scalars), call.derived)


def _form_of_table(block_table: Any) -> Hashable:
    """Return what decides of a call's block table, if it has one."""
    if block_table is None:
        return None
    return ("given", block_table.form) if isinstance(block_table, GivenTable) else table_form(block_table)


def _given_lists(block_table: Any) -> BlockTable | None:
    """Return the lists of a block mask that come with each call."""
    return block_table.table if isinstance(block_table, GivenTable) else None


def _offline_target(query: torch.Tensor) -> Target:
    """Return the target to lower for where none is named: the tensors' GPU, or the default chip."""
    return target_of(query.device) if query.device.type == "cuda" else target_named(DEFAULT_TARGET)


def _named(tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], extras: Extras) -> dict[str, Any]:
    """Return a call's tensors, and what it brings beside them, by the names that kernels have for them."""
    named: dict[str, Any] = {"query": tensors[0], "key": tensors[1], "value": tensors[2]}
    if extras.sides:
        named.update(extras.sides)
    if extras.packing is not None:
        named.update(extras.packing.named)
    if extras.dropout is not None:
        named.update(extras.dropout.numbers())
        named[SEED] = extras.dropout.seed
    return named


def _side_form(name: str, side: Any) -> tuple[Hashable, ...]:
    """Return what a prepared launch depends on: a tensor's form; of k_scale, which is part of the scale, the value."""
    if isinstance(side, torch.Tensor):
        return (name, *tensor_form(side))
    return (name, type(side).__name__, side if name == "k_scale" else None)


def _checked_packing(extras: Extras, query: torch.Tensor, key: torch.Tensor) -> Packing | None:
    """Return where packed sequences begin, checked against tensors in [B, H, L, D] order."""
    packing = extras.packing
    if packing is None:
        return None
    if extras.block_table is not None:
        raise refuse_table()
    refuse_lengths(extras.sides)
    check_packing(packing, query, key)
    if extras.validate:
        check_contents(packing, query, key)
    return packing


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

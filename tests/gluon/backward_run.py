"""Runs the Hopper backward kernels of a check on the CPU, emulated, and holds the gradients against float32."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from benchmarks.gluon_backward_check import attention_of, error, inputs_of, reference
from benchmarks.gluon_cases import Check, in_bhsd, mods_of, table_of
from flexgen import training
from flexgen.attention import NO_EXTRAS, _basis
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.targets import TARGETS
from flexgen.pipeline import Wanted, compile_backward
from flexgen.prepared_backward import gradient_form
from flexgen.runtime.bind import bind
from flexgen.runtime.differentiable import Saved
from flexgen.runtime.kernel import program_count
from flexgen.runtime.table_cache import Values
from tests.gluon.emulator import emulate

LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True)
class Ran:
    """Errors of the wanted gradients relative to their norms, and the plans of the kernels that ran."""

    errors: dict[str, float]
    plans: tuple[GluonBackwardPlan, ...]


def run(check: Check, seed: int = 0) -> Ran:
    torch.manual_seed(seed)
    chip, tensors = TARGETS["sm_90"], inputs_of(check, "cpu")
    attention = attention_of(check, "cpu")
    query, key, value = (in_bhsd(tensor, check) for tensor in tensors)
    reading = attention.read(query, key, value)
    extras = dataclasses.replace(NO_EXTRAS, scale=check.scale, block_table=table_of(check, "cpu"))
    call = attention._describe(reading, query, key, value, extras, chip)
    basis = _basis(call, chip)

    output, logsumexp = _forward(check, query, key, value, call.launch.scale)
    grad_output = torch.randn(output.shape).to(output.dtype)
    grad_logsumexp = torch.randn(logsumexp.shape).masked_fill(logsumexp == float("-inf"), 0.0)
    buffers = tuple(call.launch.buffers.values())
    held = [call.launch.tensors[name] for name in ("query", "key", "value")]
    saved = Saved(*held, output, logsumexp, torch.zeros_like(logsumexp), buffers)
    wanted = Wanted(frozenset(check.wanted), frozenset(), from_logsumexp=True)
    launch = training._launch(basis, saved, grad_output, dict(call.launch.buffers), call.launch.scalars)
    outputs = gradient_form(launch, wanted).allocate(torch.device("cpu"))
    for tensor in outputs.values():
        tensor.fill_(float("nan"))
    problem, guard = training._described(basis, launch, outputs)
    options = attention._training._options
    kernels = compile_backward(basis.understood, problem, guard, chip, options, trusted=True, wanted=wanted)
    empty = logsumexp == float("-inf")
    base = LOG2_E if kernels.delta[1].rows.BASE_2 else 1.0
    rows = slice(0, logsumexp.shape[2])
    outputs["row_shift"][:, :, rows] = torch.where(empty, float("inf"), logsumexp * base)
    outputs["delta"][:, :, rows] = (output.float() * grad_output.float()).sum(-1) - grad_logsumexp
    outputs["row_shift"][:, :, logsumexp.shape[2] :] = float("inf")
    outputs["delta"][:, :, logsumexp.shape[2] :] = 0.0
    outputs["row_tail"].fill_(0.0)
    for source, plan in kernels.passes:
        assert isinstance(plan, GluonBackwardPlan)
        form, walked = training._own_table(plan)
        lists = launch.table
        if form is not None:
            tables = attention._training._tables
            request = tables.request(basis.understood, launch, form, guard, TARGETS["interpret"], walked)
            lists = tables.lists(request, None, Values(buffers, buffers, reading.scalars))
        one = dataclasses.replace(launch, table=lists)
        values = bind(source.args, one, outputs)
        emulate(source.text, source.entry, source.args, values, program_count(plan, one), seed)
    grads = [grad_output.transpose(1, 2) if check.layout == "bshd" else grad_output, grad_logsumexp]
    expected = dict(zip(check.wanted_in_order, reference(check, tensors, grads), strict=True))
    found = {name: _reduced(outputs[f"grad_{name}"], expected[name], check) for name in expected}
    return Ran({name: error(found[name], expected[name]) for name in expected}, tuple(p for _, p in kernels.passes))


def _reduced(found: torch.Tensor, expected: torch.Tensor, check: Check) -> torch.Tensor:
    """Return a gradient in the tensor's layout, summed over a batch that shares it."""
    found = in_bhsd(found, check)
    return found if found.shape == expected.shape else found.float().sum(0, keepdim=True)


def _forward(
    check: Check, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output, in the inputs' dtype, and logsumexp."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (tensor.detach().float() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    score_mod, mask_mod = mods_of(check, "cpu")
    score = query @ key.mT * scale
    indices = torch.meshgrid(*(torch.arange(n) for n in score.shape), indexing="ij")
    score = score_mod(score, *indices) if score_mod is not None else score
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(*indices), float("-inf"))
    empty = (score == float("-inf")).all(-1, keepdim=True)
    output = torch.softmax(score, -1).masked_fill(empty, 0.0) @ value
    return output.to(getattr(torch, check.dtype)), torch.logsumexp(score, -1)

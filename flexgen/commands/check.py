"""`flexgen check`: compile, run, and compare each output with float64 evaluated from the user's own functions."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flexgen.aux_outputs import AuxRequest
from flexgen.commands.arguments import add_file, add_problem
from flexgen.commands.console import Console, Span, wrapped
from flexgen.commands.offline import triton_is_installed
from flexgen.commands.reference import DenseProblem, Outputs, evaluate_dense
from flexgen.commands.subject import Subject, fitting_shape, load_subject
from flexgen.errors import FlexgenError, OptionError
from flexgen.lowering.targets import TARGETS, target_named
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.runtime.describe import softmax_scale, to_bhsd
from flexgen.runtime.device_target import target_of
from flexgen.runtime.dropout import Dropout, draw_seed

EXAMPLES = """\
  flexgen check causal.py                        on this machine's GPU, or interpreted on the CPU
  flexgen check causal.py --target interpret     on the CPU
  flexgen check causal.py --packed 100,37,1      sequences of these lengths, packed
  flexgen check mods.py:softcap --dtype bf16 --set USE_SUBTILING=1 --shape 1,2,2,100,300,80,80"""

SEED = 0


@dataclass(frozen=True, slots=True)
class Comparison:
    """One output against float64."""

    name: str
    largest: float
    mean: float
    allowed: float

    @property
    def passes(self) -> bool:
        return self.largest <= self.allowed


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="fp32", target=False)
    parser.add_argument(
        "--target", metavar="TARGET", help="where to run: this machine's GPU (default, if there is one) or interpret"
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    device = _device(arguments.target)
    subject = load_subject(arguments)
    _write_head(subject, device, console)
    tensors = subject.tensors(device, seed=SEED)
    plan = subject.lower(target_of(device).name, AuxRequest(lse=True, max_scores=True)).plan
    if getattr(arguments, "brief", False):
        _write_decisions(plan, console)
    comparisons = compare(subject, tensors, plan, console)
    return 0 if write_comparisons(comparisons, console) else 1


def _device(asked: str | None) -> torch.device:
    """Return where to run.

    Raises:
        OptionError: the target asked for is not in this machine.
    """
    if not triton_is_installed():
        raise FlexgenError(
            "running a kernel needs triton, which is not installed",
            why="triton runs it on a GPU, and its interpreter on the CPU; it has wheels for Linux",
            fix="install triton; `flexgen compile --dump-code`, explain and mask work without it",
        )
    local = target_of(torch.device("cuda")).name if torch.cuda.is_available() else "interpret"
    if asked in (None, local):
        return torch.device("cpu" if local == "interpret" else "cuda")
    if asked not in TARGETS and asked is not None:
        target_named(asked)
    if asked == "interpret":
        return torch.device("cpu")
    raise OptionError(
        f"check cannot run on {asked}: this machine has {'no GPU' if local == 'interpret' else local}",
        why="check runs the kernel that it compiles",
        fix=f"leave --target out to run on {local}; `flexgen compile --target {asked}` compiles for it",
    )


def compare(
    subject: Subject, tensors: tuple[Tensor, ...], plan: ForwardPlan, console: Console
) -> tuple[Comparison, ...]:
    """Run the attention on query, key and value and compare each of its outputs with float64."""
    query, key, value = tensors
    layout = subject.attention.options.layout
    random = torch.Generator(query.device).manual_seed(SEED)
    dropped = Dropout(subject.dropout_p, draw_seed(query.device, random)) if subject.dropout_p else None
    problem = DenseProblem(
        to_bhsd(query, layout),
        to_bhsd(key, layout),
        to_bhsd(value, layout),
        subject.attention.score_mod,
        subject.attention.mask_mod,
        softmax_scale(None, query.shape[3]),
        dropped,
        subject.packed,
    )
    with fitting_shape(subject.shape):
        exact = evaluate_dense(problem, "exact", lambda work: console.track(work, "in float64", at_least=32))
        eager = evaluate_dense(problem, "eager", lambda work: console.track(work, "eagerly", at_least=32))
    request, random = AuxRequest(lse=True, max_scores=True), random.manual_seed(SEED)
    offsets = subject.offsets(query.device)
    output, aux = subject.attention(
        query, key, value, return_aux=request, cu_seqlens_q=offsets, dropout_p=subject.dropout_p, generator=random
    )
    actual = Outputs(to_bhsd(output, layout), aux.lse, aux.max_scores)
    return (
        _comparison("output", actual.output, exact.output, _output_tolerance(exact.output, eager.output, plan)),
        _comparison("logsumexp", actual.logsumexp, exact.logsumexp, _score_tolerance(exact.logsumexp, plan)),
        _comparison("max_scores", actual.max_scores, exact.max_scores, _score_tolerance(exact.max_scores, plan)),
    )


# How far from float64 an output may be.


def _output_tolerance(exact: Tensor, eager: Tensor, plan: ForwardPlan) -> float:
    """Return a bound for the wide dtypes; twice the error of eager computation and one rounding for the narrow."""
    size = _magnitude(exact)
    if plan.query_dtype == torch.float64:
        return 1e-10 * size
    if plan.query_dtype == torch.float32:
        return (1e-2 if plan.FLOAT32_PRECISION == "tf32" else 1e-4) * size
    return 2 * float(_gaps(eager, exact).max()) + torch.finfo(plan.query_dtype).eps * size if exact.numel() else 0.0


def _score_tolerance(exact: Tensor, plan: ForwardPlan) -> float:
    """Scores are float32, whatever the inputs, except where the query is scaled in its own dtype."""
    size = _magnitude(exact)
    if plan.query_dtype == torch.float64:
        return 1e-10 * size
    if plan.query_dtype == torch.float32 and plan.FLOAT32_PRECISION != "tf32":
        return 1e-4 * size
    narrow = torch.finfo(plan.query_dtype).eps if plan.PRESCALE_QK else 0.0
    return (1e-2 if plan.FAST_TANH or plan.FLOAT32_PRECISION == "tf32" else 1e-3 + 4 * narrow) * size


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def _comparison(name: str, actual: Tensor, exact: Tensor, allowed: float) -> Comparison:
    gaps = _gaps(actual, exact)
    largest, mean = (float(gaps.max()), float(gaps.mean())) if gaps.numel() else (0.0, 0.0)
    return Comparison(name, largest, mean, allowed)


def _gaps(actual: Tensor, exact: Tensor) -> Tensor:
    """Return |actual - exact|: 0 where both are the same infinity, infinite where one is NaN."""
    actual, exact = actual.double(), exact.double()
    return torch.where(actual == exact, 0.0, (actual - exact).abs()).nan_to_num(nan=math.inf)


# Telling.


def _write_head(subject: Subject, device: torch.device, console: Console) -> None:
    where = torch.cuda.get_device_name() if device.type == "cuda" else "the CPU, in Triton's interpreter"
    dtype = str(subject.dtype).removeprefix("torch.")
    console.line(Span(f"{subject.name}  {subject.sizes}  {dtype}", "bold"), Span(f"  on {where}", "dim"))


def _write_decisions(plan: ForwardPlan, console: Console) -> None:
    """Write what shapes the kernel most."""
    rows = [
        ("keys", plan.schedule.because),
        ("tile", f"{plan.BLOCK_M} queries x {plan.BLOCK_N} keys"),
        *((d.name, f"{d.value}: {d.because}") for d in plan.decisions if d.name == "ROWS_GUARANTEED_SAFE"),
    ]
    for label, text in rows:
        for number, line in enumerate(wrapped(text, 76)):
            console.line(Span(f"  {label if number == 0 else '':<22}", "cyan"), line)


def write_comparisons(comparisons: tuple[Comparison, ...], console: Console) -> bool:
    """Write a row for each output and the verdict; return whether all pass."""
    rows = [(c.name, f"{c.largest:.1e}", f"{c.mean:.1e}", f"{c.allowed:.1e}", _verdict(c.passes)) for c in comparisons]
    console.table(("difference from float64", "max", "mean", "allowed", ""), rows)
    passes = all(c.passes for c in comparisons)
    console.line(_verdict(passes))
    return passes


def _verdict(passes: bool) -> Span:
    return Span("pass", "green") if passes else Span("FAIL", "red")

"""`flexgen tune`: search the fastest options on this machine's GPU, and keep them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from flexgen.commands.arguments import add_file, add_problem
from flexgen.commands.console import Console, Span, counted, wrapped
from flexgen.commands.offline import triton_is_installed
from flexgen.commands.subject import Subject, choose_target, load_subject
from flexgen.commands.sweep import settings_text
from flexgen.errors import FlexgenError, OptionError
from flexgen.explain_work import duration
from flexgen.runtime.timed_call import Tensors
from flexgen.tuning.search import Trial
from flexgen.tuning.space import TunedDirection
from flexgen.tuning.tune import Outcome, TuningSubject, candidates, tune, tuned_store

EXAMPLES = """\
  flexgen tune causal.py --shape 2,16,16,8192,8192,128,128
  flexgen tune causal.py --backward              the backward kernels too
  flexgen tune causal.py --again                 search also where a result is stored
  flexgen tune causal.py --compile-only --target sm_90
                                                 the candidates and what they take; needs no GPU"""

SEED = 0
SHOWN = 12  # rows of what was measured; --all shows every candidate


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16", dropout=False)
    parser.add_argument("--backward", action="store_true", help="tune the backward kernels too")
    parser.add_argument("--compile-only", action="store_true", help="compile the candidates, and list what they take")
    parser.add_argument("--again", action="store_true", help="search also where a result is stored")
    parser.add_argument("--all", action="store_true", help="list every candidate, with why it was passed over")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes to compile in (default: one a processor)")
    parser.add_argument("--json", action="store_true", help="write what was tried as JSON")


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.jobs is not None and arguments.jobs < 1:
        raise OptionError(f"--jobs {arguments.jobs} is none", fix="give 1 or more")
    directions: list[TunedDirection] = ["forward", *(["backward"] if arguments.backward else [])]  # type: ignore[list-item]
    if arguments.compile_only:
        return _compile_only(arguments, directions, console)
    device = _device(arguments.target)
    with device:  # tensors that the file makes are captured there
        subject = load_subject(arguments)
    query, key, value = subject.tensors(device, seed=SEED)
    found: dict[str, object] = {}
    told: list[dict[str, Any]] = []
    console.note(f"{subject.name}  {subject.shape}  on {torch.cuda.get_device_name(device)}")
    for direction in directions:
        asked = _tuned(subject, (query, key, value)).having(found)
        outcome = tune(
            asked, direction, tuned_store(), again=arguments.again, workers=arguments.jobs, track=console.progress
        )
        found |= outcome.tuned.settings
        told.append(_outcome_json(direction, outcome))
        if not arguments.json:
            write_outcome(direction, outcome, arguments.all, console)
    if arguments.json:
        console.text(json.dumps({"device": torch.cuda.get_device_name(device), "directions": told}, indent=1) + "\n")
    elif found:
        console.line(Span("options=", "bold"), repr(found))
        console.note('stored: calls with options={"autotune": True} take it on this device for this problem')
    return 0


def _tuned(subject: Subject, tensors: Tensors) -> TuningSubject:
    """Return the command's subject as what is tuned."""
    layout = subject.attention.options.layout
    return TuningSubject(lambda settings: subject.having(settings).attention, tensors, layout)


def _device(target: str | None) -> torch.device:
    """Return the GPU to measure on.

    Raises:
        OptionError, FlexgenError: there is none, or another target was asked for.
    """
    fix = "run this on the machine whose GPU it is for; `flexgen tune FILE --compile-only` lists the candidates and "
    fix += "what they take without one"
    if not triton_is_installed() or not torch.cuda.is_available():
        raise FlexgenError("tuning needs a GPU, and there is none here", why="candidates are measured on it", fix=fix)
    if target is not None:
        raise OptionError(
            f"--target {target} is for --compile-only", why="candidates are measured on this machine's GPU", fix=fix
        )
    return torch.device("cuda")


def _compile_only(arguments: argparse.Namespace, directions: Sequence[TunedDirection], console: Console) -> int:
    target = choose_target(arguments.target, console)
    if target == "interpret" or not triton_is_installed():
        raise FlexgenError(
            f"the candidates cannot be compiled for {target}" if target == "interpret" else "triton is not installed",
            why="machine code is made by Triton, for a chip",
            fix="install triton, and choose a chip with --target",
        )
    subject = load_subject(arguments)
    told: list[dict[str, Any]] = []
    for direction in directions:
        query, key, value = subject.tensors("meta")
        asked = _tuned(subject, (query, key, value))
        trials = candidates(asked, direction, target, workers=arguments.jobs, track=console.progress)
        told.append({"direction": direction, "trials": [_trial_json(trial) for trial in trials]})
        if not arguments.json:
            write_candidates(f"candidates of the {direction} on {target}", trials, arguments.all, console)
    if arguments.json:
        console.text(json.dumps({"target": target, "directions": told}, indent=1) + "\n")
    return 0


# Telling.


def write_outcome(direction: str, outcome: Outcome, everything: bool, console: Console) -> None:
    """Write what was tried, the fastest first, and what is best."""
    tuned = outcome.tuned
    if outcome.trials:
        measured = sorted((t for t in outcome.trials if t.times), key=lambda t: t.times.median if t.times else 0.0)
        shown = measured if everything else measured[:SHOWN]
        console.line(Span(f"{direction}: the fastest of {counted(len(measured), 'measured candidate')}", "bold"))
        rows = [[_options_text(t), _time(t), *_costs(t)] for t in shown]
        console.table(("options", "time", *_COSTS), rows, left=1)
        _write_legend(console)
        _write_passed_over(outcome.trials, everything, console)
    else:
        console.note(f"{direction}: found on {tuned.date}, and stored; --again searches again")
    gain = tuned.usual_milliseconds / tuned.milliseconds
    best = settings_text(tuned.settings) if tuned.settings else "what flexgen decides by itself"
    console.line(
        Span(f"{direction}: {best}", "green"),
        f"  {duration(tuned.milliseconds / 1e3)}, {gain:.2f} times as fast as what flexgen decides by itself",
    )


def write_candidates(title: str, trials: Sequence[Trial], everything: bool, console: Console) -> None:
    """Write what candidates take, those without spills first."""
    compiled = [trial for trial in trials if trial.costs]
    compiled.sort(key=_offline_rank)
    console.line(Span(f"{title}: {len(compiled)} compiled of {len(trials)}", "bold"))
    shown = compiled if everything else compiled[:SHOWN]
    console.table(("options", *_COSTS), [[_options_text(t), *_costs(t)] for t in shown], left=1)
    _write_legend(console)
    if len(shown) < len(compiled):
        console.note(f"{len(compiled) - len(shown)} more are compiled; --all lists them")
    _write_passed_over(trials, everything, console)


def _offline_rank(trial: Trial) -> tuple[bool, float]:
    """Return what orders candidates that were not measured: spills in the loop last, fewer instructions first."""
    costs = trial.costs.values()
    return any(cost.local_in_loop for cost in costs), sum(cost.issued for cost in costs)


def _options_text(trial: Trial) -> str:
    """Return a candidate's settings without the prefix that all of its direction have."""
    return settings_text({name.removeprefix("fwd_").removeprefix("bwd_"): v for name, v in trial.settings.items()})


_COSTS = ("regs", "spilled", "programs", "loop", "issued")


def _costs(trial: Trial) -> list[str]:
    """Return the costs of a candidate's kernels, several separated by slashes."""
    costs = trial.costs.values()
    names = ("registers", "spilled_bytes", "programs", "loop")
    numbers = ["/".join(str(getattr(cost, name)) for cost in costs) for name in names]
    return [*numbers, "/".join(f"{cost.issued:.0f}" for cost in costs)]


def _time(trial: Trial) -> str:
    return duration(trial.times.median / 1e3) if trial.times else ""


_LEGEND = (
    "options of this direction; regs a thread; spilled bytes a thread; programs that a multiprocessor holds at a time; "
    "instructions of the main loop, and those that warps issue in it for 1000 pairs of query and key"
)


def _write_legend(console: Console) -> None:
    for line in wrapped(_LEGEND):
        console.line(Span(line, "dim"))


def _write_passed_over(trials: Sequence[Trial], everything: bool, console: Console) -> None:
    """Write how many candidates were not measured, or each with its reason."""
    for state in ("pruned", "same kernel", "failed"):
        passed = [trial for trial in trials if trial.state == state]
        if not passed:
            continue
        console.line(Span(f"{len(passed)} {_STATES[state]}", "dim"))
        for trial in passed if everything else []:
            console.line(Span(f"  {settings_text(trial.settings)}: {trial.why}", "dim"))


_STATES = {
    "pruned": "pruned: they do not fit the chip, or the problem",
    "same kernel": "lower to a kernel that another candidate lowers to",
    "failed": "do not compile, or do not run",
}


def _outcome_json(direction: str, outcome: Outcome) -> dict[str, Any]:
    tuned = outcome.tuned
    return {
        "direction": direction,
        "settings": dict(tuned.settings),
        "ms": tuned.milliseconds,
        "usual_ms": tuned.usual_milliseconds,
        "date": tuned.date,
        "trials": [_trial_json(trial) for trial in outcome.trials],
    }


def _trial_json(trial: Trial) -> dict[str, Any]:
    costs = {
        name: {field: getattr(cost, field) for field in cost.__dataclass_fields__} for name, cost in trial.costs.items()
    }
    return {
        "settings": dict(trial.settings),
        "group": trial.group,
        "state": trial.state,
        "why": trial.why,
        "ms": trial.times.median if trial.times else None,
        "costs": costs,
    }

"""The work report: what a kernel visits and computes at given sizes, and what bounds its time."""

from __future__ import annotations

from flexgen.lowering.chips import Chip
from flexgen.work import Bound, Sizes, Work, useful_flops

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_WALKED = {"forward": ("key and value", "queries"), "backward_dq": ("key and value", "queries")}
_UNITS = {"matrix unit": "FLOP/s", "memory": "B/s", "exponentials": "/s"}


def explain_work(work: Work, sizes: Sizes) -> str:
    """Return the work report of one kernel as text."""
    rows = work_rows(work, sizes)
    title = f"predicted work of {work.kernel}, shape {sizes}"
    return "\n".join([title, *(f"  {label:<18} {text}" for label, text in rows)]) + "\n"


def work_rows(work: Work, sizes: Sizes) -> list[tuple[str, str]]:
    """Return label and text of each line of the work report."""
    return [*_count_rows(work), *_chip_rows(work, sizes)]


def _count_rows(work: Work) -> list[tuple[str, str]]:
    visited, pairs = work.visited, work.visited.pairs
    estimated = ", estimated from a part of them" if visited.estimated else ""
    walked, owners = _WALKED.get(work.kernel, ("query and grad_output", "keys"))
    moved = ", ".join(f"{name} {quantity(number, 'B')}" for name, number in work.memory_bytes.items())
    return [
        ("live pairs", f"{visited.live:,} of {pairs:,} ({share(visited.live, pairs)}){estimated}"),
        (
            "visited pairs",
            f"{work.visited_pairs:,} in {visited.tiles:,} tiles: {share(visited.live, work.visited_pairs)} are live",
        ),
        (
            "matrix products",
            f"{quantity(work.flops, 'FLOP')}; live pairs alone take {quantity(work.live_flops, 'FLOP')}",
        ),
        ("exponentials", f"{quantity(work.exponentials, '')}, special functions of score_mod included".strip()),
        ("memory", f"{quantity(work.bytes, 'B')}, each element once: {moved}"),
        ("through L2", f"{quantity(work.cache_bytes, 'B')} of {walked}: each tile of {owners} loads its own"),
    ]


def _chip_rows(work: Work, sizes: Sizes) -> list[tuple[str, str]]:
    chip, bound = work.chip, work.bound
    if chip is None or bound is None:
        return [("times", "none: the interpreter has no rates" if chip is None else "none: nothing is computed")]
    times = "; ".join(f"{each.unit} {duration(each.seconds)} at {_rate(each)}" for each in work.bounds)
    splits = f" x {work.visited.splits} splits" if work.visited.splits > 1 else ""
    busy = f"{work.visited.programs:,}{splits} for {chip.multiprocessors} multiprocessors"
    idle = f": only {share(work.multiprocessors_used, 1)} of them work" if work.multiprocessors_used < 1 else ""
    return [
        ("intensity", f"{work.intensity:.0f} FLOP/B; {chip.name} balances at {_balance(work):.0f}"),
        ("programs", busy + idle),
        ("least times", times),
        ("bound", f"{bound.unit}: {duration(bound.seconds)} or more{_best(work, bound, sizes)}"),
        ("rates", _source(chip)),
    ]


def _balance(work: Work) -> float:
    rates = {bound.unit: bound.rate for bound in work.bounds}
    return rates["matrix unit"] / rates["memory"]


def _best(work: Work, bound: Bound, sizes: Sizes) -> str:
    """Return what the bound is in TFLOP/s over live pairs, as benchmarks state it; of the forward."""
    if work.kernel != "forward" or not work.visited.live:
        return ""
    best = useful_flops(sizes, work.visited.live) / bound.seconds
    return f", {_rounded(best / 1e12)} TFLOP/s over live pairs or less"


def _rate(bound: Bound) -> str:
    return quantity(bound.rate, _UNITS[bound.unit])


def _source(chip: Chip) -> str:
    return f"peaks of {chip.name} ({chip.source}), of the multiprocessors that work; another product's differ"


def quantity(number: float, unit: str) -> str:
    """Return a number with three digits and a prefix: "4.19 MB"."""
    for size, prefix in _PREFIXES:
        if number >= size:
            return f"{_rounded(number / size)} {prefix}{unit}"
    return f"{_rounded(number)} {unit}".rstrip()


def duration(seconds: float) -> str:
    """Return a time with three digits: "12.3 us"."""
    for size, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{_rounded(seconds / size)} {name}"
    return f"{_rounded(seconds / 1e-9)} ns"


def _rounded(number: float) -> str:
    """Return a number with three digits, never in the form 1e+03."""
    return f"{float(f'{number:.3g}'):g}"


def share(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{part / whole:.1%}" if whole else "0.0%"

"""The holes of the decode template: a forward kernel's, with the share of one split, and those of the combining one."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen.codegen.bounds_printer import PrintedRanges, SegmentNames
from flexgen.codegen.dialects.triton import pointer_type, type_name
from flexgen.codegen.forward_text import ForwardHoles, ForwardText
from flexgen.codegen.node_printer import PrintContext
from flexgen.codegen.sides import Side, dim_mask
from flexgen.codegen.source import Arg, Role
from flexgen.codegen.tile_args import stride_args
from flexgen.lowering.triton_decode.plan import DecodePlan


@dataclass(frozen=True, slots=True)
class CombineHoles:
    """Everything the combining kernel prints besides the plan; names that ForwardHoles has too mean the same."""

    params: tuple[str, ...]
    accumulator: str
    exponent_scale: str
    partial_mask: str
    row: str
    row_mask: str
    natural_max: str
    output_address: str
    output_mask: str
    kept_call: str
    args: tuple[Arg, ...]


class DecodeText(ForwardText):
    """Computes the holes of the kernel that attends to one split."""

    plan: DecodePlan
    many_ranges: bool

    def _print_ranges(self, context: PrintContext) -> PrintedRanges:
        printed = super()._print_ranges(context)
        self.many_ranges = len(printed.names) > 1
        lines = printed.lines + tuple(_share(printed.names))
        return PrintedRanges(lines, printed.names, printed.args, printed.prelude)

    def _own_args(self) -> list[Arg]:
        return [Arg("partials_ptr", Role.SCRATCH, "partials", None, pointer_type(self.plan.accumulator_dtype), True)]


def _share(names: tuple[SegmentNames, ...]) -> list[str]:
    """Return the statements that leave of each segment's tiles what this program visits."""
    if not names:
        return []
    lines = ["# This program's share of those tiles."]
    if len(names) == 1:
        lo, hi = names[0].lo, names[0].hi
        lines += [
            f"per_split = tl.cdiv(tl.maximum({hi} - {lo}, 0), splits)",
            f"{lo} = tl.minimum({lo} + split * per_split, {hi})",
            f"{hi} = tl.minimum({lo} + per_split, {hi})",
        ]
    else:
        counts = [f"tiles_{number}" for number in range(len(names))]
        lines += [f"{count} = {name.hi} - {name.lo}" for count, name in zip(counts, names, strict=True)]
        lines += [
            f"per_split = tl.cdiv({' + '.join(counts)}, splits)",
            "first = split * per_split",
            "past = first + per_split",
        ]
        for number, name in enumerate(names):
            before = "".join(f" - {count}" for count in counts[:number])
            lines.append(f"{name.lo}, {name.hi} = share({name.lo}, {name.hi}, first{before}, past{before})")
    for name in names:
        lines += _clamp_full(name)
    return lines


def _clamp_full(name: SegmentNames) -> list[str]:
    if name.full_lo is None or name.full_hi is None:
        return []
    lines = []
    if name.left_edge:
        lines.append(f"{name.full_lo} = tl.minimum(tl.maximum({name.full_lo}, {name.lo}), {name.hi})")
    lines.append(f"{name.full_hi} = tl.minimum(tl.maximum({name.full_hi}, {name.full_lo}), {name.hi})")
    return lines


def combine_holes(plan: DecodePlan, forward: ForwardHoles) -> CombineHoles:
    """Return the holes of the kernel that combines a plan's splits.

    Args:
        plan: with rows of one head, as the combining kernel has them.
        forward: of the kernel whose parts it combines.
    """
    unit = {*plan.unit_stride, "output"}
    side = Side("q_idx", "", "q", plan.wide, unit)
    v = dim_mask("v_dim", plan.V_HEAD_DIM, plan.V_HEAD_DIM_ROUNDED)
    args = tuple(_combine_args(plan, forward))
    return CombineHoles(
        params=tuple(arg.name for arg in args),
        accumulator=type_name(plan.accumulator_dtype),
        exponent_scale=forward.exponent_scale,
        partial_mask=" & ".join(term for term in ("split_exists[:, None]", v) if term),
        row="q_idx",
        row_mask="",
        natural_max=forward.natural_max,
        output_address=side.address("output", "v_dim"),
        output_mask=side.mask(v),
        kept_call=forward.kept_call,
        args=args,
    )


def _combine_args(plan: DecodePlan, forward: ForwardHoles) -> list[Arg]:
    outputs = [arg for arg in forward.args if arg.of in ("output", "logsumexp", "max_scores", "logsumexp_tail")]
    accumulator = pointer_type(plan.accumulator_dtype)
    args = [Arg("partials_ptr", Role.SCRATCH, "partials", None, accumulator, True)]
    args += [arg for arg in outputs if arg.role is Role.TENSOR]
    args += stride_args("output", "q", plan, {"output"})
    args += [Arg(name, Role.LENGTH, name, None, "i32", False) for name in ("Q_LEN", "Q_HEADS")]
    return [*args, Arg("splits", Role.SPLITS, "splits", None, "i32", False)]

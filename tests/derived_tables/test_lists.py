"""The lists that the kernels write are those that the rule tells, in both directions, each ascending and disjoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flexgen.capture.live import LiveMods
from flexgen.ir.graph import Axis
from flexgen.lowering.blocks import block_rule
from flexgen.pipeline import compile_table, understand
from flexgen.problem import Guard, TableForm
from flexgen.runtime.derived_table import DerivedTable, MaskValues
from flexgen.runtime.describe import Launch
from flexgen.runtime.device_target import target_of
from flexgen.runtime.table_kernels import TableKernels
from tests.analysis.brute_force import Grid
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS
from tests.derived_tables.block_grid import blocks_of

SHAPE = Shape(2, 4, 2, 75, 75)
Q_SIZE, KV_SIZE = 16, 8
NAMES = (
    "dilated_per_head",
    "documents_causal",
    "documents_per_batch_packed",
    "random_blocks",
    "neighbourhood_3d",
    "sliding_tile",
    "strided",
    "exclusive_or",
)


def derived(
    name: str, walked: Axis, device: torch.device, max_blocks: int | None
) -> tuple[DerivedTable, Tensor, Tensor]:
    """Return a table, and which blocks it is to list, [B, H, rows, columns], all and full ones."""
    reading = LiveMods(None, MASKS[name].build(SHAPE, device)).current()
    understood = understand(reading.captured)
    form = TableForm(Q_SIZE, KV_SIZE, True, derived=True)
    emitted = compile_table(understood, form, Guard(0, 0, False, False), target_of(device), walked)
    mask = understood.mods.mask
    assert mask is not None
    buffers = {buffer.name: value for buffer, value in zip(mask.buffers, reading.buffers, strict=True)}
    query = torch.empty(SHAPE.B, SHAPE.Hq, SHAPE.Lq, 1, device=device)
    extents = {"batch": SHAPE.B, "q_heads": SHAPE.Hq, "kv_heads": SHAPE.Hkv, "q_len": SHAPE.Lq, "kv_len": SHAPE.Lk}
    launch = Launch(**extents, tensors={"query": query}, scale=1.0, buffers=buffers)
    kernels = TableKernels(emitted.source, emitted.plan, understood.captured)
    table = kernels.build(launch, MaskValues(reading.buffers, ()), max_blocks)
    on_cpu = {name: value.cpu() for name, value in buffers.items()}
    grid = Grid(SHAPE.Lq, SHAPE.Lk, SHAPE.B, SHAPE.Hq, on_cpu)
    blocks = blocks_of(block_rule(mask), mask.root, grid, Q_SIZE, KV_SIZE)
    blocks.check()
    listed = blocks.full | (blocks.listed & blocks.live) if emitted.plan.drops_empty else blocks.listed
    sides = (listed, blocks.full)
    return table, *(sides if walked is Axis.KV else (side.transpose(2, 3) for side in sides))


def listed(table: DerivedTable, axis: str, columns: int) -> tuple[Tensor, Tensor]:
    """Return which blocks the lists hold, checking that each is listed once and in order."""
    lists = {name: tensor.cpu() for name, tensor in table.lists.items()}
    shape = lists[f"{axis}_num_blocks"].shape
    found = torch.zeros(2, *shape, columns, dtype=torch.bool)
    for b, h, row in torch.cartesian_prod(*map(torch.arange, shape)).tolist():
        start = int(lists[f"{axis}_offsets"][b, h, row])
        for kind, name in enumerate((f"{axis}_num_blocks", f"full_{axis}_num_blocks")):
            count = int(lists[name][b, h, row])
            entries = lists[f"{axis}_indices"][start : start + count].long()
            assert (entries.diff() > 0).all(), "a list is not ascending"
            found[kind, b, h, row, entries] = True
            start += count
    assert not (found[0] & found[1]).any(), "a block is listed twice"
    return found[0] | found[1], found[1]


@pytest.mark.parametrize("walked", [Axis.KV, Axis.Q], ids=lambda axis: axis.value)
@pytest.mark.parametrize("name", NAMES)
def test_lists_hold_what_the_rule_tells(name: str, walked: Axis, device: torch.device) -> None:
    table, everything, full = derived(name, walked, device, None)
    found = listed(table, walked.value, everything.shape[3])
    assert found[0].equal(everything)
    assert found[1].equal(full)
    sizes = table.sizes
    assert table.capacity == int(table.needed) == int(everything[: sizes.batch, : sizes.heads].sum())


@pytest.mark.parametrize("walked", [Axis.KV, Axis.Q], ids=lambda axis: axis.value)
@pytest.mark.parametrize(
    ("name", "max_blocks"),
    [
        ("dense_table", None),
        ("dense_table_transposed", None),
        ("table_of_pairs_per_head", None),
        ("table_of_pairs_per_head", 45),
    ],
)
def test_blocks_that_the_rule_cannot_tell_from_empty_are_evaluated(
    name: str, max_blocks: int | None, walked: Axis, device: torch.device
) -> None:
    table, everything, full = derived(name, walked, device, max_blocks)
    found = listed(table, walked.value, everything.shape[3])
    fits = ~found[0].all(-1) if max_blocks is not None else torch.ones(found[0].shape[:3], dtype=torch.bool)
    assert fits.any()
    assert fits.all() == (max_blocks is None)
    assert found[0][fits].equal(everything[fits])
    assert found[1][fits].equal(full[fits])


def test_rows_that_do_not_fit_list_every_block(device: torch.device) -> None:
    table, everything, full = derived("documents_causal", Axis.KV, device, 7)
    found = listed(table, "kv", everything.shape[3])
    counts = everything[0, 0].sum(-1)
    fits = counts.cumsum(0) <= 7
    assert fits.any()
    assert not fits.all()
    assert found[0][0, 0, fits].equal(everything[0, 0, fits])
    assert found[1][0, 0, fits].equal(full[0, 0, fits])
    assert found[0][0, 0, ~fits].all()
    assert not found[1][0, 0, ~fits].any()

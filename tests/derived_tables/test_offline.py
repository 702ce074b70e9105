"""The kernels that derive tables compile for GPUs without one."""

from __future__ import annotations

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.ir.graph import Axis
from flexgen.lowering.targets import target_named
from flexgen.pipeline import compile_table, understand
from flexgen.problem import Guard, TableForm
from flexgen.runtime.load import module_of
from tests.corpus.case import Shape
from tests.corpus.masks import MASKS

SHAPE = Shape(2, 4, 2, 256, 256)
GUARD = Guard(0, 0, True, True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("name", "walked"),
    [
        ("documents_per_batch_packed", Axis.KV),
        ("documents_per_batch_packed", Axis.Q),
        ("dilated_per_head", Axis.KV),
        ("random_blocks", Axis.KV),
        ("strided", Axis.Q),
        ("table_of_pairs_per_head", Axis.KV),
        ("table_of_pairs_per_head", Axis.Q),
    ],
)
def test_table_kernels_compile_offline(name: str, walked: Axis, target: str) -> None:
    build = pytest.importorskip("flexgen.runtime.build")
    understood = understand(LiveMods(None, MASKS[name].build(SHAPE, torch.device("cpu"))).current().captured)
    kernel = compile_table(understood, TableForm(128, 64, True, derived=True), GUARD, target_named(target), walked)
    drop = [kernel.source.drop] if kernel.source.drop else []
    assert bool(drop) == (name == "table_of_pairs_per_head")
    for source in (*kernel.source.summaries.values(), kernel.source.count, kernel.source.fill, *drop):
        module = module_of(source)
        positions = frozenset(at for at, arg in enumerate(source.args) if arg.specialize)
        binary = build.compile_entry(
            module, source.entry, source.args, kernel.plan.target, num_warps=4, num_stages=1, divisible=positions
        )
        assert binary.kernel

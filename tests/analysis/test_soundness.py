"""Random masks over the whole op set: the analysis never says anything that brute force refutes."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexgen.ir.graph import Node
from tests.analysis.brute_force import Grid, check_mask
from tests.analysis.expressions import masks

Q_LEN, KV_LEN, BATCHES, HEADS = 11, 13, 2, 3
_VALUES = st.sampled_from([0, 1, 2, 3, 5, 8, 11, 14, -1, -4, 2**31 - 1, -(2**31)])
_SCALARS = st.sampled_from([0, 1, -1, 4, -7, 12, 2**31, -(2**40), 2**48, -(2**48)])


def table(draw: st.DrawFn, size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(draw(st.lists(_VALUES, min_size=size, max_size=size)), dtype=dtype)


def flags(draw: st.DrawFn, size: int) -> torch.Tensor:
    return torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    buffers = {
        "per_head": table(draw, HEADS),
        "per_batch": table(draw, BATCHES, torch.int64),
        "per_query": table(draw, Q_LEN),
        "per_key": table(draw, KV_LEN),
        "starts": table(draw, max(Q_LEN, KV_LEN)),
        "query_flag": flags(draw, Q_LEN),
        "key_flag": flags(draw, KV_LEN),
    }
    return Grid(Q_LEN, KV_LEN, BATCHES, HEADS, buffers, {"offset": draw(_SCALARS)})


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(masks(), grids())
def test_bounds_of_random_masks_are_sound(mask: Node, grid: Grid) -> None:
    check_mask(mask, grid)

"""The ranges that the simplifier relies on hold every value that evaluation gives."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from flexgen.ir.evaluate import evaluate
from flexgen.ir.graph import Graph, Node, const, input_node, make
from flexgen.ir.parse import parse_graph
from flexgen.ir.ranges import Range, Ranges
from tests.ir import random_graphs


@settings(max_examples=100, deadline=None)
@given(random_graphs.graphs("score", exact=True))
def test_range_holds_every_value(graph: Graph) -> None:
    arguments, ranges = random_graphs.awkward_arguments(), Ranges()
    for node in graph.nodes():
        found = ranges.of(node)
        if found is not None:
            part = dataclasses.replace(graph, root=node)
            values = evaluate(part, arguments.inputs, arguments.buffers, arguments.scalars)
            assert found.low <= int(values.min()) and int(values.max()) <= found.high, node


@pytest.mark.parametrize(
    ("expression", "low", "high"),
    [
        ("sub(q_idx, kv_idx)", -(2**31) + 1, 2**31 - 1),
        ("mod(n, 8)", 0, 7),
        ("floordiv(sub(q_idx, 5), 2)", -3, 2**30 - 3),
        ("abs(sub(q_idx, 5))", 0, 2**31 - 6),
        ("and(n, 15)", 0, 15),
        ("where(ge(q_idx, n), 3, -4)", -4, 3),
        ("cast(ge(q_idx, n), int64)", 0, 1),
        ("add(n, 1)", -(2**63), 2**63 - 1),
    ],
)
def test_range_is_as_narrow_as_the_rule_allows(expression: str, low: int, high: int) -> None:
    root = parse_graph(f"mask m(b, h, q_idx, kv_idx) scalars: n int64 return {expression}").root
    assert Ranges().of(root) == Range(low, high)


def test_a_deep_node_needs_no_recursion_and_a_floating_one_has_no_range() -> None:
    node: Node = input_node("q_idx")
    for _ in range(10_000):
        node = make("min", node, const(7, torch.int64), dtype=torch.int64)
    assert Ranges().of(node) == Range(0, 7)
    assert Ranges().of(make("cast", node, dtype=torch.float32)) is None
    assert len(repr(node)) < 100

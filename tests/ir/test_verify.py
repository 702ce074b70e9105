"""The verifier finds each broken rule and shows the IR."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from flexgen.errors import InternalError
from flexgen.ir.graph import ALL_AXES, Attr, Buffer, Graph, Mods, Node, Scalar, const, input_node, make
from flexgen.ir.rule import Rule
from flexgen.ir.simplify import simplify
from flexgen.ir.verify import verify
from tests.ir import random_graphs

Q, KV = input_node("q_idx"), input_node("kv_idx")
SCORE = input_node("score", torch.float32)
IDS = Buffer("ids", torch.int32, (None,), ("1",))
LIMIT = Scalar("limit", torch.int64)
CAUSAL = make("ge", Q, KV, dtype=torch.bool)


def _mask(root: Node, *, buffers: tuple[Buffer, ...] = (), scalars: tuple[Scalar, ...] = ()) -> Graph:
    return Graph("mask", "m", root, buffers, scalars)


def _true_if(node: Node) -> Node:
    return make("ne", node, node, dtype=torch.bool)


def _int(op: str, *args: Node, attr: Attr = None, dtype: torch.dtype = torch.int64) -> Node:
    return _true_if(make(op, *args, attr=attr, dtype=dtype))


BROKEN = [
    ("the root of a mask is bool, not int64", _mask(Q)),
    ("the root of a score is floating, not bool", Graph("score", "m", CAUSAL)),
    ("takes 2 arguments", _mask(make("ge", Q, dtype=torch.bool))),
    ("the arguments have the dtype of the result", _mask(_int("add", Q, const(1, torch.int32)))),
    ("not defined on bool", _mask(_int("add", CAUSAL, CAUSAL, dtype=torch.bool))),
    ("not defined on int64", _mask(_int("exp", Q))),
    ("not defined on float32", _mask(_int("and", *(const(1.0, torch.float32),) * 2, dtype=torch.float32))),
    ("not defined on bool", _mask(_int("shl", CAUSAL, CAUSAL, dtype=torch.bool))),
    ("compares two values of one dtype", _mask(make("ge", Q, const(1, torch.int32), dtype=torch.bool))),
    ("compares two values of one dtype and gives bool", _mask(_int("ge", Q, KV))),
    ("selects by a bool", _mask(_int("where", Q, Q, KV))),
    ("selects by a bool", _mask(_int("where", CAUSAL, Q, const(1, torch.int32)))),
    ("complex values are not supported", _mask(_int("cast", Q, dtype=torch.complex64))),
    ("only leaves have an attribute", _mask(make("ge", Q, KV, attr="x", dtype=torch.bool))),
    ("the value of a bool constant is a bool", _mask(make("const", attr=1, dtype=torch.bool))),
    ("the value of a float32 constant is a float", _mask(_int("const", attr=1, dtype=torch.float32))),
    ("300 does not fit uint8", _mask(_int("const", attr=300, dtype=torch.uint8))),
    ("'z' is no input of a mask mod", _mask(_true_if(input_node("z")))),
    ("'score' is no input of a mask mod", _mask(_true_if(SCORE))),
    ("input 'score' cannot be int64", Graph("score", "m", make("cast", input_node("score"), dtype=torch.float32))),
    ("input 'q_idx' cannot be float32", _mask(_true_if(input_node("q_idx", torch.float32)))),
    ("is read in two dtypes", _mask(make("and", _true_if(Q), _true_if(input_node("q_idx", torch.int32)),
                                         dtype=torch.bool))),
    ("the buffer is not declared", _mask(_int("load", Q, attr="ids", dtype=torch.int32))),
    ("the buffer has 1 dimensions", _mask(_int("load", Q, KV, attr="ids", dtype=torch.int32), buffers=(IDS,))),
    ("the buffer is declared int32", _mask(_int("load", Q, attr="ids"), buffers=(IDS,))),
    ("indices are integers", _mask(_int("load", CAUSAL, attr="ids", dtype=torch.int32), buffers=(IDS,))),
    ("the scalar is not declared", _mask(_int("scalar", attr="limit"))),
    ("the scalar is declared int64", _mask(_int("scalar", attr="limit", dtype=torch.int32), scalars=(LIMIT,))),
    ("a dimension that is not declared", _mask(_int("scalar", attr="ids.size(0)"))),
    ("a dimension that is not declared", _mask(_int("scalar", attr="ids.size(1)"), buffers=(IDS,))),
    ("a size is int64", _mask(_int("scalar", attr="ids.size(0)", dtype=torch.int32), buffers=(IDS,))),
    ("'ids' is declared but not used", _mask(CAUSAL, buffers=(IDS,))),
    ("'limit' is declared but not used", _mask(CAUSAL, scalars=(LIMIT,))),
    ("names more than one captured value", _mask(_int("scalar", attr="ids"), buffers=(IDS,),
                                                 scalars=(Scalar("ids", torch.int64),))),
    ("is no identifier", _mask(_int("scalar", attr="a b"), scalars=(Scalar("a b", torch.int64),))),
    ("has 1 sizes and 0 strides", _mask(_int("load", Q, attr="t", dtype=torch.int32),
                                        buffers=(Buffer("t", torch.int32, (None,), ()),))),
    ("the node is not interned", _mask(Node("ge", (Q, KV), None, torch.bool, ALL_AXES))),
]  # fmt: skip


@pytest.mark.parametrize(("problem", "graph"), BROKEN)
def test_broken_rule_is_found(problem: str, graph: Graph) -> None:
    with pytest.raises(InternalError) as caught:
        verify(graph)
    assert problem in str(caught.value)
    assert f"{graph.kind} m(" in str(caught.value)


def test_a_broken_rule_of_the_simplifier_is_named_with_the_ir_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that makes a node of the wrong dtype, beside the real ones."""
    breaks = Rule("breaks it", frozenset({"ge"}), lambda node, ranges: make("add", *node.args, dtype=torch.int64))
    monkeypatch.setattr("flexgen.ir.simplify._RULES_BY_OP", {"ge": (breaks,)})
    with pytest.raises(InternalError) as caught:
        simplify(Mods(mask=_mask(CAUSAL)))
    told = str(caught.value)
    assert "the root of a mask is bool, not int64" in told
    assert "mask m(b, h, q_idx, kv_idx)" in told and "add(q_idx, kv_idx)" in told
    assert "round 1 of the simplifier broke it, with the rules: breaks it" in told
    assert "please report it, with this whole message" in told


@settings(max_examples=50, deadline=None)
@given(random_graphs.mods())
def test_well_formed_mods_pass(mods: Mods) -> None:
    verify(mods)


def test_a_graph_in_the_wrong_place_is_found() -> None:
    with pytest.raises(InternalError, match="the score mod is a mask graph"):
        verify(Mods(score=_mask(CAUSAL)))


def test_mods_that_disagree_on_a_buffer_are_found() -> None:
    load = make("load", Q, attr="ids", dtype=torch.int32)
    mask = _mask(_true_if(load), buffers=(IDS,))
    other = Buffer("ids", torch.int32, (4,), ("1",))
    score = Graph("score", "m", make("cast", load, dtype=torch.float32), (other,))
    verify(mask)
    verify(score)
    with pytest.raises(InternalError, match="'ids' names more than one captured value"):
        verify(Mods(score, mask))


def test_a_broken_graph_of_ten_thousand_nodes_gives_a_message_of_bounded_length() -> None:
    node = Q
    for _ in range(10_000):
        node = make("add", node, const(1, torch.int32), dtype=torch.int64)
    with pytest.raises(InternalError, match="breaks 10001 rule") as caught:
        verify(_mask(node))
    assert len(str(caught.value).split("\n")) < 250

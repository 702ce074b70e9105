"""The text of mods: readable, stable, and it parses back to the very same nodes."""

from __future__ import annotations

import contextlib
import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen.errors import IRTextError, SourceSpan
from flexgen.ir.dtypes import DTYPES
from flexgen.ir.graph import Buffer, Graph, Mods, Node, Scalar, const, input_node, make
from flexgen.ir.names import Names, is_safe, safe_name
from flexgen.ir.origins import Origin, Origins
from flexgen.ir.parse import parse_graph, parse_mods
from flexgen.ir.text import LINE_LENGTH, print_graph, print_mods
from tests.ir import random_graphs

DOCUMENT = """\
mask doc_mask(b, h, q_idx, kv_idx)   buffers: document_id int32[*](1)   scalars: window int64
  # same_doc = document_id[q_idx] == document_id[kv_idx]
  same_doc = eq(load(document_id, q_idx), load(document_id, kv_idx))   bool  {q, kv}
  # return same_doc & (q_idx - kv_idx <= window)
  return and(same_doc, le(sub(q_idx, kv_idx), window))   bool  {q, kv}
"""
HOSTILE = [
    "größe", "変数", "x y", "", "return", "lambda", "True", "nan", "inf", "buffers", "scalars", "grad", "score", "mask",
    "q_idx", "load", "add", "float32", "v1", "a\nreturn b", 'q"uote', "back\\slash", "# no comment", "9lives",
    "x.size(0)",    "\ud800", "\u2028", "x" * 300,
]  # fmt: skip


def _origin(variable: str | None, text: str, line: int = 1) -> Origin:
    return Origin(variable, SourceSpan("mods.py", line, 0, line, len(text), text))


def test_text_has_the_users_names_and_lines() -> None:
    mods = parse_mods(DOCUMENT)
    root = mods.graphs()[0].root
    lines = [line.strip()[2:] for line in DOCUMENT.splitlines() if "#" in line]
    origins = Origins({root.args[0]: (_origin("same_doc", lines[0]),), root: (_origin(None, "    " + lines[1]),)})
    assert print_mods(mods, origins) == DOCUMENT


@settings(max_examples=200, deadline=None)
@given(random_graphs.mods())
def test_text_parses_back_to_the_same_nodes(mods: Mods) -> None:
    text = print_mods(mods)
    assert parse_mods(text) == mods
    assert print_mods(parse_mods(text)) == text
    assert max(map(len, text.split("\n"))) <= LINE_LENGTH


@settings(max_examples=100, deadline=None)
@given(random_graphs.graphs("score"), st.data())
def test_no_name_or_line_of_the_user_breaks_the_text(graph: Graph, data: st.DataObject) -> None:
    names = st.sampled_from(HOSTILE) | st.text(max_size=12)
    nodes = [node for node in graph.nodes() if data.draw(st.booleans())]
    origins = Origins({node: (_origin(data.draw(names), data.draw(names)),) for node in nodes})
    text = print_graph(graph, origins)
    assert parse_graph(text) == graph
    assert max(map(len, text.split("\n"))) <= LINE_LENGTH
    assert all(char in string.printable or char.isprintable() for char in text)


@pytest.mark.parametrize("name", HOSTILE)
def test_captured_values_may_have_any_name(name: str) -> None:
    buffer, scalar = Buffer(name, torch.float32, (None,), ("1",)), Scalar(name + "'", torch.float32)
    loaded = make("load", make("scalar", attr=f"{name}.size(0)", dtype=torch.int64), attr=name, dtype=torch.float32)
    root = make("add", loaded, make("scalar", attr=scalar.name, dtype=torch.float32), dtype=torch.float32)
    graph = Graph("score", name, root, (buffer,), (scalar,))
    assert parse_graph(print_graph(graph)) == graph


def test_a_variable_named_grad_is_not_taken_for_what_follows_a_buffer() -> None:
    row = make("load", input_node("q_idx"), attr="table", dtype=torch.float32)
    table = Buffer("table", torch.float32, (8,), ("1",))
    graph = Graph("score", "mod", make("neg", row, dtype=torch.float32), (table,))
    text = print_graph(graph, Origins({row: (_origin("grad", "grad = table[q_idx]"),)}))
    assert parse_graph(text) == graph


def test_a_scalar_named_like_an_input_is_told_apart() -> None:
    root = make("gt", input_node("h"), make("scalar", attr="h", dtype=torch.int64), dtype=torch.bool)
    graph = Graph("mask", "m", root, scalars=(Scalar("h", torch.int64),))
    assert "gt(h, scalar(h))" in print_graph(graph)
    assert parse_graph(print_graph(graph)) == graph


@pytest.mark.parametrize(
    "value", [*random_graphs.FLOATS, 1e-45, 5e-324, 1.7976931348623157e308, 1 / 3, -1e-7, 123456.0]
)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if dtype.is_floating_point])
def test_float_constants_are_exact(value: float, dtype: torch.dtype) -> None:
    node = const(value, dtype)
    assert parse_graph(print_graph(Graph("score", "m", node))).root is node


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES.values() if not dtype.is_floating_point])
def test_integer_constants_are_exact(dtype: torch.dtype) -> None:
    for value in (0, 1, 2**63 - 1, -(2**63)):
        node = const(value, dtype)
        assert parse_graph(print_graph(Graph("mask", "m", node))).root is node


@pytest.mark.parametrize(
    "declaration",
    ["t float32[]()", "t bool[*](0) grad", "t bfloat16[3, *, 0](*, 0, 1)", "t float8_e4m3fn[*](1), u int8[2](1)"],
)
def test_declarations_parse_back(declaration: str) -> None:
    text = f"score m(score, b, h, q_idx, kv_idx)   buffers: {declaration}   scalars: a int64\n  return 1.0\n"
    assert print_graph(parse_graph(text)) == text


def test_inputs_of_unusual_dtypes_are_annotated() -> None:
    text = "score m(score: bfloat16, b, h, q_idx: int32, kv_idx)\n  return add(score, cast(q_idx, bfloat16))   bfloat16"
    graph = parse_graph(text + "  {b, h, q, kv}")
    assert print_graph(graph) == text + "  {b, h, q, kv}\n"


def test_no_mods_have_an_empty_text() -> None:
    assert parse_mods(print_mods(Mods())) == Mods()


def test_a_long_header_wraps() -> None:
    buffers = tuple(Buffer(f"relative_position_table_{i}", torch.float32, (None,) * 3, ("*",) * 3) for i in range(9))
    graph = Graph("score", "m", const(0.0, torch.float32), buffers)
    text = print_graph(graph)
    assert max(map(len, text.split("\n"))) <= LINE_LENGTH
    assert parse_graph(text) == graph


def test_a_value_used_twice_is_printed_once() -> None:
    root: Node = input_node("score", torch.float32)
    for _ in range(60):
        root = make("mul", root, root, dtype=torch.float32)
    text = print_graph(Graph("score", "m", root))
    assert len(text.split("\n")) < 65


def test_variables_assigned_again_stay_apart() -> None:
    x = make("exp", input_node("score", torch.float32), dtype=torch.float32)
    root = make("tanh", x, dtype=torch.float32)
    origins = Origins({node: (Origin("x", None),) for node in (x, root)})
    lines = print_graph(Graph("score", "m", root), origins).split("\n")
    assert [line.split("  ")[1] for line in lines[1:4]] == ["x = exp(score)", "x_2 = tanh(x)", "return x_2"]


def test_a_users_line_cannot_leave_its_comment() -> None:
    root = make("tanh", input_node("score", torch.float32), dtype=torch.float32)
    graph = Graph("score", "m", root)
    origins = Origins({root: (_origin(None, "x\nreturn 0.0\r\u2028\u202e" + "y" * 200),)})
    text = print_graph(graph, origins)
    assert text.split("\n")[1].startswith("  # x\\nreturn 0.0\\r\\u2028\\u202eyyy")
    assert parse_graph(text) == graph


def test_ten_thousand_nested_operations_print_and_parse() -> None:
    root: Node = input_node("score", torch.float32)
    for number in range(10_000):
        root = make("mul", root, const(number + 0.5, torch.float32), dtype=torch.float32)
    graph = Graph("score", "deep", root)
    assert parse_graph(print_graph(graph)) is not None
    assert parse_graph(print_graph(graph)).root is root


MASK = "mask m(b, h, q_idx, kv_idx) buffers: t int32[*](1) scalars: n int64 "


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "expected a name"),
        ("kernel m() return 1", "expected 'score' or 'mask'"),
        ("mask m(b, h", "expected ','"),
        (MASK + "return eq(load(u, q_idx), 0:int32)", "no buffer 'u'"),
        (MASK + "return eq(u.size(0), n)", "no buffer 'u'"),
        (MASK + "return ge(q, n)", "nothing is called 'q'"),
        (MASK + "return ge(q_idx)", "no operation 'ge' takes 1"),
        (MASK + "return input(z)", "'z' is no parameter"),
        (MASK + "return gee(q_idx, n)", "no operation 'gee'"),
        (MASK + "return ge(q_idx, n) int64 {q}", "the expression is bool  {q}"),
        (MASK + "return ge(q_idx, n) bool {kv}", "the expression is bool  {q}"),
        (MASK + "x = ge(q_idx, n) bool {q} x = n int64 {} return x", "defined twice"),
        (MASK + "x = ge(q_idx, n) return x", "expected a dtype"),
        (MASK + "return ge(q_idx, n) bool {q} extra", "more text"),
        (MASK + "return ge(q_idx, 1:int65)", "expected a dtype"),
        (MASK + "return ge(q_idx, ?)", "a character"),
        (MASK + 'return ge("unended', "a character"),
        (MASK + "return " + "not(" * 100_000, "nested too deeply"),
        (MASK + "return gt(q_idx, " + "9" * 5000 + ")", "too long"),
        ("mask m(b) buffers: t int32[*]() return True", "as many strides"),
        ("mask m(b) buffers: t int32[*](2) return True", "a stride class"),
        ("mask m(b) buffers: t int32[-1](1) return True", "expected a count"),
        ("mask m(b, b) return True", "defined twice"),
        ("mask m(b) scalars: n int64, n int64 return True", "declared twice"),
    ],
)  # fmt: skip
def test_what_does_not_parse_is_refused_with_its_place(text: str, what: str) -> None:
    with pytest.raises(IRTextError) as caught:
        parse_graph(text)
    assert what in caught.value.what
    assert caught.value.where is not None and caught.value.where.line == 1


def test_a_mod_given_twice_is_refused() -> None:
    with pytest.raises(IRTextError, match="a second mask graph"):
        parse_mods("mask m(b) return True\nmask n(b) return False")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_text_parses_or_is_refused(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(DOCUMENT)))
    stop = data.draw(st.integers(start, min(len(DOCUMENT), start + 20)))
    inserted = data.draw(st.text(alphabet='()[]{}:,=.*"#\\-0e8 \nbqv', max_size=4))
    with contextlib.suppress(IRTextError):  # and no other error
        parse_mods(DOCUMENT[:start] + inserted + DOCUMENT[stop:])


@given(st.lists(st.sampled_from(HOSTILE) | st.text(max_size=30), max_size=30))
def test_names_are_safe_and_unique(wanted: list[str]) -> None:
    names = Names(["q_idx", "x"])
    given_out = [names.unique(name) for name in wanted] + [names.temporary() for _ in range(3)]
    assert len({"q_idx", "x", *given_out}) == len(given_out) + 2
    assert all(is_safe(name) for name in given_out)


def test_names_stay_recognisable() -> None:
    assert [safe_name(name) for name in ("größe", "naïve", "_Attention__w")] == ["grosse", "naive", "_Attention__w"]
    assert safe_name("x" * 300) == "x" * 24

"""Nodes know the user's line and variable; captured values keep the user's names, made safe."""

from __future__ import annotations

import pytest
import torch

from flexgen.capture.live import LiveMods
from flexgen.capture.names import NameTable
from flexgen.ir.graph import topological
from flexgen.ir.verify import verify


def test_operation_bears_its_line_and_the_variable_it_is_assigned_to() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        distance = (q_idx - kv_idx).abs()
        bias, scaled = distance * 0.5, score * 2
        return scaled - bias

    captured = LiveMods(mod).current().captured
    assert captured.mods.score is not None
    spans = {node.op: captured.origins.span(node) for node in topological(captured.mods.score.root)}
    names = {captured.origins.variable(node): node.op for node in topological(captured.mods.score.root)}
    assert names["distance"] == "abs"
    assert names["bias"] == "mul"
    assert spans["abs"] is not None
    assert spans["abs"].text[spans["abs"].column : spans["abs"].end_column] == "(q_idx - kv_idx).abs()"


def test_conversion_inside_an_operation_does_not_take_the_variable() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        bias = q_idx * 0.5
        return score + bias

    captured = LiveMods(mod).current().captured
    assert captured.mods.score is not None
    by_op = {node.op: captured.origins.variable(node) for node in topological(captured.mods.score.root)}
    assert by_op["cast"] is None
    assert by_op["mul"] == "bias"


def test_columns_count_characters_not_bytes() -> None:
    def mod(score, b, h, q_idx, kv_idx):
        größe = q_idx * 2
        return größe + kv_idx

    captured = LiveMods(mod).current().captured
    assert captured.mods.score is not None
    span = captured.origins.span(captured.mods.score.root)
    assert span is not None
    assert span.text[span.column : span.end_column] == "größe + kv_idx"


def test_value_computed_in_a_helper_is_located_there() -> None:
    def helper(x):
        return x * 3

    captured = LiveMods(None, lambda b, h, q, k: helper(q) > k).current().captured
    assert captured.mods.mask is not None
    lines = {
        span.text.strip()
        for node in topological(captured.mods.mask.root)
        if node.op == "mul" and (span := captured.origins.span(node))
    }
    assert lines == {"return x * 3"}


def test_mod_without_source_is_captured_with_poorer_provenance() -> None:
    namespace: dict[str, object] = {}
    exec("def mod(b, h, q, k):\n    x = q + 1\n    return x >= k", namespace)
    captured = LiveMods(None, namespace["mod"]).current().captured  # type: ignore[arg-type]
    assert captured.mods.mask is not None
    span = captured.origins.span(captured.mods.mask.root)
    assert span is not None
    assert (span.line, span.text) == (3, "")


def test_two_lambdas_on_one_line_are_told_apart() -> None:
    first, second = (lambda b, h, q, k: q > k), (lambda b, h, q, k: q < k)
    for mod, text in ((first, "q > k"), (second, "q < k")):
        captured = LiveMods(None, mod).current().captured
        assert captured.mods.mask is not None
        span = captured.origins.span(captured.mods.mask.root)
        assert span is not None
        assert span.text[span.column : span.end_column] == text


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("table", "table"),
        ("score", "score_buffer"),
        ("BLOCK_M", "BLOCK_M_buffer"),
        ("tl", "tl_buffer"),
        ("β", "beta"),
        ("größe", "grose"),
        ("_private", "private"),
        ("class", "class_buffer"),
        ("", "buffer"),
        ("1st", "buffer_1st"),
    ],
)
def test_captured_names_are_safe_identifiers(wanted: str, name: str) -> None:
    assert NameTable().claim(wanted, suffix="buffer") == name


def test_captured_names_are_unique() -> None:
    names = NameTable()
    assert [names.claim("bias", suffix="buffer") for _ in range(3)] == ["bias", "bias_2", "bias_3"]


def test_colliding_names_give_valid_graphs() -> None:
    q_idx, inf, BLOCK_M = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    mods = LiveMods(lambda s, b, h, q, k: s + q_idx[q] + inf[k] + BLOCK_M[q]).current().captured.mods
    verify(mods)
    assert len(mods.buffers) == 3

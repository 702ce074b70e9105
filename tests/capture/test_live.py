"""Captured values are re-read at every call, and a mod is traced again only when a guard misses."""

# ruff: noqa: B007, B023 -- loops here rebind the very variables that the mods close over

from __future__ import annotations

import copy
import functools
import pickle
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import and_masks, or_masks

from flexgen.capture import live as live_module
from flexgen.capture.live import LiveMods
from flexgen.ir.graph import Mods, Scalar, topological
from tests.capture.meaning import assert_same_meaning, captured, direct

WINDOW = 3
OFFSET = 0.5


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of mods traced so far in this test."""
    seen: list[str] = []
    trace = live_module.trace_mod

    def counting(kind, *args):
        seen.append(kind)
        return trace(kind, *args)

    monkeypatch.setattr(live_module, "trace_mod", counting)
    return seen


def constants(mods: Mods) -> set[object]:
    return {node.attr for graph in mods.graphs() for node in topological(graph.root) if node.op == "const"}


def test_second_reading_does_not_trace(traces: list[str]) -> None:
    table = torch.zeros(8)
    mods = LiveMods(lambda s, b, h, q, k: s + table[q], lambda b, h, q, k: q >= k)
    first, second = mods.current(), mods.current()
    assert traces == ["score", "mask"]
    assert first.captured is second.captured
    assert second.buffers[0] is table


def test_rebound_closure_variable_is_seen_without_tracing(traces: list[str]) -> None:
    table = torch.zeros(8)

    def mod(s, b, h, q, k):
        return s + table[q]

    mods = LiveMods(mod)
    mods.current()
    table = torch.ones(16)
    assert mods.current().buffers[0] is table
    assert len(traces) == 1


def changed(table: torch.Tensor, how: str) -> torch.Tensor:
    match how:
        case "dtype":
            return table.double()
        case "rank":
            return table[None].expand(8, 8)
        case "stride":
            return table.repeat_interleave(2)[::2]
        case "broadcast":
            return table[:1].expand(8)
        case "gradient":
            return table.clone().requires_grad_()
    raise AssertionError(how)


@pytest.mark.parametrize("how", ["dtype", "rank", "stride", "broadcast", "gradient"])
def test_tensor_of_another_class_is_captured_anew_and_both_are_kept(how: str, traces: list[str]) -> None:
    table = first = torch.zeros(8)
    mods = LiveMods(lambda s, b, h, q, k: s + table[q].sum())
    mods.current()
    table = changed(first, how)
    assert mods.current().captured.mods.buffers[0].dtype == table.dtype
    table = first
    mods.current()
    assert len(traces) == 2


def test_size_is_guarded_only_where_it_was_read(traces: list[str]) -> None:
    table = torch.zeros(8, dtype=torch.bool)
    free, read = (
        LiveMods(None, lambda b, h, q, k: table[q - k]),
        LiveMods(None, lambda b, h, q, k: table[q % len(table)]),
    )
    for _ in range(2):
        free.current(), read.current()
        table = torch.zeros(9, dtype=torch.bool)
    assert len(traces) == 3


def test_changing_number_becomes_a_run_time_scalar_at_its_second_value(traces: list[str]) -> None:
    window, scale = 3, 0.5
    mods = LiveMods(lambda s, b, h, q, k: torch.where(q - k < window // 2 + 1, s * scale, s - window))
    assert mods.current().scalars == ()
    window = 5
    assert mods.current().captured.mods.scalars == (Scalar("window", torch.int64),)
    scale = 0.25
    mods.current()
    for window in (7, 9, -1, 2**40):
        for scale in (1.5, -2.0):
            assert sorted(mods.current().scalars) == sorted((window, scale))
    assert len(traces) == 3


def test_run_time_scalar_means_what_the_number_means() -> None:
    window, scale = 1, 1.0

    def mod(s, b, h, q, k):
        edge = (window * 2 - 1) % 5 + window / 2 + max(1, 2)
        return torch.where(q - k < edge, s * scale + q / window, -scale) + (k // window) ** 2 + s.clamp(max=scale)

    mods = LiveMods(mod)
    mods.current()
    for window, scale in ((2, 0.5), (3, -1.25), (-2, 3.0)):
        reading = mods.current()
        (graph,) = reading.captured.mods.graphs()
        torch.testing.assert_close(captured(reading, graph), direct(mod, "score"))
    assert len(reading.scalars) == 2


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, n: s if n > 4 else -s,
        lambda s, n: sum((s * i for i in range(n)), s),
        lambda s, n: s + torch.arange(n).sum(),
        lambda s, n: s.expand(n).sum(),
        lambda s, n: s + float(n) * len(f"{n}"),
        lambda s, n: s + [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0][n],
    ],
)
def test_number_that_python_itself_needs_stays_a_guarded_constant(mod: Callable[..., torch.Tensor]) -> None:
    count = 3
    mods = LiveMods(lambda s, b, h, q, k: mod(s, count))
    for count in (3, 5, 7):
        reading = mods.current()
        assert reading.scalars == ()
        (graph,) = reading.captured.mods.graphs()
        expected = direct(lambda s, *_: mod(s, count), "score")
        torch.testing.assert_close(captured(reading, graph), expected)


def test_alternating_constants_do_not_trace_again(traces: list[str]) -> None:
    deep = True
    mods = LiveMods(lambda s, b, h, q, k: s * 2 if deep else s)
    for deep in (True, False) * 4:
        mods.current()
    assert len(traces) == 2


def test_bool_int_and_float_of_equal_value_are_told_apart() -> None:
    value: object = 1
    mods = LiveMods(lambda s, b, h, q, k: q * value)
    seen = []
    for value in (1, True, 1.0):
        (graph,) = mods.current().captured.mods.graphs()
        seen.append([node.dtype for node in topological(graph.root) if node.op == "mul"])
    assert seen == [[torch.int64], [torch.int64], [torch.float32]]


class Bias:
    def __init__(self) -> None:
        self.table, self.scale, self.inner = torch.zeros(8), 2, types.SimpleNamespace(shift=1.5)

    def helper(self, q):
        inner = self.inner
        return self.table[q] * self.scale + inner.shift

    @property
    def doubled(self):
        return self.scale * 2

    def __call__(self, s, b, h, q, k):
        return s + self.helper(q) + self.doubled


class BiasModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(8))

    def forward(self, s, b, h, q, k):
        return s + self.table[q]

    def mod(self, s, b, h, q, k):
        return s + self.table[q]


def test_attributes_of_an_object_are_re_read() -> None:
    bias = Bias()
    for mod in (bias, bias.__call__):
        mods = LiveMods(mod)
        mods.current()
        bias.table = torch.ones(8)
        assert mods.current().buffers[0] is bias.table
        bias.scale, bias.inner.shift = bias.scale + 1, bias.inner.shift + 1
        reading = mods.current()
        assert set(reading.scalars) == {bias.scale, bias.inner.shift}
        (graph,) = reading.captured.mods.graphs()
        torch.testing.assert_close(captured(reading, graph), direct(bias, "score"))


@pytest.mark.parametrize("pick", [lambda m: m, lambda m: m.mod])
def test_replaced_parameter_is_seen(pick: Callable[[BiasModule], Callable[..., object]], traces: list[str]) -> None:
    module = BiasModule()
    mods = LiveMods(pick(module))
    mods.current()
    module.table = torch.nn.Parameter(torch.ones(8))
    assert mods.current().buffers[0] is module.table
    assert len(traces) == 1


def test_functional_call_swaps_parameters_for_its_duration() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = BiasModule()
            self.mods = LiveMods(self.bias.mod)

        def forward(self) -> torch.Tensor:
            return self.mods.current().buffers[0]

    attention, swapped = Attention(), torch.ones(8)
    assert attention() is attention.bias.table
    assert torch.func.functional_call(attention, {"bias.table": swapped}, ()) is swapped
    assert attention() is attention.bias.table


def test_deep_copy_reads_its_own_module() -> None:
    mods = LiveMods(BiasModule().mod)
    mods.current()
    copied = copy.deepcopy(mods)
    assert copied.current().buffers[0] is not mods.current().buffers[0]
    assert copied.current().buffers[0] is copied.score_mod.__self__.table  # type: ignore[union-attr]


def test_pickled_mods_capture_again() -> None:
    assert pickle.loads(pickle.dumps(LiveMods(BiasModule()))).current().buffers[0].shape == (8,)


@contextmanager
def global_value(name: str, value: object) -> Iterator[None]:
    before = globals()[name]
    globals()[name] = value
    try:
        yield
    finally:
        globals()[name] = before


def _window(q, k):
    return q - k < WINDOW


def test_globals_of_nested_helpers_are_re_read(traces: list[str]) -> None:
    mods = LiveMods(None, lambda b, h, q, k: _window(q, k))
    mods.current()
    for value in (5, 7):
        with global_value("WINDOW", value):
            assert mods.current().scalars == (value,)
    assert len(traces) == 2


def test_defaults_and_partial_arguments_are_captured() -> None:
    def mod(s, b, h, q, k, *, table, scale=2.0):
        return s + table[q] * scale

    table = torch.randn(8)
    reading = assert_same_meaning(functools.partial(mod, table=table))
    assert reading.buffers == (table,)
    assert [buffer.name for buffer in reading.captured.mods.buffers] == ["table"]
    assert_same_meaning(functools.partial(lambda table, s, b, h, q, k: s + table[q], table))
    assert_same_meaning(lambda *args: args[0] + args[3])


def test_combined_masks_capture_what_their_parts_capture() -> None:
    window, document = 2, torch.tensor([0, 0, 1, 1, 1, 2, 2])
    mask = and_masks(lambda b, h, q, k: q - k <= window, or_masks(lambda b, h, q, k: document[q] == document[k]))
    reading = assert_same_meaning(mask, "mask")
    assert reading.buffers[0] is document


def test_same_tensor_captured_twice_is_one_buffer_until_it_is_two() -> None:
    first = second = torch.zeros(8)
    mods = LiveMods(lambda s, b, h, q, k: s + first[q] + second[k], lambda b, h, q, k: first[q] > 0)
    assert len(mods.current().buffers) == 1
    second = torch.ones(8)
    assert {id(tensor) for tensor in mods.current().buffers} == {id(first), id(second)}


def test_tensor_that_is_read_and_dropped_is_no_buffer() -> None:
    weight = torch.zeros(3, requires_grad=True)

    def mod(s, b, h, q, k):
        weight[h]
        return s

    assert LiveMods(mod).current().buffers == ()


def test_list_of_tensors_is_re_read() -> None:
    tables = [torch.zeros(8), torch.ones(8)]
    mods = LiveMods(lambda s, b, h, q, k: s + sum(table[q] for table in tables))
    mods.current()
    tables[1] = torch.full((8,), 2.0)
    assert mods.current().buffers[1] is tables[1]
    assert [buffer.name for buffer in mods.current().captured.mods.buffers] == ["tables_0", "tables_1"]


def test_tensor_reached_by_a_computed_name_is_re_read() -> None:
    module = BiasModule()
    name = "".join(["ta", "ble"])
    mods = LiveMods(lambda s, b, h, q, k: s + vars(module)["_parameters"][name][q])
    mods.current()
    module.table = torch.nn.Parameter(torch.ones(8))
    assert mods.current().buffers[0] is module.table


def test_recursive_helper_is_captured() -> None:
    def power(x, n):
        return x if n == 0 else power(x * SCALE, n - 1)

    assert_same_meaning(lambda s, b, h, q, k: power(s, 3))


SCALE = 0.5


def test_score_dtype_is_a_parameter() -> None:
    mods = LiveMods(lambda s, b, h, q, k: s * 2)
    (graph,) = mods.current(torch.float64).captured.mods.graphs()
    assert graph.root.dtype == torch.float64
    (graph,) = mods.current().captured.mods.graphs()
    assert graph.root.dtype == torch.float32


def test_concurrent_readers_trace_once(traces: list[str]) -> None:
    mods = LiveMods(lambda s, b, h, q, k: s + OFFSET)
    readings: list[object] = []
    threads = [threading.Thread(target=lambda: readings.append(mods.current().captured)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traces == ["score"]
    assert len({id(reading) for reading in readings}) == 1


@pytest.mark.parametrize(
    "outside",
    [torch.inference_mode, torch.no_grad, FakeTensorMode, lambda: torch.device("meta"), lambda: torch.autocast("cpu")],
)
def test_modes_active_outside_do_not_matter(outside: Callable[[], AbstractContextManager[object]]) -> None:
    table = torch.randn(3, 4, requires_grad=True)

    def mod(s, b, h, q, k):
        return s + (table[h] @ table[b]) * torch.tensor(2.0) + table[:, [1, 2]][h, 0]

    with outside():
        reading = LiveMods(mod).current()
    (graph,) = reading.captured.mods.graphs()
    torch.testing.assert_close(captured(reading, graph), direct(mod, "score"))


def test_no_mods_capture_to_nothing() -> None:
    assert LiveMods().current().captured.mods == Mods()

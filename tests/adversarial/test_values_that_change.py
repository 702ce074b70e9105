"""Values that change behind flexgen's back between two calls of one Attention."""

from __future__ import annotations

import array
import collections
import enum
import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import flexgen
from tests.adversarial.dense import Mod, worst_errors

TILES = {"BLOCK_M": 16, "BLOCK_N": 16}


def is_right(attention: flexgen.Attention, mask: Mod) -> bool:
    return all(error <= 2e-4 for error in worst_errors(attention, None, mask))


@pytest.mark.parametrize("window", [0, -3, True, 2.5, 10**12, -(2**63), float("inf"), float("nan"), np.int32(7)])
def test_any_number_may_replace_a_window(window: Any) -> None:
    here = SimpleNamespace(window=4)
    mask = lambda b, h, q, k: (q - k <= here.window) & (q >= k)  # noqa: E731
    attention = flexgen.compile(None, mask)
    assert is_right(attention, mask)
    here.window = window
    assert is_right(attention, mask)


WRITES = {
    "copy_": lambda doc: doc.copy_(torch.arange(40) // 3),
    "a view": lambda doc: doc.view(-1)[20:].fill_(0),
    "detach": lambda doc: doc.detach()[20:].fill_(0),
    "out=": lambda doc: torch.add(torch.arange(40) // 3, 0, out=doc),
    "set_": lambda doc: doc.set_(torch.arange(40) // 3),
    "numpy": lambda doc: doc.numpy()[20:].fill(0),
    ".data": lambda doc: doc.data[20:].fill_(0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_mask_sees_a_write_to_its_tensor(write: Any) -> None:
    doc = torch.arange(40) // 7
    mask = lambda b, h, q, k: doc[q] == doc[k]  # noqa: E731
    attention = flexgen.compile(None, mask, TILES)
    assert is_right(attention, mask)
    write(doc)
    assert is_right(attention, mask)


def _numpy_element() -> tuple[Mod, Any]:
    held = np.array([2])
    return lambda b, h, q, k: q - k < int(held[0]), lambda: held.fill(9)


def _set() -> tuple[Mod, Any]:
    held = {2}
    return lambda b, h, q, k: q - k < max(held), lambda: held.add(9)


def _deque() -> tuple[Mod, Any]:
    held = collections.deque([2])
    return lambda b, h, q, k: q - k < held[-1], lambda: held.append(9)


def _list() -> tuple[Mod, Any]:
    held = [2]
    return lambda b, h, q, k: q - k < held[-1], lambda: held.append(9)


def _function_attribute() -> tuple[Mod, Any]:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < mask.window  # type: ignore[attr-defined]

    mask.window = 2  # type: ignore[attr-defined]
    return mask, lambda: setattr(mask, "window", 9)


def _numpy_view() -> tuple[Mod, Any]:
    whole = np.arange(12, dtype=np.int16).reshape(3, 4)
    held = whole.T[::2, 1:]
    return lambda b, h, q, k: q - k < int(held[0, 1]), lambda: whole.__setitem__((2, 0), 1)


def _array() -> tuple[Mod, Any]:
    held = array.array("d", [2.5])
    return lambda b, h, q, k: q - k < held[0], lambda: held.__setitem__(0, 9.5)


def _bytes() -> tuple[Mod, Any]:
    held = bytearray([2])
    return lambda b, h, q, k: q - k < held[0], lambda: held.__setitem__(0, 9)


def _long_list() -> tuple[Mod, Any]:
    held = [2] * 3000
    return lambda b, h, q, k: q - k < held[2999], lambda: held.__setitem__(2999, 9)


def _keys_of_pairs() -> tuple[Mod, Any]:
    held = {("local", 3): 2, ("global", True): 40}
    return lambda b, h, q, k: q - k < held["local", 3], lambda: held.update({("local", 3): 9})


class Layer(enum.Enum):
    LOCAL = 1


def _keys_of_an_enumeration() -> tuple[Mod, Any]:
    held = {Layer.LOCAL: 2}
    return lambda b, h, q, k: q - k < held[Layer.LOCAL], lambda: held.update({Layer.LOCAL: 9})


@pytest.mark.parametrize(
    "make",
    [
        *(_list, _function_attribute, _numpy_element, _numpy_view, _set, _deque, _array, _bytes, _long_list),
        *(_keys_of_pairs, _keys_of_an_enumeration),
    ],
)
def test_number_is_read_again_at_each_call(make: Any) -> None:
    mask, change = make()
    attention = flexgen.compile(None, mask)
    assert is_right(attention, mask)
    change()
    assert is_right(attention, mask)


class Windows:
    @classmethod
    def narrow(cls) -> int:
        return 3

    @staticmethod
    def wide() -> int:
        return 9


def test_methods_of_a_class_may_be_called() -> None:
    mask = lambda b, h, q, k: (q - k < Windows.wide()) & (q - k > -Windows.narrow())  # noqa: E731
    assert is_right(flexgen.compile(None, mask), mask)


class Window:
    size = 3

    @staticmethod
    def named() -> int:
        return Window.size

    @classmethod
    def of_class(cls) -> int:
        return cls.size


class Wider(Window):
    size = 5


METHODS = {
    "static": lambda b, h, q, k: q - k < Window.named(),
    "of the class": lambda b, h, q, k: q - k < Window.of_class(),
    "of a subclass": lambda b, h, q, k: q - k < Wider.of_class(),
    "through an instance": lambda b, h, q, k: q - k < Wider().of_class(),
}


@pytest.mark.parametrize("name", METHODS)
def test_what_methods_of_a_class_read_is_read_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, owner = METHODS[name], Wider if name in ("of a subclass", "through an instance") else Window
    attention = flexgen.compile(None, mask)
    for size in (2, 7, 9):
        monkeypatch.setattr(owner, "size", size)
        assert is_right(attention, mask), size


def test_a_method_of_a_class_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = lambda b, h, q, k: q - k < Window.named()  # noqa: E731
    attention = flexgen.compile(None, mask)
    assert is_right(attention, mask)
    monkeypatch.setattr(Window, "named", staticmethod(lambda: 11))
    assert is_right(attention, mask)


def test_a_function_attribute_may_keep_changing() -> None:
    mask, _ = _function_attribute()
    attention = flexgen.compile(None, mask)
    for window in (2, 9, 5):
        mask.window = window  # type: ignore[attr-defined]
        assert is_right(attention, mask), window


class _MadeAnew:
    def __get__(self, instance: object, owner: type) -> int:
        return 3


class Described:
    size = _MadeAnew()


def test_what_never_is_the_same_twice_is_refused_by_name() -> None:
    mask = lambda b, h, q, k: q - k < Described.size  # noqa: E731
    with pytest.raises(flexgen.CaptureError, match="different each time") as refusal:
        is_right(flexgen.compile(None, mask), mask)
    assert "capture the value" in str(refusal.value)


def test_tensors_in_a_deque_may_be_replaced() -> None:
    windows = collections.deque([torch.tensor(2), torch.tensor(5)], maxlen=2)
    mask = lambda b, h, q, k: q - k < windows[-1]  # noqa: E731
    attention = flexgen.compile(None, mask)
    for window in (2, 9, 5):
        windows.append(torch.tensor(window))
        assert is_right(attention, mask), window


def test_what_holds_the_same_is_captured_once() -> None:
    held = {3, 1, 4}
    attention = flexgen.compile(None, lambda b, h, q, k: q - k < max(held))
    query = torch.randn(1, 1, 20, 16)
    attention(query, query, query)
    first = attention.understood
    for _ in range(3):
        held.add(9)
        held.discard(9)
        attention(query, query, query)
    assert attention.understood == first


class Fallback:
    """Gives what its dictionary holds as attributes, as many classes of settings do."""

    def __init__(self) -> None:
        self.__dict__["held"] = {"window": 2}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


class FromAList:
    def __get__(self, instance: Any, owner: type) -> Any:
        return instance.windows[0]


class Computed:
    window = FromAList()

    def __init__(self) -> None:
        self.windows = [2]


class Cached:
    size = 2

    @functools.cached_property
    def window(self) -> int:
        return self.size

    def widen(self) -> None:
        self.size = 9
        del self.__dict__["window"]


class Replaced:
    def window(self) -> int:
        return 2


def _attribute_of_a_dictionary() -> tuple[Mod, Any]:
    held = Fallback()
    return lambda b, h, q, k: q - k < held.window, lambda: held.held.update(window=9)


def _attribute_of_a_descriptor() -> tuple[Mod, Any]:
    held = Computed()
    return lambda b, h, q, k: q - k < held.window, lambda: held.windows.__setitem__(0, 9)


def _attribute_that_was_cached() -> tuple[Mod, Any]:
    held = Cached()
    return lambda b, h, q, k: q - k < held.window, held.widen


def _method_that_an_attribute_replaces() -> tuple[Mod, Any]:
    held = Replaced()
    return lambda b, h, q, k: q - k < held.window(), lambda: setattr(held, "window", lambda: 9)


def _attribute_of_a_made_up_name() -> tuple[Mod, Any]:
    held = SimpleNamespace(window_0=2, layer=0)
    return lambda b, h, q, k: q - k < getattr(held, f"window_{held.layer}"), lambda: setattr(held, "window_0", 9)


def _item_that_the_mod_made() -> tuple[Mod, Any]:
    held: dict[str, int] = collections.defaultdict(lambda: 2)
    return lambda b, h, q, k: q - k < held["window"], lambda: held.update(window=9)


def _module_of_a_sequence() -> tuple[Mod, Any]:
    held = torch.nn.Sequential(torch.nn.Identity())
    return lambda b, h, q, k: held(q - k) < 5, lambda: held.__setitem__(0, torch.nn.Hardtanh(0, 4))


def _number_of_a_module_of_torch() -> tuple[Mod, Any]:
    held = torch.nn.Threshold(3, 0)
    return lambda b, h, q, k: held(q - k) < 5, lambda: setattr(held, "threshold", 9)


@pytest.mark.parametrize(
    "make",
    [
        *(_attribute_of_a_dictionary, _attribute_of_a_descriptor, _attribute_that_was_cached),
        *(_method_that_an_attribute_replaces, _attribute_of_a_made_up_name, _item_that_the_mod_made),
        *(_module_of_a_sequence, _number_of_a_module_of_torch),
    ],
)
def test_what_objects_compute_or_hide_is_read_again(make: Any) -> None:
    mask, change = make()
    attention = flexgen.compile(None, mask)
    for _ in range(2):
        assert is_right(attention, mask)
    change()
    for _ in range(2):
        assert is_right(attention, mask)

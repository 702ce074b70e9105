"""The garbage collector is paused while flexgen prepares, and left as it was found."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flexgen.collector import collector_paused


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    gc.enable() if was_enabled else gc.disable()


def test_it_is_paused_and_goes_on():
    gc.enable()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled(), "a pause within another does not end it"
    assert gc.isenabled()


def test_it_goes_on_after_an_error():
    gc.enable()
    with pytest.raises(ValueError, match="wrong"), collector_paused():
        raise ValueError("wrong")
    assert gc.isenabled()


def test_a_program_that_runs_without_it_keeps_it_off():
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()

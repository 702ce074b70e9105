"""Every option is documented, in one place, and the manual's page follows from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import flexgen
from flexgen.errors import OptionError
from flexgen.lowering.triton.plan import ForwardPlan
from flexgen.option_docs import OPTION_DOCS, VARIABLE_DOCS, WHOLE_DOCS, markdown
from flexgen.options import BACKWARD_ONLY, KERNEL_OPTION_NAMES, WHOLE_NAMES, KernelOptions, Options
from tests.cli.conftest import Run

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def test_each_option_is_documented() -> None:
    assert tuple(OPTION_DOCS) == KERNEL_OPTION_NAMES


@pytest.mark.parametrize("name", KERNEL_OPTION_NAMES)
def test_the_documented_example_is_accepted(name: str) -> None:
    assert KernelOptions(**{name: OPTION_DOCS[name].example}).given() == {name: OPTION_DOCS[name].example}


@pytest.mark.parametrize("name", WHOLE_NAMES)
def test_the_documented_example_of_the_whole_is_accepted(name: str) -> None:
    assert getattr(Options.of({name: WHOLE_DOCS[name].example}), name) == WHOLE_DOCS[name].example
    assert tuple(WHOLE_DOCS) == WHOLE_NAMES


def test_options_go_over_others() -> None:
    own = Options.of({"layout": "bshd", "BLOCK_M": 64, "fwd_num_warps": 4})
    over = own.over({"BLOCK_M": 32, "fwd_num_stages": 2})
    assert over == Options.of({"layout": "bshd", "BLOCK_M": 32, "fwd_num_warps": 4, "fwd_num_stages": 2})
    assert own.over({"autotune": True}).autotune and not own.autotune
    assert own.over({"layout": "bhsd"}).layout == "bhsd"
    with pytest.raises(OptionError, match="autotune='maybe' is not a bool"):
        Options.of({"autotune": "maybe"})


def test_options_of_backward_kernels_say_so() -> None:
    assert {name for name, doc in OPTION_DOCS.items() if "Backward" in doc.scope} == BACKWARD_ONLY


def test_each_template_variable_is_documented() -> None:
    fields = {field.name for field in dataclasses.fields(ForwardPlan) if field.name[0].isupper()}
    assert fields <= OPTION_DOCS.keys() | VARIABLE_DOCS.keys()


def test_each_decision_is_documented() -> None:
    import torch

    tensor = torch.empty(1, 1, 128, 64, device="meta", dtype=torch.bfloat16)
    decisions = flexgen.compile().lower(tensor, tensor, tensor, target="sm_90").plan.decisions
    assert {decision.name for decision in decisions} <= OPTION_DOCS.keys() | VARIABLE_DOCS.keys()


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == markdown(), "run: flexgen options --markdown > docs/options.md"


def test_options_lists_them_all_within_the_screen(run: Run) -> None:
    said = run("options")
    assert said.code == 0
    assert all(f"\n{name} " in said.out for name in KERNEL_OPTION_NAMES)
    assert max(map(len, said.out.splitlines())) <= 100
    assert run("options", "--markdown").out == markdown()

"""Each emitted line knows the template's line, or the user's, that it comes from; errors say which."""

from __future__ import annotations

import inspect
import json
from importlib import resources
from pathlib import Path

import pytest
import torch

import flexgen
from flexgen.codegen.source import LineOrigin, Written
from flexgen.errors import KernelCompileError, SourceSpan
from flexgen.lowered import Lowered
from flexgen.lowering.targets import TARGETS
from flexgen.runtime.build import compile_entry
from flexgen.runtime.cache import SourceCache
from flexgen.runtime.interpret import interpret
from flexgen.runtime.line_origin import with_origin
from flexgen.runtime.load import load_module
from tests.runtime.conftest import HEADER, Load

bias = torch.zeros(7, requires_grad=True)


def score_mod(score, b, h, q_idx, kv_idx):
    capped = 20 * torch.tanh(score / 20)
    return capped + bias[q_idx % 7]


def documents(b, h, q_idx, kv_idx):
    return q_idx // 100 == kv_idx // 100


def lowered(target: str = "sm_90", **options: object) -> Lowered:
    attention = flexgen.compile(score_mod, documents, options=options)
    tensors = (torch.empty(1, 2, 1000, 64, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(3))
    return attention.lower(*tensors, target=target)


@pytest.fixture(scope="module", params=["TRITON", "GLUON"])
def kernels(request: pytest.FixtureRequest) -> Lowered:
    return lowered(fwd_BACKEND=request.param)


def test_every_line_of_every_module_has_an_origin(kernels: Lowered):
    for name, source in kernels.sources.items():
        numbers = [origin.emitted for origin in source.line_map]
        assert numbers == list(range(1, len(source.text.splitlines()) + 1)), name


def test_literal_lines_stand_in_the_template_that_is_named(kernels: Lowered):
    """What stands in a template without a hole is found there, at the very line."""
    templates = resources.files("flexgen") / "templates"
    literal = 0
    for name, source in kernels.sources.items():
        text = source.text.splitlines()
        for origin in source.line_map:
            if origin.written is Written.USER:
                continue
            line = (templates / origin.file).read_text().splitlines()[origin.line - 1]
            told = text[origin.emitted - 1].strip().rstrip(",")  # a long line is broken behind a comma
            if told and not {"{", "}"} & set(line):
                assert told in line or told in translated(line), name
                literal += 1
    assert literal > 100


def translated(line: str) -> str:
    """Return a line of a helper as it stands in a Gluon module."""
    return line.replace("tl.", "gl.").replace("@triton.jit", "@gluon.jit")


def test_statements_of_a_mod_come_from_the_users_lines(kernels: Lowered):
    first = inspect.getsourcelines(score_mod)[1]
    source = kernels.sources["forward"]
    text = source.text.splitlines()
    users = [origin for origin in source.line_map if origin.written is Written.USER]
    assert {Path(origin.file) for origin in users} == {Path(__file__)}
    capped = [text[origin.emitted - 1] for origin in users if origin.line == first + 1]
    assert capped[0] == "    # capped = 20 * torch.tanh(score / 20)"
    assert any("tanh" in line for line in capped[1:])


def test_the_stage_file_names_no_path_of_this_machine(kernels: Lowered):
    stages = dict(kernels.stages)
    rows = json.loads(stages["05_forward.lines.json"])
    assert len(rows) == len(stages["05_forward.py"].splitlines())
    assert {row["file"] for row in rows if row["from"] == "user"} == {Path(__file__).name}
    assert not any(str(row["file"]).startswith("/") for row in rows)


class TestErrors:
    """A line that Triton refuses is told with its origin."""

    def spoiled(self, told: str, by: str, tmp_path: Path) -> KernelCompileError:
        """Return the error of compiling a kernel in whose text `told` was replaced."""
        made = lowered("sm_80").sources["forward"]
        text = made.text.replace(told, by)
        assert text != made.text
        module = load_module(SourceCache(tmp_path).keep("0" * 32, text))
        options = {"num_warps": 4, "num_stages": 1, "line_map": made.line_map}
        with pytest.raises(KernelCompileError) as caught:
            compile_entry(module, "forward", made.args, TARGETS["sm_80"], **options)  # type: ignore[arg-type]
        return caught.value

    def test_of_a_template(self, tmp_path: Path):
        error = self.spoiled("row_max = new_max", "row_max = absent", tmp_path)
        assert error.where is not None and "row_max = absent" in error.where.text
        template = (resources.files("flexgen") / "templates/triton/parts/attend.py.jinja").read_text().splitlines()
        number = 1 + next(n for n, line in enumerate(template) if line.strip() == "row_max = new_max")
        assert error.why == f"the line comes from flexgen's template triton/parts/attend.py.jinja, line {number}"

    def test_of_the_user(self, tmp_path: Path):
        number = inspect.getsourcelines(score_mod)[1] + 1
        error = self.spoiled("capped = ", "capped = absent + ", tmp_path)
        assert error.why == f"the line comes from {__file__}, line {number}"

    def test_in_the_interpreter(self, load: Load):
        text = "@triton.jit\ndef half(out):\n    tl.store(out, absent)\n"
        number = len((HEADER + text).splitlines())
        line_map = [LineOrigin(n, Written.USER, "mods.py", 100 + n) for n in range(1, number + 1)]
        with pytest.raises(KernelCompileError) as caught:
            interpret(load(text), "half", (1, 1, 1), [torch.zeros(1)], line_map=line_map)
        assert caught.value.why == f"the line comes from mods.py, line {100 + number}"


def test_without_a_map_an_error_says_nothing_of_origins():
    span = SourceSpan("emitted.py", 2, 0, 2, 1, "x")
    assert with_origin("why", span, ()) == "why"
    assert with_origin("why", None, (LineOrigin(1, Written.USER, "mods.py", 3),)) == "why"

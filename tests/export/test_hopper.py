"""Exported modules with Hopper kernels: what they launch is, instruction for instruction, what flexgen launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import flexgen
from flexgen.lowered import Lowered
from flexgen.lowering.gluon_hopper.backward_plan import GluonBackwardPlan
from flexgen.lowering.gluon_hopper.plan import GluonPlan
from flexgen.runtime.describe import Launch
from flexgen.runtime.kernel import program_count
from flexgen.runtime.load import module_of

if TYPE_CHECKING:
    from flexgen.runtime.build import Binary
    from tests.export.hopper_launches import Launched

pytest.importorskip("triton")

document = torch.repeat_interleave(torch.arange(4), torch.tensor([300, 84, 512, 128]))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 200)


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def same_document(b, h, q_idx, kv_idx):
    return document[q_idx] == document[kv_idx]


@dataclass(frozen=True, slots=True)
class Hopper:
    """An attention whose kernels are Hopper's; sizes are B, Hq, Hkv, Lq, Lk, D."""

    score_mod: Callable[..., Any] | None
    mask_mod: Callable[..., Any] | None
    sizes: tuple[int, ...]
    kernels: tuple[str, ...]
    options: dict[str, Any]
    captured: tuple[Tensor, ...] = ()

    def inputs(self, device: str = "cpu") -> list[Tensor]:
        b, hq, hkv, lq, lk, d = self.sizes
        random = torch.Generator().manual_seed(4)
        shapes = ((b, hq, lq, d), (b, hkv, lk, d), (b, hkv, lk, d))
        drawn = (torch.randn(shape, generator=random).to(device, torch.bfloat16) for shape in shapes)
        return [tensor.requires_grad_() for tensor in drawn]

    def attention(self) -> flexgen.Attention:
        return flexgen.compile(self.score_mod, self.mask_mod, self.options)

    def lower(self) -> Lowered:
        return self.attention().lower(*self.inputs(), return_aux=LSE, target="sm_90")

    def export(self) -> str:
        return self.attention().export(*self.inputs(), return_aux=LSE, target="sm_90")


LSE = flexgen.AuxRequest(lse=True)
GLUON = {"BACKEND": "GLUON"}
FOUR = ("forward", "backward_delta", "backward_dq", "backward_dkdv")
CASES = {
    "three_passes": Hopper(None, causal, (1, 2, 1, 1024, 1024, 256), (*FOUR[:3], "backward_dv", "backward_dk"), {}),
    "default": Hopper(softcap, causal, (1, 4, 2, 1024, 1024, 128), FOUR, {}),
    "persistent_window": Hopper(None, window, (2, 2, 2, 1000, 1000, 128), FOUR, GLUON),
    "derived_table": Hopper(None, same_document, (1, 2, 2, 1024, 1024, 128), FOUR, GLUON, captured=(document,)),
    "other_layout": Hopper(None, causal, (1, 2, 2, 300, 500, 96), FOUR, GLUON),
}


def loaded(case: Hopper, folder: Path) -> Any:
    from tests.export.standalone import load

    path = folder / "hopper.py"
    path.write_text(case.export())
    module = load(path)
    module.check_device = lambda device: None  # there is no such device here
    return module


@pytest.mark.parametrize("name", CASES)
def test_launches_are_those_of_flexgen(name: str, tmp_path: Path) -> None:
    """The kernels in their order, and their grids."""
    check_launches(name, tmp_path, compiled=False)


EVERYDAY = {"other_layout"}
EACH = [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.slow) for name in CASES]


@pytest.mark.parametrize("name", EACH)
def test_machine_code_is_that_of_flexgen(name: str, tmp_path: Path) -> None:
    """What Triton's own launch path compiles of the module."""
    from flexgen.runtime.resources import measure

    lowered, launches = check_launches(name, tmp_path, compiled=True)
    for launch in launches:
        binary = _compiled(lowered, launch)
        found, known = measure(_as_binary(binary, launch.kernel)), measure(binary)
        assert (found.code, found.loops) == (known.code, known.loops)
        assert (found.registers, found.shared_bytes) == (known.registers, known.shared_bytes)


def check_launches(name: str, folder: Path, compiled: bool) -> tuple[Lowered, list[Launched]]:
    """Run a module forward and backward; return what flexgen lowers, and the launches of its kernels."""
    from tests.export.hopper_launches import launches_kept

    case = CASES[name]
    lowered, module = case.lower(), loaded(case, folder)
    with launches_kept(compiled=compiled) as launches:
        output, logsumexp = module.attention(*case.inputs(), *case.captured)
        (output.sum() + logsumexp.sum()).backward()
    assert lowered.backward is not None
    plans = {"forward": lowered.plan} | {entry: plan for entry, (_, plan) in lowered.backward.passes.items()}
    own = [launch for launch in launches if launch.name in plans]
    assert tuple(launch.name for launch in own) == case.kernels == tuple(plans)
    b, hq, hkv, lq, lk, _ = case.sizes
    query = torch.empty(b, hq, lq, 1, device="meta")
    described = Launch(batch=b, q_heads=hq, kv_heads=hkv, q_len=lq, kv_len=lk, tensors={"query": query}, scale=1.0)
    for launch in own:
        plan = plans[launch.name]
        assert launch.name == "backward_delta" or isinstance(plan, GluonPlan | GluonBackwardPlan)
        assert launch.grid == (program_count(plan, described),)
    return lowered, own


def _compiled(lowered: Lowered, launch: Launched) -> Binary:
    """Return flexgen's own kernel, with strides as wide as Triton takes those of the launch: 32 bits where they fit."""
    from flexgen.runtime.arguments import ArgType
    from flexgen.runtime.build import compile_entry

    source, plan, divisible = lowered.forward.source, lowered.plan, lowered.divisible
    if lowered.backward is not None and launch.name != "forward":
        source, plan = lowered.backward.passes[launch.name]
        divisible = lowered.backward.divisible[list(lowered.backward.passes).index(launch.name)]
    types = [ArgType("i32" if arg.type == "i64" else arg.type, arg.specialize) for arg in source.args]
    options = dict(plan.compile_options)
    return compile_entry(
        module_of(source),
        source.entry,
        types,
        plan.target,
        num_warps=options.pop("num_warps"),
        num_stages=options.pop("num_stages"),
        extra_options=options,
        divisible=divisible,
    )


def _as_binary(like: Binary, kernel: Any) -> Binary:
    """Return a kernel that Triton compiled by itself as flexgen's own would be."""
    stages = {name: kernel.asm[name] for name in like.stages}
    return replace(like, stages=stages, metadata=kernel.metadata._asdict(), kernel=kernel)


def test_rows_of_each_head_begin_where_the_kernels_read_them(tmp_path: Path) -> None:
    """With 300 queries a head's values begin 384 apart, in one descriptor over all heads."""
    from tests.export.hopper_launches import launches_kept

    case = CASES["other_layout"]
    module = loaded(case, tmp_path)
    with launches_kept() as launches:
        output, _ = module.attention(*case.inputs())
        output.sum().backward()
    walk = next(launch for launch in launches if launch.name == "backward_dkdv")
    rows = [one for one in walk.arguments if hasattr(one, "block_shape") and len(one.block_shape) == 1]
    assert rows and all(one.shape == [2 * 384] and one.base.shape == (1, 2, 384) for one in rows)


def test_what_is_repeated_is_described_with_one_entry(tmp_path: Path) -> None:
    """A key of batch 1 is expanded to the query's, with stride 0, which the copy engine does not take."""
    from tests.export.hopper_launches import launches_kept

    case = CASES["persistent_window"]
    module = loaded(case, tmp_path)
    query, key, value = (tensor.detach() for tensor in case.inputs())
    with launches_kept() as launches, torch.no_grad():
        module.attention(query, key[:1], value[:1])
    described = launches[0].arguments[1]
    assert described.shape == [1, 2, 1000, 128] and described.strides[0] > 0
    assert launches[0].arguments[1].base.stride(0) == 0


def test_rows_that_the_copy_engine_cannot_read_are_refused(tmp_path: Path) -> None:
    case = CASES["default"]
    module = loaded(case, tmp_path)
    query, key, value = (tensor.detach() for tensor in case.inputs())
    moved = torch.empty(query.numel() + 1, dtype=query.dtype)[1:].view(query.shape)
    wide = torch.empty(*query.shape[:3], 129, dtype=query.dtype)[..., :128]
    repeated = key[:, :, :1].expand_as(key)
    for arguments, name in (
        ((moved, key, value), "query"),
        ((wide, key, value), "query"),
        ((query, repeated, value), "key"),
    ):
        with pytest.raises(module.NotCompiledFor, match=rf"(?s){name} has strides .* multiples of 16 bytes.*clone"):
            module.attention(*arguments)
    with pytest.raises(module.NotCompiledFor, match="1000 queries"):
        module.attention(query[:, :, :1000], key, value)


def test_a_module_with_hopper_kernels_is_for_hopper_alone(tmp_path: Path) -> None:
    from tests.export.standalone import load

    path = tmp_path / "hopper.py"
    path.write_text(CASES["default"].export())
    module = load(path)
    with pytest.raises(module.NotCompiledFor, match=r"(?s)on cpu.*sm_90, with its own instructions"):
        module.attention(*CASES["default"].inputs())

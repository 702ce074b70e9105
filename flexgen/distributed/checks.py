"""What a context parallel attention refuses, and what to do instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexgen.distributed.planning import check_attention
from flexgen.errors import OptionError, ProblemTypeError, UnsupportedProblemError
from flexgen.runtime.wrappers import PLAIN
from flexgen.torch_library.distributed import is_distributed

_OFFSETS = (
    "offsets count tokens of one device, and a rank may hold a part of a sequence",
    "capture the number of each token's sequence, and mask with number[q_idx] == number[kv_idx]",
)
# What a call of an Attention may bring and this one refuses: why, and what to do instead.
_REFUSED = {
    "block_table": (
        "its lists count blocks of a sequence that lies on one device",
        "give the mask to flexgen.compile as mask_mod: what is live is derived from it, for each rank",
    ),
    "kv_lengths": (
        "it serves decoding and prefilling, where keys are not sharded",
        "capture the lengths in the mask_mod: kv_idx < lengths[b]",
    ),
    "page_table": ("it serves decoding, where keys are not sharded", "call the attention itself on each rank"),
    "k_scale": ("it serves decoding, where keys are not sharded", "multiply the key before"),
    "v_scale": ("it serves decoding, where keys are not sharded", "multiply the value before"),
    "cu_seqlens_q": _OFFSETS,
    "cu_seqlens_k": _OFFSETS,
    "dropout_p": (
        "what is dropped is drawn by positions in a rank's own tensors, so that ranks would repeat each other",
        "pass dropout_p=0, or drop the outputs instead of the weights",
    ),
    "generator": ("it draws what is dropped, and nothing is", "leave it out"),
    "validate": ("there are no lists and lengths to check", "leave it out"),
}


def check_made_of(attention: Any, mesh: Any) -> None:
    """Refuse what is no attention that runs over ranks, or no mesh of one dimension."""
    check_attention("context_parallel", attention)
    if not isinstance(mesh, DeviceMesh):
        raise ProblemTypeError(
            f"mesh is {type(mesh).__name__}, not a DeviceMesh",
            fix='make one with torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,))',
        )
    if mesh.ndim != 1:
        raise UnsupportedProblemError(
            f"the mesh has {mesh.ndim} dimensions",
            why="a sequence is sharded over the ranks of one",
            fix='pass one of them, by its name: mesh["context"]',
        )
    if attention.options.autotune:
        raise OptionError(
            "autotune=True is set, and the attention is to run over several ranks",
            why="ranks would measure apart, and at chunks whose lengths differ",
            fix="search with `flexgen tune` at the length of a chunk, and set what was found as options",
        )


def check_is_plain(name: str, tensor: Tensor) -> None:
    """Refuse tensors that a rank cannot send: of a subclass, without memory, or stored in 8 bits."""
    if is_distributed(tensor):
        raise UnsupportedProblemError(
            f"{name} is a DTensor",
            why="a DTensor is cut in contiguous parts, and ranks here may hold others",
            fix="pass this rank's own rows, a plain tensor: .shard(tensor.full_tensor()); or tensor.to_local(), where "
            'it is sharded along the sequence and assignment="contiguous"',
        )
    if type(tensor) not in PLAIN or tensor.is_meta:
        raise UnsupportedProblemError(
            f"{name} is {'a meta tensor' if tensor.is_meta else type(tensor).__name__}",
            why="ranks send each other what tensors hold, which a trace does not have",
            fix="call it outside of the traced region, or plan with flexgen.plan_context_parallel",
        )
    if tensor.dtype.itemsize == 1:
        raise ProblemTypeError(
            f"{name} is stored in {tensor.dtype}",
            why="keys in 8 bits serve decoding, where they are not sharded",
            fix="convert it to the query's dtype",
        )


def refuse_others(arguments: dict[str, Any]) -> None:
    """Refuse what an Attention's call takes and this one does not."""
    for name, value in arguments.items():
        if name not in _REFUSED:
            raise TypeError(f"a context parallel attention takes no argument {name!r}")
        if value is not None and value is not False and not (name == "dropout_p" and value == 0):
            why, fix = _REFUSED[name]
            raise UnsupportedProblemError(f"{name} was passed to a context parallel attention", why=why, fix=fix)

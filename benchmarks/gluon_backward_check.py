"""The problems that check the Gluon backward kernels on a GPU, and how one is checked and timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

import flexgen
from benchmarks.cases import cases
from benchmarks.gluon_cases import Check, aux_of, in_bhsd, mods_of, table_of, tensors_of
from benchmarks.gluon_verified import code_digest

NAMES = ("query", "key", "value")
APPROXIMATE = ("softcap",)  # the hardware's tanh
LIMIT = 0.008  # of an error relative to the gradient's norm; half precision alone makes 0.002 to 0.004


def backward_checks() -> list[Check]:
    found = [*_first(), *_by_head_dim(), *_others()]
    return [check.of_backward() for check in found]


def _first() -> Iterator[Check]:
    """The simplest ones come first: were barriers wrong, these would say so."""
    for head_dim in (128, 64, 256):
        yield Check(f"first {head_dim}", head_dim, lengths=(256, 256))
        yield Check(f"first causal {head_dim}", head_dim, "causal", lengths=(256, 256))


def _by_head_dim() -> Iterator[Check]:
    for head_dim in (64, 128, 256):
        for mods in ("none", "causal", "window 1024", "window 100", "prefix"):
            yield Check(f"{mods} D={head_dim}", head_dim, mods, lengths=(2048, 2048), batch=2)
        yield Check(f"tails D={head_dim}", head_dim, "causal", lengths=(1000, 777), aux=True)
        yield Check(f"no mask tails D={head_dim}", head_dim, lengths=(333, 1501))
        yield Check(f"window tails D={head_dim}", head_dim, "window 100", lengths=(1111, 1111), batch=2)
        yield Check(f"fully masked rows D={head_dim}", head_dim, "future", lengths=(1000, 1000), aux=True)
        yield Check(f"fp16 D={head_dim}", head_dim, "causal", dtype="float16", aux=True)
        yield Check(f"GQA D={head_dim}", head_dim, "causal", heads=(8, 2), batch=2)
        yield Check(f"GQA tails D={head_dim}", head_dim, "window 100", heads=(6, 2), lengths=(777, 1000))
        for mods in ("softcap", "alibi", "key table", "document starts", "documents", "two windows"):
            yield Check(f"{mods} D={head_dim}", head_dim, mods, lengths=(1024, 1024), batch=2)
            yield Check(f"{mods} tails D={head_dim}", head_dim, mods, lengths=(1111, 1111))
        for mods in ("causal", "future", "documents"):
            blocks = Check(f"block mask {mods} D={head_dim}", head_dim, mods, lengths=(1024, 1000), blocks=(128, 128))
            yield blocks
        yield Check(f"long rows D={head_dim}", head_dim, "causal", heads=(1, 1), lengths=(6000, 6000))
        yield Check(f"values alone D={head_dim}", head_dim, "causal", lengths=(1000, 1000), wanted=("value",))
        yield Check(f"keys alone D={head_dim}", head_dim, "causal", lengths=(1000, 1000), wanted=("key",))


def _others() -> Iterator[Check]:
    for head_dim, value_dim in ((40, 40), (48, 48), (80, 80), (96, 96), (192, 128), (64, 128), (128, 64), (160, 160)):
        yield Check(f"D={head_dim},{value_dim}", head_dim, "causal", value_dim, lengths=(700, 900), aux=True)
    for mods in ("bias", "sinks", "parity", "constant", "head bias", "sinks in documents"):
        yield Check(mods, 64, mods, lengths=(1111, 1111), aux=True)
        yield Check(f"{mods} D=128", 128, mods, lengths=(1024, 1300), batch=2)
    for lengths in ((64, 64), (65, 65), (127, 129), (100, 70), (33, 4000), (4000, 40)):
        yield Check(f"lengths {lengths[0]}, {lengths[1]}", 128, "none", lengths=lengths)
        yield Check(f"lengths {lengths[0]}, {lengths[1]} causal", 64, "causal", lengths=lengths)
    for blocks in ((256, 128), (128, 384)):
        yield Check(f"blocks {blocks[0]}x{blocks[1]}", 128, "causal", lengths=(1024, 1111), blocks=blocks)
        yield Check(f"blocks {blocks[0]}x{blocks[1]} GQA", 64, "documents", heads=(4, 2), blocks=blocks)
    for head_dim, sizes in OTHER_TILES.items():
        yield Check(f"other tiles D={head_dim}", head_dim, "causal", lengths=(1000, 1000), options=sizes)
    yield Check("GQA documents", 128, "documents", heads=(8, 2), batch=2)
    yield Check("GQA document starts", 128, "document starts", heads=(8, 2), batch=2)
    yield Check("shared batch", 128, "causal", batch=3, shared_batch=True)
    yield Check("heads inside", 128, "causal", batch=2, layout="bshd")
    yield Check("run-time scale", 128, "softcap", batch=2, scale=0.11)


OTHER_TILES = {
    64: {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N2": 64},
    128: {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 64},
    256: {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N2": 32},
}


def attention_of(check: Check, device: str) -> flexgen.Attention:
    options = {"bwd_BACKEND": "GLUON", "layout": check.layout, **check.options}
    return flexgen.compile(*mods_of(check, device), options)


def inputs_of(check: Check, device: str) -> list[torch.Tensor]:
    tensors = tensors_of(check, device)
    for name, tensor in zip(NAMES, tensors, strict=True):
        tensor.requires_grad_(name in check.wanted)
    return tensors


def lowered(check: Check) -> Any:
    """Lower a check without a GPU."""
    tensors, table = inputs_of(check, "meta"), table_of(check, "cpu")
    return attention_of(check, "cpu").lower(
        *tensors, scale=check.scale, return_aux=aux_of(check), target="sm_90", block_table=table
    )


def sources_of(check: Check) -> dict[str, str]:
    """Return the text of each Gluon backward kernel of a check."""
    passes = lowered(check).backward.passes
    return {name: source.text for name, (source, _) in passes.items() if "gluon" in source.text}


def run_backward_check(check: Check) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = inputs_of(check, "cuda")
    attention, table = attention_of(check, "cuda"), table_of(check, "cuda")
    result = attention(*tensors, scale=check.scale, return_aux=aux_of(check), block_table=table)
    outputs = [result] if aux_of(check) is None else [result[0], result[1].lse]
    grads = [torch.randn_like(output) for output in outputs]
    if len(outputs) > 1:
        grads[1][outputs[1] == float("-inf")] = 0.0
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    expected = reference(check, tensors, grads)
    found = [poisoned(outputs, wanted, grads) for _ in range(3)]
    same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    errors = {n: error(f, e) for n, f, e in zip(check.wanted_in_order, found[0], expected, strict=True)}
    worst = max(errors.values())
    limit = 0.03 if check.mods in APPROXIMATE else LIMIT
    digests = {name: code_digest(text) for name, text in sources_of(check).items()}
    return {"error": worst, "errors": errors, "same_bits": same, "ok": worst < limit and same, "digests": digests}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error relative to the norm; infinite where something is no number."""
    if not torch.isfinite(found).all():
        return float("inf")
    norm = expected.norm().item()
    return ((found.float() - expected).norm() / norm).item() if norm else found.float().norm().item()


def reference(check: Check, tensors: list[torch.Tensor], grads: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the wanted gradients in float32, in the tensors' layout."""
    leaves = [tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in tensors]
    query, key, value = (in_bhsd(leaf, check) for leaf in leaves)
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    device = str(query.device)
    score_mod, mask_mod = mods_of(check, device)
    scale = check.scale if check.scale is not None else query.shape[3] ** -0.5
    score = query @ key.mT * scale
    b, h, q, k = torch.meshgrid(*(torch.arange(n, device=device) for n in score.shape), indexing="ij")
    if score_mod is not None:
        score = score_mod(score, b, h, q, k)
    if mask_mod is not None:
        score = score.masked_fill(~mask_mod(b, h, q, k), float("-inf"))
    empty = (score == float("-inf")).all(-1, keepdim=True)
    score = torch.where(empty, torch.zeros_like(score), score)  # rows without a key have no gradient, and no NaN
    output = (torch.softmax(score, -1) @ value).masked_fill(empty, 0.0)
    results = [output, torch.logsumexp(score, -1)][: len(grads)]
    given = [in_bhsd(grads[0].float(), check), *grads[1:]]
    pairs = [(result, grad) for result, grad in zip(results, given, strict=True) if result.requires_grad]
    reached, seeds = zip(*pairs, strict=True)
    return _grad(reached, [leaf for leaf in leaves if leaf.requires_grad], seeds)


def _grad(results: Any, leaves: list[torch.Tensor], seeds: Any) -> tuple[torch.Tensor, ...]:
    """Return gradients; zeros for what the results do not depend on."""
    found = torch.autograd.grad(results, leaves, seeds, allow_unused=True)
    return tuple(torch.zeros_like(t) if grad is None else grad for t, grad in zip(leaves, found, strict=True))


def poisoned(
    outputs: list[torch.Tensor], wanted: list[torch.Tensor], grads: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return the gradients, allocated from memory full of NaN."""
    for _ in range(2):
        poison = [torch.full_like(tensor, float("nan")) for tensor in (*wanted, *wanted)]
        rows = [torch.full(tensor.shape[:3], float("nan"), device="cuda") for tensor in (*wanted, *wanted)]
        del poison, rows
    found = torch.autograd.grad(outputs, wanted, grads, retain_graph=True)
    torch.cuda.synchronize()
    return found


# Timing.

GLUON = {"bwd_BACKEND": "GLUON"}
VARIANTS = ("warm", "gluon", "other queries", "other keys", "triton")
_OTHER = {64: (64, 64), 128: (32, 64), 256: (32, 32)}  # queries of a tile of dK, dV; keys of one of dQ


def variants(head_dim: int) -> dict[str, dict[str, Any]]:
    """Return the options of each contender."""
    queries, keys = _OTHER[head_dim]
    return {
        "warm": {"bwd_BACKEND": "TRITON"},  # the first contender of a round runs on a cooler chip: not shown
        "gluon": GLUON,
        "other queries": {**GLUON, "bwd_BLOCK_M1": queries},
        "other keys": {**GLUON, "bwd_BLOCK_N2": keys},
        "triton": {"bwd_BACKEND": "TRITON"},
    }


def timed(head_dim: int, device: str) -> Iterator[tuple[Any, dict[str, flexgen.Attention], list[torch.Tensor]]]:
    """Yield each case with its contenders and inputs."""
    heads = 2048 // head_dim
    make: Callable[..., torch.Tensor] = torch.empty if device == "meta" else torch.randn
    tensors = [make((2, heads, 8192, head_dim), device=device, dtype=torch.bfloat16) for _ in range(3)]
    for tensor in tensors:
        tensor.requires_grad_()
    for case in cases(8192, heads, "cpu" if device == "meta" else device):
        contenders = variants(head_dim).items()
        yield case, {n: flexgen.compile(case.score_mod, case.mask_mod, options) for n, options in contenders}, tensors


def differentiated(
    forward: Callable[[], torch.Tensor], tensors: list[torch.Tensor], grad_output: torch.Tensor
) -> Callable[[], Any] | None:
    """Return a call that computes the gradients of one recorded forward; None where the options do not fit the case."""
    try:
        output = forward()
    except flexgen.FlexgenError:
        return None
    return lambda: torch.autograd.grad(output, tensors, grad_output, retain_graph=True)

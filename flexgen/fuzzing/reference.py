"""Dense attention and its gradients in float64, eagerly in the inputs' own precision, and with errors of rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flexgen.fuzzing.mod_meaning import Mod, Noise, Softmax, allowed_pairs, captured_tensors, modified_scores

NOTHING = -math.inf
STATISTICS = ("logsumexp", "max_scores")


@dataclass(frozen=True, slots=True)
class Problem:
    """One call.

    Attributes:
        query, key, value: [B, Hq, Lq, Dqk], [B or 1, Hkv, Lk, Dqk], [B or 1, Hkv, Lk, Dv].
        lengths: of queries and of keys of the sequences that are packed along the length; None where none are.
        kv_lengths: how many keys each batch entry has, [B]; None for all.
        backward: gradients are wanted too, of inputs and captured tensors that require grad.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: Mod | None
    mask_mod: Mod | None
    scale: float | None
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None
    backward: bool
    kv_lengths: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        return {"query": self.query, "key": self.key, "value": self.value}

    @property
    def learned(self) -> dict[str, Tensor]:
        """The tensors whose gradients are wanted."""
        captured = captured_tensors(self.score_mod, self.mask_mod)
        named = self.inputs | {f"captured {number}": tensor for number, tensor in enumerate(captured)}
        return {name: tensor for name, tensor in named.items() if tensor.requires_grad} if self.backward else {}


@dataclass(frozen=True, slots=True)
class Precision:
    """How a problem is evaluated.

    Attributes:
        exact: in float64, captured tensors too; else as torch does eagerly: scores of float32, and softmax weights and
            their gradients rounded to the inputs' dtype.
        noise: errors to make on the way.
    """

    exact: bool
    noise: Noise | None = None


Values = dict[str, Tensor]  # "output", "logsumexp", "max_scores" and "gradient of NAME"


def evaluate(problem: Problem, precision: Precision) -> Values:
    """Return everything that the problem asks for."""
    inputs = {name: _prepared(tensor, precision) for name, tensor in problem.inputs.items()}
    captured = captured_tensors(problem.score_mod, problem.mask_mod)
    floating = [tensor for tensor in captured if tensor.is_floating_point()]
    instead = {id(tensor): _prepared(tensor, precision) for tensor in floating}
    outputs = _attend(problem, inputs, instead, precision)
    found = dict(zip(("output", *STATISTICS), outputs, strict=True))
    if problem.backward:
        learned = problem.learned
        leaves = [inputs[name] if name in inputs else instead[id(tensor)] for name, tensor in learned.items()]
        loss = loss_of(found["output"], found["logsumexp"], problem.query.dtype)
        found |= {f"gradient of {name}": grad for name, grad in zip(learned, gradients(loss, leaves), strict=True)}
    return {name: tensor.detach() for name, tensor in found.items()}


def loss_of(output: Tensor, logsumexp: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a random projection of output and logsumexp, with weights that the dtype holds exactly."""
    generator = torch.Generator().manual_seed(99)

    def weights(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).to(like.device, like.dtype)

    finite = torch.where(logsumexp.isinf(), 0.0, logsumexp)
    return (output * weights(output)).sum() + (finite * weights(finite)).sum()


def gradients(loss: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return gradients, zeros where the loss does not depend on a tensor."""
    if not leaves:
        return []
    if not loss.requires_grad:
        return [torch.zeros_like(leaf) for leaf in leaves]
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


def _prepared(tensor: Tensor, precision: Precision) -> Tensor:
    """Return a tensor as a leaf of its own, in float64 where the evaluation is exact."""
    own = tensor.detach().double() if precision.exact else tensor.detach()
    own = own.to(torch.float32) if own.element_size() == 1 and own.is_floating_point() else own  # what float8 holds
    return own.requires_grad_(tensor.requires_grad) if own is not tensor else own


def _attend(
    problem: Problem, inputs: Values, instead: dict[int, Tensor], precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    if problem.lengths is None:
        return _dense(problem, inputs, instead, precision, 0)
    parts = [
        _dense(problem, part, instead, precision, number) for number, part in enumerate(_sequences(problem, inputs))
    ]
    rest = problem.query.shape[2] - sum(problem.lengths[0])
    output, logsumexp, max_scores = (torch.cat(tensors, dim=2) for tensors in zip(*parts, strict=True))
    pad = torch.nn.functional.pad
    return (
        pad(output, (0, 0, 0, rest)),
        pad(logsumexp, (0, rest), value=NOTHING),
        pad(max_scores, (0, rest), value=NOTHING),
    )


def _sequences(problem: Problem, inputs: Values) -> Iterator[Values]:
    assert problem.lengths is not None
    ends = [list(itertools.accumulate(lengths, initial=0)) for lengths in problem.lengths]
    for (q, q_end), (k, k_end) in zip(*(itertools.pairwise(side) for side in ends), strict=True):
        query, key, value = inputs["query"][:, :, q:q_end], inputs["key"][:, :, k:k_end], inputs["value"][:, :, k:k_end]
        yield {"query": query, "key": key, "value": value}


def _dense(
    problem: Problem, inputs: Values, instead: dict[int, Tensor], precision: Precision, b: int
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (inputs[name] for name in ("query", "key", "value"))
    scale = 1.0 / math.sqrt(max(query.shape[3], 1)) if problem.scale is None else problem.scale
    key, value = (_grouped(tensor, query) for tensor in (key, value))
    scores = _scores(problem, query, key, scale, instead, precision, b)
    weights, logsumexp, max_scores = _softmax(scores)
    value = value.to(query.dtype)
    weights = weights if precision.noise is None else precision.noise.on_weights(weights)
    output = weights.to(value.dtype) @ value
    if precision.noise is not None:
        with torch.no_grad():
            others = replace(precision, noise=precision.noise.of_the_backward())
            again = _scores(problem, query, key, scale, instead, others, b)
        precision.noise.on_recomputed(Softmax(scores, weights, value, output, logsumexp), again)
    return output, logsumexp, max_scores


def _scores(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    scale: float,
    instead: dict[int, Tensor],
    precision: Precision,
    b: int,
) -> Tensor:
    """Return what the softmax is taken of, [B, H, Lq, Lk]."""
    scores = _products(query, key, precision) * scale
    if precision.noise is not None:
        sizes = query.detach().abs() @ key.detach().abs().mT * abs(scale)
        scores = precision.noise.on_scores(scores, sizes)
    if problem.score_mod is not None:
        scores = modified_scores(problem.score_mod, scores, instead, precision.noise, b)
    if problem.mask_mod is not None:
        allowed = allowed_pairs(problem.mask_mod, scores.shape, scores.device, precision.noise, b)
        scores = torch.where(allowed, scores, NOTHING)
    if problem.kv_lengths is not None:
        exists = torch.arange(scores.shape[3], device=scores.device) < problem.kv_lengths[:, None]
        scores = torch.where(exists[:, None, None], scores, NOTHING)
    return scores


def _grouped(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of a key or value for the query heads of each group, and expand its batch."""
    group = query.shape[1] // max(tensor.shape[1], 1)
    return tensor.repeat_interleave(group, dim=1).expand(query.shape[0], -1, -1, -1)


def _products(query: Tensor, key: Tensor, precision: Precision) -> Tensor:
    key = key.to(query.dtype)
    if precision.exact or query.dtype == torch.float64:
        return query @ key.mT
    return (query @ key.mT).float()  # in the inputs' dtype, and so are their gradients


def _softmax(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, logsumexp and maximum of rows; one without a score above -inf weighs 0 and passes no gradient."""
    if scores.shape[-1] == 0:
        nothing = scores.new_full(scores.shape[:-1], NOTHING)
        return scores, nothing, nothing
    largest = scores.amax(-1)
    empty = largest == NOTHING
    safe = torch.where(empty[..., None], 0.0, scores)
    offset = safe.amax(-1, keepdim=True).detach()
    exponentials = torch.exp(safe - offset)
    total = exponentials.sum(-1, keepdim=True)
    weights = torch.where(empty[..., None], 0.0, exponentials / total)
    # torch.logsumexp has the gradient exp(score - logsumexp), whose difference loses all digits of large scores.
    return weights, torch.where(empty, NOTHING, (offset + total.log())[..., 0]), largest

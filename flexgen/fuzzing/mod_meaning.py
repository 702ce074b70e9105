"""What a mod means, from the callable itself: mapped by torch over all positions, in a precision of choice."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Mod = Callable[..., Any]


OTHER_SEED = 1000
MOST_OF_A_WEIGHT = 0.002  # by which rounding an exponent is taken to change a weight: larger scores are kept exact
MOST_OF_A_SCORE = 0.1  # by which the backward's score may differ from the forward's


@dataclass(frozen=True, slots=True)
class Softmax:
    """Scores [B, H, Lq, Lk], the weights that they give, the values of all heads, and what comes of them."""

    scores: Tensor
    weights: Tensor
    value: Tensor
    output: Tensor
    logsumexp: Tensor


@dataclass(slots=True)
class Noise:
    """Errors as those of rounding: each floating result of a mod is off by some of its dtype's last digits.

    Where a result depends on them so much that arithmetic of the kernel's precision cannot know it, evaluations with
    several seeds differ.

    Attributes:
        epsilon: the relative error of products of queries and keys.
        results: that of float32 and float64 values of mods; narrower dtypes have their own.
        operands: that of what is rounded to the inputs' dtype: softmax weights, the gradients of scores, outputs.
        exponents: that of a score and of a logsumexp, as parts of an exponent.
    """

    epsilon: float
    results: float
    operands: float
    exponents: float
    seed: int
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def of_the_backward(self) -> Noise:
        """Return other errors of the same size."""
        return replace(self, seed=self.seed + OTHER_SEED)

    def on_result(self, value: Tensor) -> Tensor:
        epsilon = max(self.results, torch.finfo(value.dtype).eps)
        return value * (1.0 + self._random.choice((-1.0, 0.0, 1.0)) * epsilon)

    def on_scores(self, scores: Tensor, sizes: Tensor) -> Tensor:
        """Return products with the error of their summation, whose terms have these sizes."""
        noisy = scores + sizes * self._signs(scores, 0) * self.epsilon
        if noisy.requires_grad:
            noisy.register_hook(self._on_gradient)  # type: ignore[no-untyped-call]
        return noisy

    def _on_gradient(self, gradient: Tensor) -> Tensor:
        return gradient * (1.0 + self._signs(gradient, 1) * self.operands)

    def on_weights(self, weights: Tensor) -> Tensor:
        """Return softmax weights with the error of rounding to the inputs' dtype."""
        return weights * (1.0 + self._signs(weights, 2) * self.operands)

    def on_recomputed(self, softmax: Softmax, again: Tensor) -> None:
        """Make the errors of a backward that computes weights again from the logsumexp, and row sums from the output.

        Args:
            again: the scores as the backward computes them, with errors of their own.
        """
        output, scores, value = softmax.output, softmax.scores, softmax.value
        if not output.requires_grad:
            return
        weights, logsumexp = softmax.weights.detach(), softmax.logsumexp.detach()[..., None]
        # Of a row's weights together: the logsumexp is rounded once, and equal scores are rounded alike.
        sizes = self.exponents * (scores.detach().abs() + logsumexp.abs())
        relative = sizes.clamp(max=MOST_OF_A_WEIGHT) * self._signs(logsumexp, 3)
        relative = relative + (again - scores.detach()).clamp(-MOST_OF_A_SCORE, MOST_OF_A_SCORE)
        moved = torch.where(weights == 0, 0.0, weights * relative)
        known: dict[str, Tensor] = {}  # the output's gradient, which is known before those of scores and values

        def note(gradient: Tensor) -> None:
            rounded = output.detach() * self._signs(output, 4) * self.operands
            known["gradient"], known["sums"] = gradient, (gradient * rounded).sum(-1, keepdim=True)

        def on_scores(gradient: Tensor) -> Tensor:
            return torch.where(weights == 0, 0.0, gradient * (1.0 + relative)) + weights * known["sums"]

        output.register_hook(note)  # type: ignore[no-untyped-call]
        if scores.requires_grad:
            scores.register_hook(on_scores)  # type: ignore[no-untyped-call]
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient + moved.mT @ known["gradient"])  # type: ignore[no-untyped-call]

    def _signs(self, like: Tensor, stream: int) -> Tensor:
        """Return numbers from -1 to 1, the same on every device."""
        generator = torch.Generator().manual_seed(5 * self.seed + stream)
        return torch.rand(like.shape, generator=generator, dtype=torch.float64).to(like.device) * 2 - 1


_FLOOR_DIVISIONS = frozenset({torch.floor_divide, Tensor.floor_divide, Tensor.__floordiv__})


class _Meaning(TorchFunctionMode):
    """Reads `table[index]` as flexgen documents it, and puts other tensors in the place of captured ones.

    Args:
        instead: what stands for a captured tensor, by its id.
        noise: errors to make.
    """

    def __init__(self, instead: Mapping[int, Tensor], noise: Noise | None) -> None:
        super().__init__()
        self._instead, self._noise = instead, noise

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = tuple(self._instead.get(id(arg), arg) for arg in args)
        if func in _FLOOR_DIVISIONS:  # torch gives only the other spelling a gradient, of 0
            func, kwargs = torch.div, {"rounding_mode": "floor"}
        gathers = func is Tensor.__getitem__ and _selects_by_tensor(args[1])
        result = _gather(*args) if gathers else func(*args, **(kwargs or {}))
        if self._noise is not None and isinstance(result, Tensor) and result.dtype.is_floating_point and not gathers:
            return self._noise.on_result(result)
        return result


def _selects_by_tensor(index: Any) -> bool:
    return any(isinstance(item, Tensor) for item in (index if isinstance(index, tuple) else (index,)))


def _gather(table: Tensor, index: Any) -> Tensor:
    """Return the indexed element: a negative index counts from the end once, and outside of the table there is 0."""
    indices = [torch.as_tensor(item, device=table.device) for item in (index if isinstance(index, tuple) else (index,))]
    inside = torch.ones((), dtype=torch.bool, device=table.device)
    places = []
    for place, size in zip(indices, table.shape, strict=False):
        wrapped = torch.where(place < 0, place + size, place)
        fits = (wrapped >= 0) & (wrapped < size)
        inside = inside & fits
        places.append(torch.where(fits, wrapped, 0).long())
    if any(size == 0 for size in table.shape[: len(indices)]):
        return table.new_zeros(table.shape[len(indices) :])
    found = torch.ops.aten.index.Tensor(table, places)
    return torch.where(inside, found, torch.zeros((), dtype=table.dtype, device=table.device))


def captured_tensors(*mods: Mod | None) -> list[Tensor]:
    """Return the tensors that mods, plain functions, and functions that they call hold in their closures."""
    found: dict[int, Tensor] = {}
    waiting: list[Any] = [mod for mod in mods if mod is not None]
    seen: set[int] = set()
    while waiting:
        function = waiting.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        for cell in getattr(function, "__closure__", None) or ():
            value = cell.cell_contents
            if isinstance(value, Tensor):
                found[id(value)] = value
            elif callable(value):
                waiting.append(value)
    return list(found.values())


def modified_scores(mod: Mod, scores: Tensor, instead: Mapping[int, Tensor], noise: Noise | None, b: int = 0) -> Tensor:
    """Return what a score_mod makes of scores [B, H, Lq, Lk], in their dtype.

    Args:
        b: the number of the first batch entry.
    """
    if not scores.numel():
        return scores

    def read(*args: Tensor) -> Tensor:
        found: Tensor = mod(*args)
        return instead.get(id(found), found)  # a captured tensor may be all that is returned

    with _Meaning(instead, noise):
        found: Tensor = _over_positions(read, 1)(scores, *_positions(scores.shape, scores.device, b))
    return found.to(scores.dtype)


def allowed_pairs(mod: Mod, sizes: torch.Size, device: torch.device, noise: Noise | None, b: int = 0) -> Tensor:
    """Return what a mask_mod lets through: bool [B, H, Lq, Lk]."""
    if 0 in sizes:
        return torch.zeros(sizes, dtype=torch.bool, device=device)
    with _Meaning({}, noise):
        found: Tensor = _over_positions(mod, 0)(*_positions(sizes, device, b))
    return found


def _positions(sizes: torch.Size, device: torch.device, b: int) -> list[Tensor]:
    return [torch.arange(start, start + size, device=device) for size, start in zip(sizes, (b, 0, 0, 0), strict=True)]


def _over_positions(mod: Mod, leading: int) -> Callable[..., Any]:
    """Map a mod of 0-d tensors over (b, h, q_idx, kv_idx); the `leading` arguments before them go along."""
    mapped: Callable[..., Any] = mod
    for axis in (3, 2, 1, 0):
        places = (0,) * leading + tuple(0 if axis == position else None for position in range(4))
        mapped = torch.vmap(mapped, in_dims=places)
    return mapped

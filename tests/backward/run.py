"""Run flexgen's backward on one problem and hold every gradient against autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import flexgen
from flexgen.capture.live import LiveMods
from tests.corpus.case import Shape
from tests.forward.run import Inputs, Mod, random_inputs
from tests.reference import assert_near, dense_attention, eager_attention, largest_error, magnitude

NAMES = ("query", "key", "value")


@dataclass(frozen=True, slots=True)
class Learned:
    """A score_mod with tensors that get gradients: `make(*tensors)` returns the mod."""

    make: Callable[..., Mod]
    tensors: tuple[Tensor, ...]

    @property
    def mod(self) -> Mod:
        return self.make(*self.tensors)

    def exact(self) -> Learned:
        """Return the same with float64 tensors, so that the reference does not accumulate in a narrower dtype."""
        return Learned(self.make, tuple(leaf(tensor.detach().double()) for tensor in self.tensors))


@dataclass(frozen=True, slots=True)
class Found:
    """A score_mod of the corpus, with every floating tensor that it captured."""

    mod: Mod
    tensors: tuple[Tensor, ...]

    def exact(self) -> Found:
        return self


def learned(make: Callable[..., Mod], *tensors: Tensor) -> Learned:
    return Learned(make, tensors)


def found(mod: Mod) -> Found:
    """Ask for the gradient of every floating tensor that a mod captured."""
    captured = LiveMods(score_mod=mod).current(torch.float32).buffers
    return Found(mod, tuple(leaf(tensor) for tensor in captured if tensor.is_floating_point()))


def fixed(mod: Mod | None) -> Learned:
    """Return a score_mod without anything that gets a gradient."""
    return Learned(lambda: mod, ())


def leaf(tensor: Tensor) -> Tensor:
    return tensor.requires_grad_()


def draw(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: Any = "cpu") -> Tensor:
    """Return a leaf that requires grad, the same values on every device."""
    values = torch.randn(*size, generator=torch.Generator().manual_seed(seed))
    return leaf(values.to(device, dtype))


def training_inputs(shape: Shape, device: torch.device, **options: Any) -> Inputs:
    """Return random leaves that require grad."""
    return Inputs(*(leaf(tensor) for tensor in random_inputs(shape, device, **options)))


def upstream(like: Tensor, seed: int = 99) -> Tensor:
    """Return a gradient of the loss in an output; the same values on every device."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed)).to(like.device, like.dtype)


def finite(lse: Tensor) -> Tensor:
    """Return a logsumexp with 0 in rows without a live key, which a loss must leave out."""
    return torch.where(lse.isinf(), 0.0, lse)


def loss_of(out: Tensor, lse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return the loss: a random projection of the output, plus one of the logsumexp if given."""
    weights = upstream(torch.empty(out.shape, dtype=dtype, device=out.device))
    loss = (out * weights.to(out.dtype)).sum()
    return loss if lse is None else loss + (finite(lse) * upstream(lse.float(), 7).to(lse.dtype)).sum()


def gradients(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return gradients, zeros where the loss does not depend on a tensor."""
    found = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [torch.zeros_like(t) if grad is None else grad for grad, t in zip(found, tensors, strict=True)]


def check_backward(
    inputs: Inputs,
    score: Learned | Found | Mod | None = None,
    mask_mod: Mod | None = None,
    *,
    scale: float | None = None,
    options: Mapping[str, Any] | None = None,
    attention: flexgen.Attention | None = None,
    block_mask: Any = None,
    use_lse: bool = False,
) -> list[Tensor]:
    """Compute every gradient that is wanted, check each, and return them: inputs that require grad, then captured.

    Args:
        attention: an already compiled one to run.
        block_mask: a BlockMask, with the meaning it has in torch's compiled kernels; mask_mod is its own.
        use_lse: the loss depends on the logsumexp too.
    """
    score = score if isinstance(score, Learned | Found) else fixed(score)
    request = flexgen.AuxRequest(lse=True) if use_lse else None
    mask = block_mask.mask_mod if block_mask is not None else mask_mod
    attention = attention or flexgen.compile(score.mod, mask, options)
    result = attention(*inputs, scale=scale, return_aux=request, block_table=block_mask)
    out, lse = (result[0], result[1].lse) if use_lse else (result, None)
    bhsd = Inputs(*(_bhsd(tensor, attention) for tensor in inputs))
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    grads = gradients(loss_of(_bhsd(out, attention), lse, inputs.query.dtype), [*wanted, *score.tensors])
    check = _Reference(bhsd, attention.options.layout, mask_mod, block_mask, scale, use_lse)
    check.compare(score, grads)
    return grads


def _bhsd(tensor: Tensor, attention: flexgen.Attention) -> Tensor:
    return tensor if attention.options.layout == "bhsd" else tensor.transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Reference:
    """What the gradients must be, and how far they may be from it."""

    inputs: Inputs
    layout: str
    mask_mod: Mod | None
    block_mask: Any
    scale: float | None
    use_lse: bool

    def compare(self, score: Learned | Found, grads: list[Tensor]) -> None:
        exact = self._gradients(score.exact(), torch.float64)
        names = [name for name, t in zip(NAMES, self.inputs, strict=True) if t.requires_grad]
        names += [f"captured {number}" for number in range(len(score.tensors))]
        for number, (name, grad, expected) in enumerate(zip(names, grads, exact, strict=True)):
            kind = (getattr(self.inputs, name) if name in NAMES else score.tensors[number - len(names)]).dtype
            assert grad.dtype == kind, f"gradient of {name} has dtype {grad.dtype}, not {kind}"
            bound = self._bound(expected, narrowest(kind, self.inputs.query.dtype))
            if largest_error(grad, expected) > bound:
                bound = max(bound, self._eager_bound(score, number, expected))
            assert_near(f"gradient of {name}", grad, expected, bound)

    def _bound(self, exact: Tensor, dtype: torch.dtype) -> float:
        factor = {torch.float64: 1e-10, torch.float32: 2e-5}.get(dtype, torch.finfo(dtype).eps)
        return factor * magnitude(exact)

    def _eager_bound(self, score: Learned | Found, number: int, exact: Tensor) -> float:
        """Return twice the error of eager mode in the tensors' own dtypes, and a rounding of output and gradient."""
        eager = self._gradients(score, self.inputs.query.dtype)[number]
        return 2.0 * (largest_error(eager, exact) + self._bound(exact, self.inputs.query.dtype))

    def _gradients(self, score: Learned | Found, dtype: torch.dtype) -> list[Tensor]:
        tensors = [t.detach().to(dtype).requires_grad_(t.requires_grad) for t in self.inputs]
        arguments = (*tensors, score.mod, self.mask_mod, self.scale)
        if dtype == torch.float64:
            dense = dense_attention(*arguments, block_mask=self.block_mask)
            out, lse = dense.out, dense.lse if self.use_lse else None
        else:
            out, lse = eager_attention(*arguments, block_mask=self.block_mask, rounded_products=True), None
        loss = loss_of(out, lse, self.inputs.query.dtype)
        grads = gradients(loss, [*(t for t in tensors if t.requires_grad), *score.tensors])
        return [self._in_layout(grad, index, tensors) for index, grad in enumerate(grads)]

    def _in_layout(self, grad: Tensor, index: int, tensors: list[Tensor]) -> Tensor:
        is_input = index < sum(t.requires_grad for t in tensors)
        return grad.transpose(1, 2) if is_input and self.layout == "bshd" else grad


def narrowest(*dtypes: torch.dtype) -> torch.dtype:
    return min(dtypes, key=lambda dtype: dtype.itemsize + (dtype == torch.float16) / 2)

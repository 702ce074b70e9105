"""Whether results are right: as near to float64 as arithmetic of their precision can be expected to come."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from flexgen.fuzzing.mod_meaning import Noise, captured_tensors
from flexgen.fuzzing.reference import STATISTICS, Precision, Problem, Values, evaluate
from flexgen.options import Options

NOISY_EVALUATIONS = 6
FLOAT32_ERROR = 2.5e-7  # relative, of an operation on float32: two units in the last place
FLOAT64_ERROR = 4e-16


class Wrong(AssertionError):
    """A result that is further from float64 than its precision explains."""


class Judge:
    """Judges results of one problem, however they were computed.

    First by a bound for the dtype; where that does not hold, by twice the error of computing eagerly in the inputs'
    dtypes; and where that does not either, by how far errors of rounding move the float64 result: at the edge of a
    `floor` or a comparison, the last digit decides, and no precision but the very same arithmetic knows the answer.

    Args:
        options: of the attention; some trade accuracy away.
    """

    def __init__(self, problem: Problem, options: Options) -> None:
        self._problem = problem
        self._dtype = problem.query.dtype
        kernel = options.forward()
        half = self._dtype in (torch.float16, torch.bfloat16)
        self._rounds_query = bool(kernel.PRESCALE_QK) and half
        self._fast_tanh = half and kernel.FAST_TANH is not False and problem.query.is_cuda
        self.excused = 0  # results that only the third rule lets pass

    def check(self, found: Values, how: str = "") -> None:
        """Check each result.

        Args:
            how: the way they were computed, for the message.

        Raises:
            Wrong: names the result, the place and both values.
        """
        for name, expected in self._exact.items():
            self._check(f"{name} {how}".rstrip(), name, found[name], expected)

    def _check(self, told: str, name: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape:
            raise Wrong(f"{told} has shape {tuple(found.shape)}, not {tuple(expected.shape)}")
        if not expected.numel():
            return
        own, allowed = torch.finfo(found.dtype), self._bound(name, expected)
        if own.eps > torch.finfo(self._dtype).eps:  # as that of a captured tensor may be, which its gradient has
            allowed += 4 * own.eps * _magnitude(expected)
        found = found.double()
        if _largest(_gaps(found, expected)) <= allowed:
            return
        eager = self._eager[name].double()
        comparable = eager.isfinite() & expected.isfinite() | (expected == eager) & (expected == -math.inf)
        gaps = torch.where(comparable, _gaps(found, expected), 0.0)
        allowed += 2 * _largest(torch.where(comparable, _gaps(eager, expected), 0.0))
        if _largest(gaps) > allowed:
            allowed += 4 * self._moved(name, expected, comparable)
            self.excused += 1
        overflows = found.isinf() & (expected.abs() + allowed >= own.max)  # of its own dtype
        gaps = torch.where(overflows, 0.0, gaps)
        if _largest(gaps) > allowed:
            raise Wrong(_told(told, gaps, allowed, found, expected))
        self._check_nan(told, name, found, expected, eager)

    def _check_nan(self, told: str, name: str, found: Tensor, expected: Tensor, eager: Tensor) -> None:
        """Check that a row with a NaN among its live scores is NaN; of gradients nothing is promised then."""
        lost = expected.isnan() & eager.isnan() & ~found.isnan()
        if name == "output" and lost.any():
            raise Wrong(_told(told, lost.double(), 0.0, found, expected))

    def _moved(self, name: str, expected: Tensor, comparable: Tensor) -> float:
        """Return how far errors of rounding move a float64 result."""
        largest = 0.0
        for values in self._noisy:
            moved = torch.where(comparable, _gaps(values[name], expected), 0.0)
            largest = max(largest, _largest(moved))
        return largest

    @cached_property
    def _exact(self) -> Values:
        return evaluate(self._problem, Precision(exact=True))

    @cached_property
    def _eager(self) -> Values:
        return evaluate(self._problem, Precision(exact=False))

    @cached_property
    def _noisy(self) -> list[Values]:
        exponents = FLOAT64_ERROR if self._dtype == torch.float64 else FLOAT32_ERROR
        errors = (self._epsilon(), self._epsilon_of_mods(), self._rounding(), exponents)
        noises = [Noise(*errors, seed) for seed in range(NOISY_EVALUATIONS)]
        return [evaluate(self._problem, Precision(exact=True, noise=noise)) for noise in noises]

    def _rounding(self) -> float:
        """Return the relative error of rounding to the inputs' dtype, to nearest."""
        return torch.finfo(self._dtype).eps / 2

    def _epsilon(self) -> float:
        """Return the relative error that an operation on scores may have."""
        if self._dtype == torch.float64:
            return FLOAT64_ERROR
        if self._fast_tanh:
            return 1e-3
        return torch.finfo(self._dtype).eps if self._rounds_query else FLOAT32_ERROR

    def _epsilon_of_mods(self) -> float:
        """Return the relative error that an operation of a mod may have: of float32 beside a captured tensor of it."""
        captured = captured_tensors(self._problem.score_mod, self._problem.mask_mod)
        narrow = any(it.is_floating_point() and it.dtype != torch.float64 for it in captured)
        return max(self._epsilon(), FLOAT32_ERROR) if narrow else self._epsilon()

    def _bound(self, name: str, expected: Tensor) -> float:
        factors: dict[torch.dtype, float]
        if name in STATISTICS:
            half = torch.finfo(self._dtype).eps if self._rounds_query else 1e-3 if self._fast_tanh else 5e-5
            factors = {torch.float64: 1e-10, torch.float32: 1e-5}
        else:
            half = torch.finfo(self._dtype).eps
            factors = {torch.float64: 1e-10, torch.float32: 1e-5 if name == "output" else 2e-5}
        return factors.get(self._dtype, half) * _magnitude(expected)


def _gaps(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected|: 0 where both are the same infinity, infinite where one alone is NaN."""
    found, expected = found.double(), expected.double()
    return torch.where(found == expected, 0.0, (found - expected).abs()).nan_to_num(nan=math.inf)


def _largest(gaps: Tensor) -> float:
    return float(gaps.max())


def _magnitude(tensor: Tensor) -> float:
    finite = tensor[tensor.isfinite()]
    return max(1.0, float(finite.abs().max())) if finite.numel() else 1.0


def _told(name: str, gaps: Tensor, allowed: float, found: Tensor, expected: Tensor) -> str:
    place = tuple(int(index) for index in torch.unravel_index(gaps.argmax(), gaps.shape))
    return (
        f"{name}: off by {float(gaps[place]):.3g} at {list(place)}, {allowed:.3g} allowed: "
        f"{float(found[place]):.7g} instead of {float(expected[place]):.7g}"
    )

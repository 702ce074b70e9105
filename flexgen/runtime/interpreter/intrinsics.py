"""What rewritten functions call: Triton's meaning of assignment, conditions and loops, on interpreted values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flexgen.runtime.interpreter import rewrite
from flexgen.runtime.interpreter.builder import NumpyBuilder, Value

Thunk = Callable[[], Any]


class Intrinsics:
    """Triton's front end as functions; `core` and `semantic` are those of the private copy."""

    def __init__(self, core: Any, semantic: Any, builder: NumpyBuilder) -> None:
        self._core, self._semantic, self._builder = core, semantic, builder

    def names(self) -> dict[str, Any]:
        """Return what the globals of rewritten functions must hold."""
        return {
            rewrite.TO_TENSOR: self.to_tensor,
            rewrite.TRUTH: self.truth,
            rewrite.NOT: self.negate,
            rewrite.AND: self.conjunction,
            rewrite.OR: self.disjunction,
        }

    def scalar(self, value: float, dtype: Any) -> Any:
        """Return a number as a scalar tensor of Triton's type `dtype`."""
        if dtype == self._core.bfloat16:
            return self._core.tensor(self._builder.get_bf16(value), dtype)
        data = np.array([value], dtype=self._builder.interpreter._get_np_dtype(dtype))
        return self._core.tensor(Value(data, dtype), dtype)

    def to_tensor(self, value: Any) -> Any:
        return self._semantic.to_tensor(value, False)

    # Conditions.

    def truth(self, condition: Any) -> bool:
        if self._is_tensor(condition) and condition.type.is_block():
            raise TypeError("a condition must be a scalar, not a block")
        return bool(condition)

    def negate(self, value: Any) -> Any:
        return self._semantic.not_(value) if self._is_tensor(value) else not value

    def conjunction(self, *thunks: Thunk) -> Any:
        return self._connect(thunks, decisive=False, combine=self._semantic.logical_and)

    def disjunction(self, *thunks: Thunk) -> Any:
        return self._connect(thunks, decisive=True, combine=self._semantic.logical_or)

    def _connect(self, thunks: tuple[Thunk, ...], decisive: bool, combine: Callable[..., Any]) -> Any:
        """Evaluate in order; a plain value may decide early, tensors are all evaluated and combined elementwise."""
        tensors, value = [], None
        for thunk in thunks:
            value = thunk()
            if self._is_tensor(value):
                tensors.append(value)
            elif bool(value) is decisive:
                return value
        return functools.reduce(combine, tensors) if tensors else value

    def _is_tensor(self, value: Any) -> bool:
        return isinstance(value, self._core.tensor)

    # Loops and hints.

    def loop(self, first: Any, second: Any = None, step: Any = None, **hints: Any) -> Iterator[Any]:
        """Stand in for tl.range and for Python's range: yields scalars of the type that the compiled loop has."""
        start, stop = (0, first) if second is None else (first, second)
        bounds = [self._semantic.to_tensor(bound) for bound in (start, stop, 1 if step is None else step)]
        dtype = functools.reduce(self._semantic.integer_promote_impl, (bound.dtype for bound in bounds))
        for value in range(*(int(bound) for bound in bounds)):
            yield self.scalar(value, dtype)

    def static_loop(self, first: Any, second: Any = None, step: Any = None) -> range:
        """Stand in for tl.static_range: the values are known, so they are plain integers."""
        start, stop = (0, first) if second is None else (first, second)
        return range(int(start), int(stop), 1 if step is None else int(step))

    def multiple_of(self, value: Any, divisors: Any) -> Any:
        """Check the hint where it is about one number, since a false one miscompiles on a GPU."""
        divisor = getattr(divisors, "value", divisors)
        if self._is_tensor(value) and value.handle.data.size == 1 and isinstance(divisor, int):
            assert int(value) % divisor == 0, f"{int(value)} is not a multiple of {divisor}"
        return value


def ignore_hint(value: Any, hint: Any) -> Any:
    return value


def static_assert(condition: Any, message: Any = "") -> None:
    assert condition, message

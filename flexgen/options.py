"""What a user may choose about a kernel: one frozen, typed value; None means that flexgen decides."""

from __future__ import annotations

import dataclasses
import difflib
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flexgen.errors import OptionError

Layout = Literal["bhsd", "bshd"]
BACKENDS = ("AUTO", "TRITON", "TRITON_DECODE", "GLUON")
FLOAT32_PRECISIONS = ("ieee", "tf32", "tf32x3")


Check = Callable[[str, Any], Any]  # returns the value of an option by its name and what was given, or refuses


def _integer(value: Any) -> int | None:
    """Return a whole number of any type, numpy's too, as Python's; None for what is none, as a bool."""
    if type(value) is bool or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def _place(value: Any, values: tuple[Any, ...]) -> int | None:
    """Return where a value stands among others; None where it does not, or cannot be compared, as an array."""
    try:
        return values.index(value)
    except (ValueError, RuntimeError, TypeError):
        return None


def _power_of_two(low: int, high: int, why: str) -> Check:
    def check(name: str, value: Any) -> int:
        number = _integer(value)
        if number is None or number < low or number > high or number & (number - 1):
            raise OptionError(
                f"{name}={value!r} is not a power of two from {low} to {high}",
                why=why,
                fix=f"choose one of {', '.join(str(1 << i) for i in range(low.bit_length() - 1, high.bit_length()))}",
            )
        return number

    return check


def _whole(low: int, high: int) -> Check:
    def check(name: str, value: Any) -> int:
        number = _integer(value)
        if number is None or not low <= number <= high:
            raise OptionError(f"{name}={value!r} is not a whole number from {low} to {high}", fix="choose one in range")
        return number

    return check


def _flag(name: str, value: Any) -> bool:
    place = _place(value, (False, True))
    if place is None:
        raise OptionError(f"{name}={value!r} is not a bool", fix=f"use {name}=True or {name}=False")
    return bool(place)


def _one_of(values: tuple[Any, ...]) -> Check:
    def check(name: str, value: Any) -> Any:
        place = _place(value, values)
        if place is None:
            raise OptionError(
                f"{name}={value!r} is not a value of {name}", fix=f"choose one of {', '.join(map(repr, values))}"
            )
        return values[place]

    return check


def _backend(name: str, value: Any) -> Any:
    if isinstance(value, str) and value == "FLASH":
        raise OptionError(
            "BACKEND='FLASH' is torch's CuTe backend, which flexgen does not contain",
            why="flexgen emits its own kernels",
            fix="leave BACKEND at 'AUTO', or choose one of " + ", ".join(BACKENDS),
        )
    return _one_of(BACKENDS)(name, value)


_BLOCK = _power_of_two(
    16, 512, "Triton's tensors have power-of-two sizes and its matrix units work on at least 16 rows"
)
_CHECKS: dict[str, Check] = {
    **dict.fromkeys(("BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), _BLOCK),
    "num_warps": _power_of_two(1, 32, "a program's warps divide its tile in halves"),
    "num_stages": _whole(1, 8),
    "SPLIT_KV": _whole(1, 1024),
    **dict.fromkeys(
        (
            "PRESCALE_QK",
            "USE_SUBTILING",
            "ROWS_GUARANTEED_SAFE",
            "BLOCKS_ARE_CONTIGUOUS",
            "WRITE_DQ",
            "FORCE_USE_FLEX_ATTENTION",
            "USE_TMA",
            "FAST_TANH",
            "LONG_ROWS_FIRST",
        ),
        _flag,
    ),
    "BACKEND": _backend,
    "kpack": _one_of((1, 2)),
    "matrix_instr_nonkdim": _one_of((0, 16, 32)),
    "waves_per_eu": _whole(0, 8),
    "FLOAT32_PRECISION": _one_of(FLOAT32_PRECISIONS),
}


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """Choices about one kernel, by Inductor's names. See docs/options.md for what each does.

    BLOCK_M, BLOCK_N: query rows and keys of a forward tile; powers of two, at least 16.
    BLOCK_M1, BLOCK_N1, BLOCK_M2, BLOCK_N2: tiles of the backward kernels (dK/dV: 1, dQ: 2).
    num_warps, num_stages: warps of a program; depth of the software pipeline.
    """

    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    BLOCK_M1: int | None = None
    BLOCK_N1: int | None = None
    BLOCK_M2: int | None = None
    BLOCK_N2: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    PRESCALE_QK: bool | None = None
    USE_SUBTILING: bool | None = None
    ROWS_GUARANTEED_SAFE: bool | None = None
    BLOCKS_ARE_CONTIGUOUS: bool | None = None
    WRITE_DQ: bool | None = None
    FORCE_USE_FLEX_ATTENTION: bool | None = None
    USE_TMA: bool | None = None
    BACKEND: str | None = None
    kpack: int | None = None
    matrix_instr_nonkdim: int | None = None
    waves_per_eu: int | None = None
    FLOAT32_PRECISION: str | None = None
    FAST_TANH: bool | None = None
    LONG_ROWS_FIRST: bool | None = None
    SPLIT_KV: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check(name, value))

    def given(self) -> dict[str, Any]:
        """Return the options that are set, in declaration order."""
        pairs = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in pairs if value is not None}


WHOLE_NAMES = ("layout", "autotune")  # of an attention as a whole, not of a kernel: they have no prefix
KERNEL_OPTION_NAMES = tuple(field.name for field in dataclasses.fields(KernelOptions))
BACKWARD_ONLY = frozenset({"BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "WRITE_DQ"})
# Choices that the backward kernels do not have; without a prefix they are about the forward alone.
FORWARD_ONLY = frozenset(
    {
        *("BLOCK_M", "BLOCK_N", "PRESCALE_QK", "USE_SUBTILING", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS"),
        *("USE_TMA", "SPLIT_KV"),
    }
)
PREFIXES = ("fwd_", "bwd_")


@dataclass(frozen=True, slots=True)
class Options:
    """All options of an attention.

    Attributes:
        kernel: choices for every kernel.
        fwd, bwd: choices for the forward and the backward kernels; they win over `kernel`.
        layout: "bhsd" (query [B, Hq, Lq, D]) or "bshd" (query [B, Lq, Hq, D]); the output has the same.
        autotune: the first call of each problem on a GPU measures which options are fastest there, and keeps them.
    """

    kernel: KernelOptions = KernelOptions()
    fwd: KernelOptions = KernelOptions()
    bwd: KernelOptions = KernelOptions()
    layout: Layout = "bhsd"
    autotune: bool = False

    def __post_init__(self) -> None:
        _flag("autotune", self.autotune)
        if self.layout not in ("bhsd", "bshd"):
            raise OptionError(
                f"layout={self.layout!r} is not a layout",
                why="a layout names the order of batch, heads, sequence and head dim",
                fix='use layout="bhsd" or layout="bshd"',
            )
        _refuse_foreign("fwd_", self.fwd, BACKWARD_ONLY, "forward kernel")
        _refuse_foreign("bwd_", self.bwd, FORWARD_ONLY, "backward kernels")

    @staticmethod
    def of(given: Options | Mapping[str, Any] | None = None, **named: Any) -> Options:
        """Build options from a mapping or keywords with Inductor's names, each also with `fwd_` or `bwd_`.

        Raises:
            OptionError: for an unknown name (the nearest valid one is named) or a value that is not allowed.
        """
        if isinstance(given, Options):
            return given
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(
                f"options must be a dict or flexgen.Options, got {type(given).__name__}",
                fix='pass for example options={"BLOCK_M": 64}',
            )
        return _from_names({**(given or {}), **named})

    def over(self, settings: Mapping[str, Any]) -> Options:
        """Return these options with others set, by name as in `of`.

        Raises:
            OptionError: for an unknown name or a value that is not allowed.
        """
        given = Options.of(settings)
        groups = ("kernel", "fwd", "bwd")
        merged = {name: dataclasses.replace(getattr(self, name), **getattr(given, name).given()) for name in groups}
        whole = {name: getattr(given, name) for name in WHOLE_NAMES if name in settings}
        return dataclasses.replace(self, **merged, **whole)

    def forward(self) -> KernelOptions:
        """Return the choices for the forward kernel."""
        return dataclasses.replace(self.kernel, **self.fwd.given())

    def backward(self) -> KernelOptions:
        """Return the choices for the backward kernels."""
        return dataclasses.replace(self.kernel, **self.bwd.given())


def _refuse_foreign(prefix: str, options: KernelOptions, foreign: frozenset[str], kernels: str) -> None:
    """Refuse a choice for kernels that do not have it; saying no to a feature that they lack is fine."""
    for name, value in options.given().items():
        if name in foreign and value is not False:
            tiles = "; their tiles are bwd_BLOCK_M1, bwd_BLOCK_N1, bwd_BLOCK_M2 and bwd_BLOCK_N2"
            raise OptionError(
                f"{prefix}{name}={value!r} chooses nothing",
                why=f"the {kernels} have no {name}" + (tiles if prefix == "bwd_" and name.startswith("BLOCK_") else ""),
                fix=f"drop it, or use {name} without a prefix",
            )


def valid_names() -> tuple[str, ...]:
    """Return every accepted option name, prefixed ones included."""
    prefixed = tuple(prefix + name for prefix in PREFIXES for name in KERNEL_OPTION_NAMES)
    return (*WHOLE_NAMES, *KERNEL_OPTION_NAMES, *prefixed)


def _from_names(names: Mapping[str, Any]) -> Options:
    groups: dict[str, dict[str, Any]] = {"": {}, "fwd_": {}, "bwd_": {}}
    whole: dict[str, Any] = {}
    for name, value in names.items():
        prefix = next((p for p in PREFIXES if isinstance(name, str) and name.startswith(p)), "")
        bare = str(name)[len(prefix) :]
        if name in WHOLE_NAMES:
            whole[name] = value
        elif bare in KERNEL_OPTION_NAMES:
            groups[prefix][bare] = value
        else:
            raise _unknown(name)
    return Options(
        kernel=KernelOptions(**groups[""]),
        fwd=KernelOptions(**groups["fwd_"]),
        bwd=KernelOptions(**groups["bwd_"]),
        **whole,
    )


def _unknown(name: object) -> OptionError:
    near = difflib.get_close_matches(str(name), valid_names(), n=1, cutoff=0.5)
    suggestion = f"did you mean {near[0]!r}? " if near else ""
    return OptionError(
        f"unknown option {name!r}",
        why="flexgen refuses names it does not know, so that a misspelt option is never silently ignored",
        fix=f"{suggestion}valid names: {', '.join(WHOLE_NAMES)}, and each with or without the prefix fwd_ or bwd_: "
        + ", ".join(KERNEL_OPTION_NAMES),
    )

"""A private copy of triton.language that computes with numpy, so that Triton's own modules are never patched.

Triton's interpreter works by replacing the builtins of triton.language for the length of a run, which breaks a
compilation in another thread. Here the package's modules are imported a second time under another name, and only that
copy is changed, once. Emitted modules are translated to it: their functions run on the copy while the originals can be
compiled at the same time, from any thread.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from triton.runtime.jit import KernelInterface

from flexgen.runtime.interpreter import rewrite, shortcuts
from flexgen.runtime.interpreter.builder import NumpyBuilder
from flexgen.runtime.interpreter.intrinsics import Intrinsics, ignore_hint, static_assert
from flexgen.runtime.interpreter.private_copy import copy_interpreter, copy_language, submodule
from flexgen.runtime.interpreter.reduction import Reductions

_SUBMODULES = ("core", "math", "standard", "random", "semantic")


class Language:
    """The private copy.

    Attributes:
        tl: the module that stands for triton.language.
        core: its submodule with the types.
        builder: what computes.
        semantic: Triton's type checking, on top of the builder.
        intrinsics: what rewritten functions call.
    """

    def __init__(self) -> None:
        self.tl = copy_language()
        self._modules = [submodule(name) for name in _SUBMODULES]
        self.core, *_, semantic_module = self._modules
        self.builder = _make_builder(self.tl)
        self.semantic: Any = shortcuts.install(self.core, semantic_module.TritonSemantic)(self.builder)
        self.intrinsics = Intrinsics(self.core, self.semantic, self.builder)
        self._replace_builtins()
        self._replace_jit_functions()
        self._replace_constexpr_functions()
        self._replace_loops_and_reductions()
        self._complete_tensor()

    def _owners(self) -> list[Any]:
        """Return the modules and classes that hold functions of the language."""
        core = self.core
        return [self.tl, *self._modules, core.tensor, core.tensor_descriptor_base, core.tensor_descriptor]

    def _replace(self, replacement: Callable[[Any], Any]) -> None:
        """Replace each member for which `replacement` returns something."""
        for owner in self._owners():
            for name, member in list(vars(owner).items()):
                if (new := replacement(member)) is not None:
                    setattr(owner, name, new)

    def _replace_builtins(self) -> None:
        """Give every builtin its `_semantic`, which the compiler would pass."""
        semantic, mark = self.semantic, self.core.TRITON_BUILTIN

        def with_semantic(member: Any) -> Callable[..., Any] | None:
            if not getattr(member, mark, False):
                return None
            direct = getattr(member, "__wrapped__", member)

            @functools.wraps(member)
            def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
                return direct(*args, _semantic=semantic, **options)

            return call

        self._replace(with_semantic)

    def _replace_jit_functions(self) -> None:
        """Rewrite the library's own JIT functions, and the tensor methods that are the same functions."""
        rewritten: dict[int, Any] = {}
        for module in self._modules:
            namespace = vars(module)
            jitted = {name: value for name, value in namespace.items() if _is_jitted_in(value, module)}
            namespace.update(self.intrinsics.names())
            rewrite.define_functions(inspect.getsource(module), module.__file__, jitted, namespace)
            rewritten |= {id(old): namespace[name] for name, old in jitted.items()}
        self._replace(lambda member: rewritten.get(id(member)))

    def _replace_constexpr_functions(self) -> None:
        """Make functions of compile-time values plain ones that know the copy's constexpr."""
        unwrap = self.core._unwrap_if_constexpr

        def plain(member: Any) -> Callable[..., Any] | None:
            if type(member).__name__ != "ConstexprFunction":
                return None

            def call(*args: Any, _semantic: Any = None, **options: Any) -> Any:
                return member.fn(*map(unwrap, args), **{name: unwrap(value) for name, value in options.items()})

            return call

        self._replace(plain)

    def _replace_loops_and_reductions(self) -> None:
        reductions, intrinsics = Reductions(self.tl, self.builder), self.intrinsics
        for owner in (self.tl, self.core):
            owner.reduce, owner.associative_scan = reductions.reduce, reductions.scan
            owner.range, owner.static_range = intrinsics.loop, intrinsics.static_loop
            owner.multiple_of, owner.static_assert = intrinsics.multiple_of, static_assert
            owner.max_contiguous = owner.max_constancy = ignore_hint
        # Methods: bound methods would not take the tensor as their first argument.
        tensor = self.core.tensor
        tensor.reduce = lambda self, *args, **options: reductions.reduce(self, *args, **options)
        tensor.associative_scan = lambda self, *args, **options: reductions.scan(self, *args, **options)

    def _complete_tensor(self) -> None:
        """Give tensors what only an interpreted one has: a truth value, an integer value, a text."""
        tensor = self.core.tensor
        # Triton's own code asks blocks for their truth to learn whether they are there.
        tensor.__bool__ = lambda self: bool(self.handle.data.item()) if self.handle.data.size == 1 else True
        tensor.__index__ = lambda self: int(self.handle.data.item())
        tensor.__repr__ = tensor.__str__ = lambda self: f"{self.type} {self.handle.data}"
        tensor.T = property(lambda self: self.trans())
        # The builder takes Triton's types where the compiler's takes MLIR's.
        self.core.dtype.to_ir = lambda self, builder: self


def is_jitted(value: object) -> bool:
    """Return whether a value is a function that `triton.jit` made, also under TRITON_INTERPRET=1."""
    return isinstance(value, KernelInterface) and isinstance(getattr(value, "fn", None), FunctionType)


def _is_jitted_in(value: Any, module: ModuleType) -> bool:
    return is_jitted(value) and value.fn.__module__ == module.__name__


def _make_builder(tl: Any) -> Any:
    """Return a NumpyBuilder over Triton's interpreting builder."""
    interpreter = copy_interpreter(tl)
    builder = type("Builder", (NumpyBuilder, interpreter.InterpreterBuilder), {})()
    # Wrapping is the meaning of integer overflow; checking each addition costs more than the addition.
    precisions = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    builder.options = interpreter.InterpreterOptions(sanitize_overflow=False, allowed_dot_input_precisions=precisions)
    builder.bind(tl, interpreter)
    return builder


_lock = threading.Lock()
_language: Language | None = None


def interpreted_language() -> Language:
    """Return the process's private copy of triton.language, made at the first call (about 100 ms)."""
    global _language
    with _lock:
        if _language is None:
            _language = Language()
    return _language

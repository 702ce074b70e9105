"""Runs emitted Hopper kernels on the CPU: what Gluon's words mean, with partitions, copies and products out of step.

Gluon has no interpreter. This one knows the words that flexgen's kernels use. Partitions of a program run in threads,
one at a time, and change places at barriers in a random order; copies are made at random moments after they were
started; asynchronous products read their operands as late as their wait allows. So a wrong parity is a deadlock that is
reported, and a slot that is freed too early is a wrong result. It proves nothing about machine code.
"""

from __future__ import annotations

import ast
import random
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from flexgen.codegen.dialects.gluon import SPELLINGS
from flexgen.codegen.source import Arg
from flexgen.runtime.gluon_descriptor import Descriptor

Thunk = Callable[[], None]


class DeadlockError(AssertionError):
    """No partition can go on."""


# Scheduling.


@dataclass(eq=False)
class Partition:
    """One partition of a program: a thread that runs when it is given the turn."""

    body: Thunk
    turn: threading.Event = field(default_factory=threading.Event)
    may_run: Callable[[], bool] = bool
    done: bool = False
    products: list[Product] = field(default_factory=list)  # in flight, the oldest first


class Scheduler:
    """Gives the turn to partitions, and lets copies happen, in a random order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.partitions: list[Partition] = []
        self.copies: list[Thunk] = []
        self.current: Partition | None = None
        self.failure: BaseException | None = None
        self._finished = threading.Event()

    def run(self, bodies: Sequence[Thunk]) -> None:
        self.partitions = [Partition(body, may_run=lambda: True) for body in bodies]
        threads = [threading.Thread(target=self._main, args=(p,), daemon=True) for p in self.partitions]
        for thread in threads:
            thread.start()
        self._hand_over()
        self._finished.wait()
        for thread in threads:
            thread.join()
        self.current = None
        if self.failure is not None:
            raise self.failure

    def pause(self, may_run: Callable[[], bool] = lambda: True) -> None:
        """Let others run; come back when `may_run` holds."""
        me = self.current
        if me is None:  # outside of partitions nothing runs beside
            return
        me.may_run = may_run
        self._hand_over()
        me.turn.wait()
        me.turn.clear()
        if self.failure is not None:
            raise SystemExit

    def _main(self, partition: Partition) -> None:
        partition.turn.wait()
        partition.turn.clear()
        try:
            if self.failure is None:
                partition.body()
                if partition.products:
                    raise AssertionError("a partition ended with products in flight")
        except SystemExit:
            pass
        except BaseException as error:
            self._fail(error)
        partition.done = True
        self._hand_over()

    def _hand_over(self) -> None:
        while True:
            waiting = [p for p in self.partitions if not p.done]
            if not waiting:
                self._finished.set()
                return
            ready = [p for p in waiting if self.failure is not None or p.may_run()]
            if self.copies and (not ready or self.random.random() < 0.5):
                self.copies.pop(self.random.randrange(len(self.copies)))()
                continue
            if not ready:
                self._fail(DeadlockError(f"{len(waiting)} partitions wait for each other"))
                continue
            self.current = self.random.choice(ready)
            self.current.turn.set()
            return

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error


# Memory.


@dataclass
class Pointer:
    """An address: elements of a flat tensor."""

    base: torch.Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.base, self.offset + other)


@dataclass
class Layout:
    """A layout's arguments, which the CPU has no use for."""

    arguments: tuple[Any, ...] = ()

    @property
    def value(self) -> Layout:
        return self


@dataclass
class Shared:
    """A tile in shared memory, or a view of one."""

    data: torch.Tensor

    def index(self, slot: Any) -> Shared:
        return Shared(self.data[int(slot)])

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def load(self, layout: Layout) -> torch.Tensor:
        return self.data.clone()


class Barrier:
    """One mbarrier: arrivals and bytes that complete its phase."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, count: int) -> None:
        assert self.left >= count, "more arrivals than a phase takes"
        self.left -= count
        self.settle()

    def settle(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.left = self.count
            self.phase ^= 1


@dataclass
class Barriers:
    """An array of mbarriers, or one of them."""

    all: list[Barrier]

    def index(self, slot: Any) -> Barriers:
        return Barriers([self.all[int(slot)]])

    @property
    def one(self) -> Barrier:
        (barrier,) = self.all
        return barrier


class TiledDescriptor:
    """The copy engine's view of a tensor: a tile's elements outside of it are zero."""

    def __init__(self, descriptor: Descriptor, kind: str) -> None:
        self.tensor = torch.as_strided(descriptor.base.detach(), descriptor.shape, descriptor.strides)
        self.block = [int(size) for size in re.findall(r"\d+", kind.partition("[")[2])]
        nbytes = torch.Size(self.block).numel() * descriptor.base.element_size()
        self.block_type = SimpleNamespace(nbytes=nbytes)
        self.layout = Layout()

    def read(self, corner: Sequence[Any]) -> torch.Tensor:
        starts = [int(start) for start in corner]
        assert starts[-1] * self.tensor.element_size() % 16 == 0, "the copy engine reads from 16 bytes on"
        tile = torch.zeros(self.block, dtype=self.tensor.dtype)
        ends = [min(s + n, size) for s, n, size in zip(starts, self.block, self.tensor.shape, strict=True)]
        if all(0 <= s < e for s, e in zip(starts, ends, strict=True)):
            inside = self.tensor[tuple(slice(s, e) for s, e in zip(starts, ends, strict=True))]
            tile[tuple(slice(0, e - s) for s, e in zip(starts, ends, strict=True))] = inside
        return tile


# Products.


class Product:
    """What an asynchronous matrix instruction will have written: nothing before a wait has seen to it."""

    def __init__(self, left: Any, right: Shared, start: Any) -> None:
        self.left, self.right, self.start = left, right, start
        self.result: torch.Tensor | None = None

    def finish(self) -> None:
        left = self.left.data if isinstance(self.left, Shared) else self.left
        start = value_of(self.start)
        self.result = left.float() @ self.right.data.float() + (0.0 if start is None else start)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32


def value_of(value: Any) -> Any:
    if isinstance(value, Product):
        assert value.result is not None, "a product is read before a wait has seen to it"
        return value.result
    return value


class _Int(int):
    @property
    def value(self) -> int:
        return int(self)


class _Float(float):
    @property
    def value(self) -> float:
        return float(self)


def _constexpr(value: Any) -> Any:
    match value:
        case bool() | Layout():
            return value
        case int():
            return _Int(value)
    return _Float(value)


def _layout(*arguments: Any, **named: Any) -> Layout:
    return Layout((*arguments, *named.items()))


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None)


def _keep_interval(score: torch.Tensor, distance: torch.Tensor, width: Any) -> torch.Tensor:
    live = (distance >= 0) & (distance < width)
    return torch.where(live, score, float("-inf"))


_ASSEMBLY: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("setp.lt.u32 p, $2, $3; selp.f32", _keep_interval),
    ("mov.b32 $0, $1;", lambda number, *_: number),
    ("tanh.approx.f32", torch.tanh),
)


class Machine:
    """One program's world: the words of Gluon, for its number and the scheduler's seed."""

    def __init__(self, program: int, programs: int, seed: int) -> None:
        self.program, self.programs = program, programs
        self.scheduler = Scheduler(seed)
        self._outside = Partition(lambda: None)

    @property
    def _in_flight(self) -> list[Product]:
        return (self.scheduler.current or self._outside).products

    # Language.

    def language(self) -> SimpleNamespace:
        names = {
            "constexpr": _constexpr,
            **{f"{n}Layout": _layout for n in ("NVMMADistributed", "DotOperand", "Slice", "Blocked")},
            **{
                n: getattr(torch, n)
                for n in ("int8", "int32", "int64", "float16", "bfloat16", "float32", "exp2", "abs")
            },
            **{n: getattr(torch, n) for n in ("exp", "log", "log2", "sqrt", "floor", "sin", "cos", "erf")},
            "arange": lambda start, end, layout: torch.arange(start, end, dtype=torch.int32),
            "full": lambda shape, value, dtype, layout: torch.full([int(s) for s in shape], value, dtype=dtype),
            "where": lambda c, a, b: torch.where(_tensor(c), *self._alike(a, b)),
            "maximum": lambda a, b, **_: torch.maximum(*self._alike(a, b)),
            "minimum": lambda a, b, **_: torch.minimum(*self._alike(a, b)),
            "max": lambda a, axis: a.amax(axis),
            "min": lambda a, axis: a.amin(axis),
            "cdiv": lambda a, b: (a + b - 1) // b,
            "static_range": range,
            "program_id": lambda axis: torch.tensor(self.program, dtype=torch.int32),
            "num_programs": lambda axis: self.programs,
            "convert_layout": lambda value, layout: value,
            "allocate_shared_memory": self._allocate,
            "inline_asm_elementwise": self._assembly,
            "load": self._load,
            "store": self._store,
            "warp_specialize": self._specialize,
        }
        return SimpleNamespace(**names)

    def globals(self) -> dict[str, Any]:
        """Return what a kernel's module imports."""
        barrier = SimpleNamespace(
            MBarrierLayout=Layout, init=self._init, expect=self._expect, wait=self._wait, arrive=self._arrive
        )
        return {
            "gl": self.language(),
            "gluon": SimpleNamespace(jit=lambda function: function),
            "tl": SimpleNamespace(PropagateNan=SimpleNamespace(ALL=None)),
            "libdevice": torch,
            "fence_async_shared": lambda: None,
            "mbarrier": barrier,
            "tma": SimpleNamespace(**{spelling.load_tile: self._copy for spelling in SPELLINGS.values()}),
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
        }

    @staticmethod
    def _alike(a: Any, b: Any) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = _tensor(a), _tensor(b)
        if a.dtype != b.dtype:
            dtype = (
                a.dtype
                if a.dim() > b.dim()
                else b.dtype
                if b.dim() > a.dim()
                else torch.promote_types(a.dtype, b.dtype)
            )
            a, b = a.to(dtype), b.to(dtype)
        return a, b

    @staticmethod
    def _assembly(text: str, constraints: str, args: Sequence[Any], **_: Any) -> Any:
        return next(function for known, function in _ASSEMBLY if known in text)(*args)

    @staticmethod
    def _load(pointer: Pointer, mask: Any = None, other: Any = 0) -> torch.Tensor:
        offset = _tensor(pointer.offset).long()
        if mask is None:
            return pointer.base[offset]
        offset, mask = torch.broadcast_tensors(offset, _tensor(mask))
        found = pointer.base[torch.where(mask, offset, 0)]
        return torch.where(mask, found, torch.tensor(other, dtype=found.dtype))

    @staticmethod
    def _store(pointer: Pointer, value: torch.Tensor, mask: torch.Tensor) -> None:
        offset, value, mask = torch.broadcast_tensors(pointer.offset.long(), value, mask)
        pointer.base[offset[mask]] = value[mask]

    # Shared memory, copies and barriers.

    @staticmethod
    def _allocate(dtype: torch.dtype, shape: Sequence[int], layout: Layout) -> Shared | Barriers:
        if dtype == torch.int64:
            return Barriers([Barrier() for _ in range(shape[0])])
        return Shared(torch.full([int(size) for size in shape], float("nan"), dtype=dtype))

    @staticmethod
    def _init(barriers: Barriers, count: int) -> None:
        barriers.one.count = barriers.one.left = count

    def _expect(self, barriers: Barriers, nbytes: int) -> None:
        barriers.one.bytes += nbytes
        barriers.one.arrive(1)
        self.scheduler.pause()

    def _arrive(self, barriers: Barriers, count: int) -> None:
        barriers.one.arrive(count)
        self.scheduler.pause()

    def _wait(self, barriers: Barriers, phase: Any) -> None:
        barrier, parity = barriers.one, int(phase)
        self.scheduler.pause(lambda: barrier.phase != parity)

    def _copy(self, descriptor: TiledDescriptor, corner: Sequence[Any], barriers: Barriers, place: Shared) -> None:
        starts = [int(start) for start in corner]

        def copy() -> None:
            place.data.copy_(descriptor.read(starts).view_as(place.data))
            barriers.one.bytes -= descriptor.block_type.nbytes
            barriers.one.settle()

        self.scheduler.copies.append(copy)

    # Products.

    def _multiply(self, left: Any, right: Shared, start: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        assert is_async
        product = Product(left, right, start if use_acc else None)
        self._in_flight.append(product)
        return product

    def _wait_for_products(self, left: int, deps: Sequence[Any]) -> Any:
        self.scheduler.pause()
        products = self._in_flight
        while len(products) > left:
            products.pop(0).finish()
        found = [value_of(dep) for dep in deps]
        return found[0] if len(found) == 1 else tuple(found)

    def _specialize(self, partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any) -> None:
        self.scheduler.run([lambda f=f, a=a: f(*a) for f, a in partitions])


class _Renamer(ast.NodeTransformer):
    """Calls functions by a second name: as in Triton, a local variable of a function's name does not hide it."""

    def __init__(self, functions: set[str]) -> None:
        self._functions = functions

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self._functions:
            node.func.id += "_function"
        return node


def _with_calls_of_globals(text: str) -> ast.Module:
    tree = ast.parse(_IMPORTS.sub("", text))
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    tree = _Renamer(functions).visit(tree)
    tree.body += ast.parse("\n".join(f"{name}_function = {name}" for name in functions)).body
    return ast.fix_missing_locations(tree)


_IMPORTS = re.compile(r"^(import|from) .*?(\([^)]*\))?$\n", re.MULTILINE)


def emulate(text: str, entry: str, args: Sequence[Arg], values: Sequence[Any], programs: int, seed: int = 0) -> None:
    """Run every program of a kernel, one after another, writing outputs in place.

    Raises:
        DeadlockError: barriers let no partition go on.
    """
    code = compile(_with_calls_of_globals(text), entry, "exec")
    for program in range(programs):
        machine = Machine(program, programs, seed * 1000003 + program)
        module = machine.globals()
        exec(code, module)
        module[entry](*(_argument(arg, value) for arg, value in zip(args, values, strict=True)))


def _argument(arg: Arg, value: Any) -> Any:
    if isinstance(value, Descriptor):
        return TiledDescriptor(value, arg.type)
    if isinstance(value, torch.Tensor):
        span = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
        return Pointer(torch.as_strided(value.detach(), (span,), (1,)))
    if isinstance(value, int):
        return torch.tensor(value, dtype=torch.int64 if arg.type == "i64" else torch.int32)
    return value

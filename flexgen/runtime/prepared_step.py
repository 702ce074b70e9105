"""One kernel with the arguments of one form of call: from call to call only addresses and numbers change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flexgen.codegen.source import Role
from flexgen.runtime.bind import bind
from flexgen.runtime.describe import Launch
from flexgen.runtime.gluon_descriptor import DescriptorForm, descriptor_form
from flexgen.runtime.kernel import Step

Named = Mapping[str, Any]  # tensors and numbers by name
Submitter = Callable[[Sequence[object]], None]
_BY_NAME = (Role.TENSOR, Role.SIDE, Role.CU_SEQLENS)


class FromList(NamedTuple):
    """How a bound step launches from a list of values.

    Attributes:
        submit: launches with these arguments.
        plain: the arguments, of which some are filled in:
        places: the positions of those, and which of the list's values they take.
        described: the positions of descriptors, which of the list's values is their address, and their forms.
        tables: the positions of block lists that come with each call, and their names.
    """

    submit: Submitter
    plain: list[Any]
    places: list[tuple[int, int]]
    described: list[tuple[int, int, DescriptorForm]]
    tables: list[tuple[int, str]]

    def launch(self, given: Sequence[Any], lists: Named) -> None:
        """Launch with such a list of values, and the addresses of block lists by name."""
        values = self.plain.copy()
        for at, number in self.places:
            values[at] = given[number]
        if self.described:
            for at, number, form in self.described:
                values[at] = form.at(given[number])
        if self.tables:
            for at, name in self.tables:
                values[at] = lists[name]
        self.submit(values)


def aligned_addresses(lists: Named) -> dict[str, int] | None:
    """Return the addresses of block lists by name; None if one is no multiple of 16, which machine code relies on."""
    addresses = {name: tensor.data_ptr() for name, tensor in lists.items()}
    return None if any([address & 15 for address in addresses.values()]) else addresses  # noqa: C419 (faster)


class PreparedStep:
    """One kernel of one form of call.

    At first it launches as any kernel. That settles what the launcher specialises on, so that later calls hand it plain
    addresses and numbers.

    Args:
        step: what to run.
        launch, outputs: one of this form, of memory or of none.
        lists_change: block lists come with each call; their sizes and strides are the launch's.
    """

    def __init__(self, step: Step, launch: Launch, outputs: Named, *, lists_change: bool) -> None:
        args = step.args
        self._execute, self._grid = step.execute, step.grid
        self._bind: Callable[..., Any] | None = getattr(step.execute, "bound", None) if 0 not in self._grid else None
        self._submit: Submitter | None = None
        self._values: list[Any] = list(bind(args, launch, outputs))
        self._plain: list[Any] = []
        tensors = {**launch.tensors, **outputs}
        buffers, scalars = list(launch.buffers), list(launch.scalars)
        by_name = (*_BY_NAME, *([Role.SCRATCH] if launch.splits > 1 else []))  # of one split, it stays the null pointer
        self._tensors = [(at, arg.of) for at, arg in enumerate(args) if arg.role in by_name]
        grads = [(at, f"grad of {arg.of}") for at, arg in enumerate(args) if arg.role is Role.BUFFER_GRAD]
        self._tensors += grads
        self._numbers = [(at, arg.of) for at, arg in enumerate(args) if arg.role in (Role.DROPOUT, Role.SIDE_NUMBER)]
        self._buffers = [(at, buffers.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.BUFFER]
        self._scalars = [(at, scalars.index(arg.of)) for at, arg in enumerate(args) if arg.role is Role.SCALAR]
        self._tables = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.TABLE and lists_change]
        described = [(at, arg.of) for at, arg in enumerate(args) if arg.role is Role.DESCRIPTOR]
        self._described = [(at, name, descriptor_form(tensors[name])) for at, name in described]
        for at, _ in (*self._tensors, *self._buffers, *self._tables, *described):
            self._values[at] = None  # not kept alive

    def run(self, named: Named, buffers: Sequence[Any], scalars: Sequence[int | float], lists: Named) -> None:
        """Launch.

        Args:
            named: tensors, and the numbers of a dropout, by name.
            buffers, scalars: captured values, in the order of the launch's.
            lists: block lists by name, where they change.
        """
        submit = self._submit
        if submit is None:
            return self._run_first(named, buffers, scalars, lists)
        values = self._plain.copy()
        for at, name in self._tensors:
            values[at] = named[name].data_ptr()
        for at, index in self._buffers:
            values[at] = buffers[index].data_ptr()
        for at, name in self._tables:
            values[at] = pointer = lists[name].data_ptr()
            if pointer & 15:  # the machine code relies on it
                return self._run_first(named, buffers, scalars, lists)
        self._fill_numbers(values, named, scalars)
        submit(values)

    def _run_first(self, named: Named, buffers: Sequence[Any], scalars: Sequence[int | float], lists: Named) -> None:
        values = self._values.copy()
        for at, name in self._tensors:
            values[at] = named[name]
        for at, index in self._buffers:
            values[at] = buffers[index]
        for at, name in self._tables:
            values[at] = lists[name]
        self._fill_numbers(values, named, scalars)
        self._execute(self._grid, values)
        if self._bind is not None and not any(lists[name].data_ptr() & 15 for _, name in self._tables):
            self._plain = [_plain(value) for value in self._values]
            self._submit = self._bind(self._grid, values)

    @property
    def is_bound(self) -> bool:
        """Whether it has run on what takes plain addresses."""
        return self._submit is not None

    def takes(self, name: str) -> bool:
        """Whether a tensor is one of the kernel's arguments, by its name."""
        return any(name == taken for _, taken in self._tensors)

    def from_list(self, named: Mapping[str, int], buffers_at: int, scalars_at: int) -> FromList:
        """Return how to launch from a list of values, where it is bound.

        Args:
            named: where tensors and numbers stand in the list, by name.
            buffers_at, scalars_at: where captured tensors and numbers begin.
        """
        assert self._submit is not None, "the first launch binds"
        places = [(at, named[name]) for at, name in (*self._tensors, *self._numbers)]
        places += [(at, buffers_at + index) for at, index in self._buffers]
        places += [(at, scalars_at + index) for at, index in self._scalars]
        described = [(at, named[name], form) for at, name, form in self._described]
        return FromList(self._submit, self._plain, places, described, self._tables)

    def _fill_numbers(self, values: list[Any], named: Named, scalars: Sequence[int | float]) -> None:
        for at, name, form in self._described:
            values[at] = form.at(named[name].data_ptr())
        for at, index in self._scalars:
            values[at] = scalars[index]
        for at, name in self._numbers:
            values[at] = named[name]


def _plain(value: Any) -> Any:
    """Return a value as launchers take it: the address of a tensor, such as a block mask's list; 0 for no memory."""
    if value is None:
        return 0
    return value.data_ptr() if hasattr(value, "data_ptr") else value

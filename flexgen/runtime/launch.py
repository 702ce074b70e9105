"""Launch a kernel of an emitted module on a GPU with a few microseconds of host time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch
from triton.runtime.errors import OutOfResources

from flexgen.codegen.source import LineOrigin
from flexgen.collector import collector_paused
from flexgen.errors import InternalError
from flexgen.runtime.arguments import TypedArg, is_pointer
from flexgen.runtime.build import TargetFacts, compile_entry, out_of_resources
from flexgen.runtime.current import current_device, current_raw_stream
from flexgen.runtime.submit import Submit, make_submit

Submitter = Callable[[Sequence[object]], None]


class Launcher:
    """One kernel with its options, compiled at the first launch on each device and for each class of alignment.

    The class is which of the arguments that may be specialised are multiples of 16. Other values never cause a
    compilation: lengths and users' numbers are arguments of one and the same machine code.

    Args:
        arg_types: one per parameter of the kernel, in order; at least one pointer.
        extra_options: options of Triton's backend.
        line_map: where each line of the module comes from, for errors.
    """

    def __init__(
        self,
        module: ModuleType,
        entry: str,
        arg_types: Sequence[TypedArg],
        target: TargetFacts,
        *,
        num_warps: int,
        num_stages: int,
        extra_options: Mapping[str, object] | None = None,
        line_map: Sequence[LineOrigin] = (),
    ) -> None:
        self._module, self._entry, self._arg_types, self._target = module, entry, tuple(arg_types), target
        self._num_warps, self._num_stages, self._extra_options = num_warps, num_stages, dict(extra_options or {})
        self._line_map = tuple(line_map)
        self._pointers = tuple(is_pointer(arg) for arg in arg_types)
        if True not in self._pointers:
            raise InternalError(f"{entry} has no pointer argument to take its device from")
        self._device_position = self._pointers.index(True)
        self._specialized = tuple(position for position, arg in enumerate(arg_types) if arg.specialize)
        # By device, and whether each argument that may be specialised is a multiple of 16.
        self._kernels: dict[tuple[int, tuple[bool, ...]], Submit] = {}
        self._lock = threading.Lock()

    def launch(self, grid: tuple[int, int, int], args: Sequence[object], stream: int | None = None) -> None:
        """Enqueue the kernel for every program of `grid`; an empty grid does nothing.

        Args:
            args: one value per parameter: tensors of one device for pointers (None is the null pointer),
                descriptors, numbers.
            stream: torch's current stream of that device as a raw handle, where the caller has it already.
        """
        x, y, z = grid
        if x * y * z == 0:
            return
        device: int = args[self._device_position].get_device()  # type: ignore[attr-defined]
        values = self.plain(args)
        alignment = self._alignment(values)
        submit = self._kernels.get((device, alignment))
        if submit is None or device != torch.cuda.current_device():
            return self._launch_carefully(device, alignment, grid, values)
        submit(x, y, z, current_raw_stream(device) if stream is None else stream, values)

    __call__ = launch

    def bound(self, grid: tuple[int, int, int], args: Sequence[object]) -> Submitter:
        """Return what launches over a grid like `launch`, taking plain values: addresses for pointers.

        Args:
            args: as for `launch`, an example: of later values, those that may be specialised must be multiples of 16
                where these are, and the tensors lie on the same device.
        """
        x, y, z = grid
        device: int = args[self._device_position].get_device()  # type: ignore[attr-defined]
        alignment = self._alignment(self.plain(args))
        with torch.cuda.device(device):
            submit = self._prepare(device, alignment)

        def launch(values: Sequence[object]) -> None:
            if current_device() == device:
                submit(x, y, z, current_raw_stream(device), values)
            else:
                with torch.cuda.device(device):
                    submit(x, y, z, current_raw_stream(device), values)

        return launch if x * y * z else lambda values: None

    def warm(self, device: int, args: Sequence[object]) -> None:
        """Compile and load for launches on a device with such arguments, tensors for pointers; of memory or none."""
        with torch.cuda.device(device):
            self._prepare(device, self._alignment(self.plain(args)))

    def plain(self, args: Sequence[object]) -> list[int]:
        """Return arguments as Triton's launcher takes them: addresses for tensors, 0 for None."""
        return [
            arg if not pointer else 0 if arg is None else arg.data_ptr()  # type: ignore[attr-defined, misc]
            for arg, pointer in zip(args, self._pointers, strict=True)
        ]

    def _alignment(self, values: list[int]) -> tuple[bool, ...]:
        return tuple([values[position] & 15 == 0 for position in self._specialized])

    def _launch_carefully(
        self, device: int, alignment: tuple[bool, ...], grid: tuple[int, int, int], values: list[int]
    ) -> None:
        """Launch on a device that may not be the current one, compiling first where that is still to do."""
        with torch.cuda.device(device):
            submit = self._prepare(device, alignment)
            submit(*grid, current_raw_stream(device), values)

    def _prepare(self, device: int, alignment: tuple[bool, ...]) -> Submit:
        """Return the kernel for a class of alignment, compiled and loaded once; the device is the current one."""
        with self._lock:
            submit = self._kernels.get((device, alignment))
            if submit is None:
                divisible = frozenset(itertools.compress(self._specialized, alignment))
                submit = self._kernels[device, alignment] = self._load(device, divisible)
        return submit

    @collector_paused()
    def _load(self, device: int, divisible: frozenset[int]) -> Submit:
        binary = compile_entry(
            self._module,
            self._entry,
            self._arg_types,
            self._target,
            num_warps=self._num_warps,
            num_stages=self._num_stages,
            extra_options=self._extra_options,
            divisible=divisible,
            line_map=self._line_map,
        )
        try:
            return make_submit(binary.kernel, device)
        except OutOfResources as error:
            raise out_of_resources(self._entry, error, self._num_warps, self._num_stages) from error

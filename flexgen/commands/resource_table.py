"""The tables of `flexgen resources`: a row for each compiled kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexgen.commands.console import Console, Span
from flexgen.commands.offline import Built
from flexgen.commands.resource_report import planned_bytes, tile_sizes
from flexgen.lowering.plans import RowPlan
from flexgen.runtime.machine_code import EXPONENTIAL, LOAD, LOCAL, MATRIX, SHARED, STORE, Opcodes

Cell = Span | str
KINDS = (
    ("matrix", MATRIX),
    ("exp2", EXPONENTIAL),
    ("loads", LOAD),
    ("stores", STORE),
    ("shared", SHARED),
    ("local", LOCAL),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A compiled kernel, and the setting it was compiled with; "" where there is one setting alone."""

    built: Built
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its title and what it says of a row."""

    title: str
    cell: Callable[[Row], Cell]


def write_tables(rows: Sequence[Row], console: Console) -> None:
    """Write what each kernel takes, and what its main loop holds."""
    labels = _labels(rows)
    console.line(Span("what a kernel takes", "bold"))
    _write(labels, _COSTS, rows, console)
    console.line(Span("regs a thread; spilled and stack bytes a thread; shared memory in bytes; programs that", "dim"))
    console.line(Span("a multiprocessor holds at a time, and what leaves no room for more", "dim"))
    console.line()
    console.line(Span("instructions of the main loop, one step of it over a tile", "bold"))
    _write(labels, _LOOP, rows, console)
    console.line(Span("per thread; loads and stores of global memory, copies by the engine included; local", "dim"))
    console.line(Span("memory is what spills; of several loops the one that needs the fewest others a product", "dim"))


def _write(labels: Sequence[Column], columns: Sequence[Column], rows: Sequence[Row], console: Console) -> None:
    shown = [*labels, *columns]
    cells = [[column.cell(row) for column in shown] for row in rows]
    console.table([column.title for column in shown], cells, left=len(labels))


def _labels(rows: Sequence[Row]) -> list[Column]:
    """Return the columns that tell rows apart."""
    possible = (
        Column("kernel", lambda row: row.built.entry),
        Column("target", lambda row: row.built.plan.target.name),
        Column("options", lambda row: row.setting),
    )
    needed = [column for column in possible if len({column.cell(row) for row in rows}) > 1]
    return needed or [possible[1]]


def _tile(row: Row) -> str:
    plan = row.built.plan
    return f"{plan.BLOCK_M} row{'s' * (plan.BLOCK_M > 1)}" if isinstance(plan, RowPlan) else tile_sizes(plan)


def _spilled(row: Row) -> Cell:
    costs = row.built.resources
    spilled = costs.spill_stores + costs.spill_loads
    return Span(str(spilled), "red" if spilled else "")


def _fits(row: Row) -> str:
    fits = row.built.occupancy
    return f"{fits.programs} by {fits.limit}" if fits else ""


_COSTS = (
    Column("tile", _tile),
    Column("warps", lambda row: str(row.built.resources.num_warps)),
    Column("stages", lambda row: str(row.built.plan.compile_options["num_stages"])),
    Column("regs", lambda row: str(row.built.resources.registers)),
    Column("spilled", _spilled),
    Column("stack", lambda row: str(row.built.resources.stack_bytes)),
    Column("shared", lambda row: str(row.built.resources.shared_bytes)),
    Column("planned", lambda row: planned_bytes(row.built)),
    Column("programs", _fits),
)


def _of_loop(kind: tuple[str, ...]) -> Callable[[Row], Cell]:
    def cell(row: Row) -> Cell:
        loop = row.built.resources.main_loop
        number = loop.count(*kind) if loop else 0
        return Span(str(number) if loop else "-", "red" if kind is LOCAL and number else "")

    return cell


def _total(row: Row) -> Cell:
    loop = row.built.resources.main_loop
    return str(loop.total) if loop else "-"


def _others(row: Row) -> Cell:
    """Return the sizes of the other loops: with the mask, of other warpgroups, or none."""
    others: Sequence[Opcodes] = row.built.resources.loops[1:]
    return ", ".join(str(loop.total) for loop in others) or "-"


_LOOP = (
    *(Column(title, _of_loop(kind)) for title, kind in KINDS),
    Column("all", _total),
    Column("other loops", _others),
    Column("whole kernel", lambda row: str(row.built.resources.code.total)),
)

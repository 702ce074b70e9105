"""Prints IR nodes as Triton expressions and assignments; shared by mod functions and loop bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from flexgen.codegen.dialects.triton import (
    SPELLINGS,
    Dialect,
    Operand,
    literal,
    pointer_type,
    type_name,
)
from flexgen.codegen.expression import Expression, Precedence, binary, call, method
from flexgen.codegen.source import Arg, Role
from flexgen.ir.graph import Axis, Buffer, Node, Scalar, topological
from flexgen.ir.sizes import split_size_name
from flexgen.lowering.ranges import Range, RangeAnalysis

INT32 = Range(-(2**31), 2**31 - 1)
MAX_INLINE = 72  # columns; a longer expression gets a line of its own
_HALF = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class PrintContext:
    """What printing needs to know besides the nodes.

    Attributes:
        dialect: spelling of ops.
        buffers, scalars: the mods' captured values by name.
        wide: buffers whose offsets need 64 bits, and scalars that do not fit 32.
        analysis: value ranges, for narrowing and for division.
    """

    dialect: Dialect
    buffers: Mapping[str, Buffer]
    scalars: Mapping[str, Scalar]
    wide: frozenset[str]
    analysis: RangeAnalysis


@dataclass(frozen=True, slots=True)
class Assignment:
    """One emitted statement `name = text`, and the node it stands for."""

    name: str
    text: str
    node: Node


@dataclass(slots=True)
class NodePrinter:
    """Prints nodes; collects the assignments, arguments and prelude functions that the text needs.

    Half-precision values are computed in float32; int64 values in int32 where their range proves that they fit.

    Args:
        context: see PrintContext.
        input_names: the text of each input.
        variable: the user's name for a node's value, if any.
        taken: names that assignments must avoid.
    """

    context: PrintContext
    input_names: Mapping[str, str]
    variable: Callable[[Node], str | None]
    taken: set[str]
    assignments: list[Assignment] = field(default_factory=list)
    args: dict[str, Arg] = field(default_factory=dict)
    prelude: dict[str, None] = field(default_factory=dict)
    libdevice: bool = False
    _printed: dict[Node, Expression] = field(default_factory=dict)
    _dtypes: dict[Node, torch.dtype] = field(default_factory=dict)

    def print(self, root: Node) -> Expression:
        """Return the root's expression, after appending the assignments it needs."""
        nodes = list(topological(root))
        uses = Counter(arg for node in nodes for arg in node.args)
        for node in nodes:
            if node in self._printed:
                continue
            self._dtypes[node] = self._compute_dtype(node)
            expression = self._spell(node)
            if node is not root and self._deserves_name(node, expression, uses[node]):
                expression = self._assign(node, expression)
            self._printed[node] = expression
        return self._printed[root]

    def expression(self, node: Node) -> Expression:
        """Return the text of a node that was printed."""
        return self._printed[node]

    def computed_dtype(self, node: Node) -> torch.dtype:
        """Return the dtype that a printed node's expression has."""
        return self._dtypes[node]

    def _compute_dtype(self, node: Node) -> torch.dtype:
        if node.dtype in _HALF:
            return torch.float32
        if node.dtype == torch.int64 and self._fits_int32(node):
            return torch.int32
        return node.dtype

    def _fits_int32(self, node: Node) -> bool:
        match node.op:
            case "load":
                return False
            case "scalar":
                return self._owner(node) not in self.context.wide
            case "input" | "const":
                return INT32.contains(self.context.analysis.of(node))
        integers = [arg for arg in node.args if arg.dtype != torch.bool]
        narrow = all(self._dtypes[arg] != torch.int64 for arg in integers)
        return narrow and INT32.contains(self.context.analysis.of(node))

    def _deserves_name(self, node: Node, expression: Expression, uses: int) -> bool:
        if node.op in ("input", "const", "scalar") or (expression.text.isidentifier() and self.variable(node) is None):
            return False
        masked_load = node.op == "load" and "mask=" in expression.text
        return masked_load or uses > 1 or self.variable(node) is not None or len(expression.text) > MAX_INLINE

    def _assign(self, node: Node, expression: Expression) -> Expression:
        name = self._fresh(self.variable(node) or _stem(node))
        self.assignments.append(Assignment(name, expression.text, node))
        return Expression(name)

    def _fresh(self, stem: str) -> str:
        name, count = stem, 1
        while name in self.taken:
            count += 1
            name = f"{stem}_{count}"
        self.taken.add(name)
        return name

    def _spell(self, node: Node) -> Expression:
        match node.op:
            case "input":
                return Expression(self.input_names[str(node.attr)])
            case "const":
                assert node.attr is not None
                if _is_subnormal(node):
                    return literal(0.0)  # GPUs flush such numbers, and Triton would type the literal as float64
                return literal(node.attr if not isinstance(node.attr, str) else float(node.attr))
            case "scalar":
                return self._scalar(node)
            case "load":
                return self._load(node)
        dtype = self._dtypes[node]
        operands = self._widened(node, dtype)
        if node.op == "cast" and self._dtypes[node.args[0]] == dtype and node.dtype not in _HALF:
            return operands[0].expression
        spelled = SPELLINGS[node.op](self.context.dialect, dtype, operands)
        self.prelude.update(dict.fromkeys(spelled.prelude))
        self.libdevice |= spelled.libdevice
        if node.op == "cast" and node.dtype in _HALF and node.args[0].dtype != node.dtype:
            return method(method(operands[0].expression, f"to({type_name(node.dtype)})"), "to(tl.float32)")
        return spelled.expression

    def _widened(self, node: Node, dtype: torch.dtype) -> list[Operand]:
        """Return the operands, one of them widened where the operation needs 64 bits and none of them has any.

        A literal takes its type from the operand beside it, so it does not count.
        """
        operands = [self._operand(arg) for arg in node.args]
        needs = dtype == torch.int64 or any(operand.dtype == torch.int64 for operand in operands)
        typed = [at for at, arg in enumerate(node.args) if arg.op != "const"]
        if not needs or any(operands[at].dtype == torch.int64 for at in typed):
            return operands
        for at in typed:
            if operands[at].dtype == torch.int32:
                wide = method(operands[at].expression, "to(tl.int64)")
                operands[at] = Operand(wide, torch.int64, operands[at].non_negative)
                break
        return operands

    def _operand(self, node: Node) -> Operand:
        non_negative = not node.dtype.is_floating_point and self.context.analysis.of(node).non_negative
        return Operand(self._printed[node], self._dtypes[node], non_negative, node.op == "const")

    def _owner(self, node: Node) -> str:
        size = split_size_name(node.attr)
        return size[0] if size else str(node.attr)

    def _scalar(self, node: Node) -> Expression:
        size = split_size_name(node.attr)
        if size:
            return self._size(self.context.buffers[size[0]], size[1])
        scalar = self.context.scalars[str(node.attr)]
        kind = _number_kind(self._dtypes[node])
        return self._arg(Arg(scalar.name, Role.SCALAR, scalar.name, None, kind, False))

    def _arg(self, arg: Arg) -> Expression:
        self.args.setdefault(arg.name, arg)
        self.taken.add(arg.name)
        return Expression(arg.name)

    def _size(self, buffer: Buffer, dim: int) -> Expression:
        static = buffer.sizes[dim]
        if static is not None:
            return literal(static)
        width = "i64" if buffer.name in self.context.wide else "i32"
        return self._arg(Arg(f"{buffer.name}_size{dim}", Role.BUFFER_SIZE, buffer.name, dim, width, False))

    def _load(self, node: Node) -> Expression:
        buffer = self.context.buffers[str(node.attr)]
        pointer = self._arg(Arg(f"{buffer.name}_ptr", Role.BUFFER, buffer.name, None, pointer_type(buffer.dtype), True))
        address = pointer
        for dim, index in enumerate(node.args):
            self.name_index(buffer, dim, index)
            offset = self._offset(buffer, dim, index)
            address = address if offset is None else binary("+", Precedence.ADD, address, offset)
        mask = self._in_bounds(buffer, node)
        other = "0.0" if buffer.dtype.is_floating_point else "0"
        loaded = call("tl.load", address, *((f"mask={mask.text}", f"other={other}") if mask else ()))
        inside = self._inside_repeats(buffer, node)
        loaded = call("tl.where", inside, loaded, other) if inside else loaded
        return self._widen_loaded(buffer.dtype, loaded)

    def name_index(self, buffer: Buffer, dim: int, index: Node) -> None:
        """Give an index that both the address and the mask use a line of its own."""
        if self._printed[index].precedence != Precedence.ATOM or "(" in self._printed[index].text:
            if not self.bounds(buffer, dim, index):
                return
            name = self._fresh(f"{buffer.name}_index{dim if buffer.rank > 1 else ''}")
            self.assignments.append(Assignment(name, self._printed[index].text, index))
            self._printed[index] = Expression(name)

    def _offset(self, buffer: Buffer, dim: int, index: Node) -> Expression | None:
        wide = buffer.name in self.context.wide
        position = self._printed[index]
        if buffer.strides[dim] == "0" or (index.op == "const" and index.attr == 0):
            return None
        if wide and self._dtypes[index] != torch.int64 and index.op != "const":
            position = method(position, "to(tl.int64)")
        if buffer.strides[dim] == "1":
            return position
        width = "i64" if wide else "i32"
        stride = self._arg(Arg(f"{buffer.name}_stride{dim}", Role.BUFFER_STRIDE, buffer.name, dim, width, True))
        return binary("*", Precedence.MULTIPLY, position, stride)

    def _in_bounds(self, buffer: Buffer, node: Node) -> Expression | None:
        """Return the condition under which the address lies in the buffer; None where that is proved."""
        return _all_of([term for dim, index in enumerate(node.args) for term in self._reach(buffer, dim, index)])

    def _inside_repeats(self, buffer: Buffer, node: Node) -> Expression | None:
        """Return the condition under which indices lie inside dimensions that repeat one element (stride 0).

        They are no part of the address, so they cannot mask the load: its mask has no more axes than its address.
        """
        repeated = [(dim, index) for dim, index in enumerate(node.args) if buffer.strides[dim] == "0"]
        return _all_of([term for dim, index in repeated for term in self.bounds(buffer, dim, index)])

    def _reach(self, buffer: Buffer, dim: int, index: Node) -> list[Expression]:
        """Return what has to be checked before reading: along a repeated dimension, that it has an element at all."""
        terms = self.bounds(buffer, dim, index)
        if not terms or buffer.strides[dim] != "0":
            return terms
        return [binary(">", Precedence.COMPARE, self._size(buffer, dim), Expression("0"))]

    def bounds(self, buffer: Buffer, dim: int, index: Node) -> list[Expression]:
        """Return what has to be checked of one index."""
        known = self.context.analysis.of(index)
        static = buffer.sizes[dim]
        terms: list[Expression] = []
        if not known.non_negative:
            terms.append(binary(">=", Precedence.COMPARE, self._printed[index], Expression("0")))
        inside = static is not None and known.hi is not None and known.hi < static
        if not inside and not _counts_from_the_end(buffer, dim, index):
            terms.append(binary("<", Precedence.COMPARE, self._printed[index], self._size(buffer, dim)))
        return terms

    def _widen_loaded(self, dtype: torch.dtype, loaded: Expression) -> Expression:
        if dtype in _HALF:
            return method(loaded, "to(tl.float32)")
        if dtype == torch.bool:
            return binary("!=", Precedence.COMPARE, loaded, Expression("0"))
        return loaded


def _all_of(terms: list[Expression]) -> Expression | None:
    """Return the conjunction of conditions; None for none."""
    if not terms:
        return None
    condition = terms[0]
    for term in terms[1:]:
        condition = binary("&", Precedence.AND, condition, term)
    return condition


def _counts_from_the_end(buffer: Buffer, dim: int, index: Node) -> bool:
    """Whether an index is the buffer's size less a positive constant."""
    if index.op not in ("add", "sub") or index.args[1].op != "const" or not isinstance(index.args[1].attr, int):
        return False
    less = index.args[1].attr if index.op == "sub" else -index.args[1].attr
    return less > 0 and split_size_name(index.args[0].attr) == (buffer.name, dim)


def _is_subnormal(node: Node) -> bool:
    is_single = node.dtype.is_floating_point and node.dtype != torch.float64
    return is_single and isinstance(node.attr, float) and 0.0 < abs(node.attr) < torch.finfo(torch.float32).tiny


def _number_kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return "fp64" if dtype == torch.float64 else "fp32"
    return "i64" if dtype == torch.int64 else "i32"


def _stem(node: Node) -> str:
    """Return a name for a value that the user did not name."""
    if node.op == "load" and node.axes:
        axes = "_".join(axis.value for axis in Axis if axis in node.axes)
        return f"{node.attr}_at_{axes}"
    return _STEMS.get(node.op, node.op)


# Names for values that the user did not name, where the op's own name would shadow or mislead.
_STEMS = {
    "and": "both",
    "or": "either",
    "xor": "differs",
    "not": "negated",
    "where": "chosen",
    "load": "loaded",
    "cast": "converted",
    "min": "smaller",
    "max": "larger",
    "abs": "magnitude",
    "add": "sum_",
    "sub": "difference",
    "mul": "product",
    "div": "quotient",
    "floordiv": "quotient",
    "truncdiv": "quotient",
    "mod": "remainder",
    "fmod": "remainder",
    "neg": "negative",
    "sign": "direction",
    "tanh": "tanh_value",
    "round": "rounded",
    "pow": "powered",
    "expm1": "expm1_value",
    "log1p": "log1p_value",
    "eq": "equal",
    "ne": "unequal",
    "lt": "below",
    "le": "at_most",
    "gt": "above",
    "ge": "at_least",
}

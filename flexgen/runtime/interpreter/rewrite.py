"""Turn the `@triton.jit` functions of a source text into plain Python functions that mean what Triton means."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Container
from typing import Any

# Names that the rewritten functions look up in their globals; see `Language.intrinsics`.
TO_TENSOR = "__flexgen_to_tensor__"
TRUTH = "__flexgen_truth__"
NOT = "__flexgen_not__"
AND = "__flexgen_and__"
OR = "__flexgen_or__"


def _with_tritons_meaning(node: ast.AST) -> ast.AST:
    """Spell out what Triton's front end does where Python's own meaning differs; changes the node, or replaces it.

    An assignment makes a number a tensor; `not`, `and` and `or` are elementwise on tensors; a condition must be a
    scalar.

    Walks by itself, and gives each new node its place: ast.NodeTransformer and ast.fix_missing_locations look at every
    name, number and operator too, and took half of the time of preparing a kernel for the interpreter.
    """
    if isinstance(node, ast.FunctionDef):
        _strip(node)
    for name in node._fields:
        value = getattr(node, name)
        if isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST) and type(item) not in _LEAVES:
                    value[index] = _with_tritons_meaning(item)
        elif isinstance(value, ast.AST) and value._fields and type(value) not in _LEAVES:
            setattr(node, name, _with_tritons_meaning(value))
    spell = _SPELLINGS.get(type(node))
    return node if spell is None else spell(node)


_LEAVES = (ast.Name, ast.Constant)


def _strip(node: ast.FunctionDef) -> None:
    """Remove what Python would evaluate or read where a function is defined: decorators and annotations."""
    node.decorator_list = []
    node.returns = None
    for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        parameter.annotation = None


def _assignment(node: ast.Assign) -> ast.AST:
    node.value = _call(node, TO_TENSOR, node.value)
    return node


def _annotated_assignment(node: ast.AnnAssign) -> ast.AST:
    """Keep the value as it is: the annotation is `tl.constexpr`, the only one that Triton has."""
    if node.value is None:
        return node
    return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def _scalar_test(node: ast.If | ast.While | ast.IfExp) -> ast.AST:
    node.test = _call(node, TRUTH, node.test)
    return node


def _not(node: ast.UnaryOp) -> ast.AST:
    return _call(node, NOT, node.operand) if isinstance(node.op, ast.Not) else node


def _and_or(node: ast.BoolOp) -> ast.AST:
    name = AND if isinstance(node.op, ast.And) else OR
    return _call(node, name, *(_thunk(node, value) for value in node.values))


_SPELLINGS: dict[type[ast.AST], Callable[[Any], ast.AST]] = {
    ast.Assign: _assignment,
    ast.AnnAssign: _annotated_assignment,
    ast.If: _scalar_test,
    ast.While: _scalar_test,
    ast.IfExp: _scalar_test,
    ast.UnaryOp: _not,
    ast.BoolOp: _and_or,
}


def _call(at: ast.expr | ast.stmt, name: str, *args: ast.expr) -> ast.Call:
    function = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), at)
    return ast.copy_location(ast.Call(func=function, args=list(args), keywords=[]), at)


def _thunk(at: ast.expr, value: ast.expr) -> ast.Lambda:
    parameters = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.copy_location(ast.Lambda(args=parameters, body=value), at)


def define_functions(text: str, filename: str, names: Container[str], namespace: dict[str, Any]) -> None:
    """Define the top-level functions `names` of a module's text in `namespace`, rewritten; lines stay the text's."""
    tree = ast.parse(text, filename)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    for node in functions:
        _with_tritons_meaning(node)
    rewritten = ast.Module(body=list(functions), type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(rewritten, filename, "exec", flags=flags, dont_inherit=True), namespace)

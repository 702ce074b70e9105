"""Turn the `@triton.jit` functions of a source text into plain Python functions that mean what Triton means."""

from __future__ import annotations
import __future__

import ast
from collections.abc import Container
from typing import Any

# Names that the rewritten functions look up in their globals; see `Language.intrinsics`.
TO_TENSOR = "__flexgen_to_tensor__"
TRUTH = "__flexgen_truth__"
NOT = "__flexgen_not__"
AND = "__flexgen_and__"
OR = "__flexgen_or__"


class _TritonMeaning(ast.NodeTransformer):
    """Spell out what Triton's front end does where Python's own meaning differs.

    An assignment makes a number a tensor; `not`, `and` and `or` are elementwise on tensors; a condition must be a
    scalar.
    """

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        node.decorator_list = []
        node.returns = None
        parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        for parameter in parameters:
            parameter.annotation = None
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        node.value = _call(TO_TENSOR, node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Keep the value as it is: the annotation is `tl.constexpr`, the only one that Triton has."""
        self.generic_visit(node)
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._with_scalar_test(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._with_scalar_test(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._with_scalar_test(node)

    def _with_scalar_test(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        node.test = _call(TRUTH, node.test)
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(_call(NOT, node.operand), node) if isinstance(node.op, ast.Not) else node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        name = AND if isinstance(node.op, ast.And) else OR
        return ast.copy_location(_call(name, *(_thunk(value) for value in node.values)), node)


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(func=ast.Name(id=name, ctx=ast.Load()), args=list(args), keywords=[])


def _thunk(value: ast.expr) -> ast.Lambda:
    parameters = ast.arguments(posonlyargs=[], args=[], kwonlyargs=[], kw_defaults=[], defaults=[])
    return ast.Lambda(args=parameters, body=value)


def define_functions(text: str, filename: str, names: Container[str], namespace: dict[str, Any]) -> None:
    """Define the top-level functions `names` of a module's text in `namespace`, rewritten; lines stay the text's."""
    tree = ast.parse(text, filename)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in names]
    rewritten = ast.Module(body=[_TritonMeaning().visit(node) for node in functions], type_ignores=[])
    flags = __future__.annotations.compiler_flag
    exec(compile(ast.fix_missing_locations(rewritten), filename, "exec", flags=flags, dont_inherit=True), namespace)

"""Joins emitted modules into one: what they share stands once, what differs goes by the kernel's own name."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from flexgen.codegen.wrap import WIDTH, wrap_line

# Sizes of a kernel's own tiles and blocks: equal ones in two kernels are equal by chance.
_OWN = frozenset({"BLOCK_M", "BLOCK_N", "SPARSE_Q_BLOCK_SIZE", "SPARSE_KV_BLOCK_SIZE", "COLUMNS"})
_OWN |= {"ROWS", "STAGES", "KEY_STAGES", "VALUE_STAGES", "QUERY_STAGES", "GRAD_STAGES"}


@dataclass(frozen=True, slots=True)
class Module:
    """One emitted module.

    Attributes:
        prefix: what tells its names from those of others, as "forward" or "dq".
        text: the module's text.
        entries: its kernels, whose names are its own already.
    """

    prefix: str
    text: str
    entries: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """What of one module stands apart.

    Attributes:
        module: where it is from.
        constants, functions: texts without a line break at the end.
        names: how the merged text calls what the module's text calls by the key.
    """

    module: Module
    constants: tuple[str, ...]
    functions: tuple[str, ...]
    names: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Merged:
    """Emitted modules as one.

    Attributes:
        imports: lines.
        constants, functions: what several sections use.
        sections: one for each module, in order.
    """

    imports: tuple[str, ...]
    constants: tuple[str, ...]
    functions: tuple[str, ...]
    sections: tuple[Section, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A statement at the top of a module that defines a name: a template variable or a function."""

    name: str
    text: str
    is_function: bool
    used: frozenset[str]  # names of other parts of its module


def merge(modules: Sequence[Module]) -> Merged:
    """Return the modules as one; a name that stands for the same in each is written once."""
    parts = {module.prefix: _parts(module.text) for module in modules}
    shared = _shared(list(parts.values()))
    written = {word for module in modules for word in re.findall(r"\w+", module.text)}
    sections: list[Section] = []
    common: dict[str, _Part] = {}
    for module in modules:
        own = {name: part for name, part in parts[module.prefix].items() if name not in shared}
        common |= {name: part for name, part in parts[module.prefix].items() if name in shared}
        clashing = [name for name in own if name not in module.entries and _elsewhere(name, module, parts)]
        names = {name: _free(_prefixed(module.prefix, name), written) for name in clashing}
        texts = {
            name: _renamed(part.text, {old: new for old, new in names.items() if old == name or old in part.used})
            for name, part in own.items()
        }
        constants = tuple(text for name, text in texts.items() if not own[name].is_function)
        functions = tuple(text for name, text in texts.items() if own[name].is_function)
        sections.append(Section(module, constants, functions, {name: names.get(name, name) for name in own}))
    used = frozenset(word for found in parts.values() for part in found.values() for word in _words(part.text))
    return Merged(
        _imports(modules, used),
        tuple(part.text for part in common.values() if not part.is_function),
        tuple(part.text for part in common.values() if part.is_function),
        tuple(Section(s.module, s.constants, s.functions, {n: n for n in common} | dict(s.names)) for s in sections),
    )


def docstring(module: Module) -> str:
    """Return the docstring at the top of a module."""
    return ast.get_docstring(ast.parse(module.text)) or ""


def _imports(modules: Sequence[Module], used: frozenset[str]) -> tuple[str, ...]:
    """Return the import statements that the modules need, those of one module's names as one."""
    plain: set[str] = set()
    names: dict[str, set[str]] = {}
    for statement in (statement for module in modules for statement in ast.parse(module.text).body):
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        for alias in statement.names:
            if (alias.asname or alias.name.split(".")[0]) not in used:
                continue
            if isinstance(statement, ast.Import) or alias.asname:
                plain.add(ast.unparse(_with(statement, alias)))
            else:
                names.setdefault(str(statement.module), set()).add(alias.name)
    return tuple(sorted([*plain, *(_import_of(module, sorted(found)) for module, found in names.items())]))


def _with(statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> ast.stmt:
    if isinstance(statement, ast.Import):
        return ast.Import([alias])
    return ast.ImportFrom(statement.module, [alias], statement.level)


def _import_of(module: str, names: Sequence[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])


def _parts(text: str) -> dict[str, _Part]:
    tree, lines = ast.parse(text), text.splitlines()
    statements: dict[str, tuple[str, bool]] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            statements[node.name] = "\n".join(lines[first - 1 : node.end_lineno]), True
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            statements[node.targets[0].id] = "\n".join(lines[node.lineno - 1 : node.end_lineno]), False
    return {
        name: _Part(name, body, is_function, frozenset(_words(body)) & (statements.keys() - {name}))
        for name, (body, is_function) in statements.items()
    }


def _shared(modules: list[dict[str, _Part]]) -> frozenset[str]:
    """Return the names that several modules define alike, and that rest on nothing that differs."""
    names = {name for parts in modules for name in parts}
    found = {name for name in names - _OWN if _is_alike([parts[name] for parts in modules if name in parts])}
    while True:
        steady = {name for name in found if all(parts[name].used <= found for parts in modules if name in parts)}
        if steady == found:
            return frozenset(found)
        found = steady


def _is_alike(parts: list[_Part]) -> bool:
    return len(parts) > 1 and len({part.text for part in parts}) == 1


def _elsewhere(name: str, module: Module, parts: Mapping[str, Mapping[str, _Part]]) -> bool:
    return any(name in others for prefix, others in parts.items() if prefix != module.prefix)


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix.upper()}_{name}" if name.isupper() else f"{prefix}_{name}"


def _free(name: str, written: Iterable[str]) -> str:
    while name in written:
        name += "_"
    return name


def _words(text: str) -> Iterable[str]:
    return (token.string for token in _tokens(text) if token.type == tokenize.NAME)


def _tokens(text: str) -> Iterable[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(text).readline)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    """Return the text with names replaced, but for attributes, and lines that became too long broken."""
    if not names:
        return text
    lines = text.split("\n")
    pattern = re.compile(rf"(?<!\.)\b(?:{'|'.join(map(re.escape, names))})\b")
    for token in reversed(list(_tokens(text))):
        if token.type == tokenize.NAME or token.type == tokenize.COMMENT or token.string.startswith('"""'):
            _replace(lines, token, pattern, names)
    return "\n".join(piece for line in lines for piece in wrap_line(line))


def _replace(lines: list[str], token: tokenize.TokenInfo, pattern: re.Pattern[str], names: Mapping[str, str]) -> None:
    """Replace names in the part of the lines where a token stands; what follows it has been replaced already."""
    (first, start), (last, end) = token.start, token.end
    for row in range(first, last + 1):
        line = lines[row - 1]
        begin, stop = start if row == first else 0, end if row == last else len(line)
        pieces, place = [line[:begin]], begin
        for found in pattern.finditer(line, begin, stop):  # a dot before the token still counts
            pieces += [line[place : found.start()], names[found[0]]]
            place = found.end()
        lines[row - 1] = "".join([*pieces, line[place:]])

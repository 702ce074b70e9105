"""Loads a user's Python file and finds the mods in it."""

from __future__ import annotations

import difflib
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from flexgen.attention import Attention
from flexgen.commands.file_spec import FileSpec
from flexgen.errors import FlexgenError, SourceSpan, first_line

Mod = Callable[..., Any]
Kind = Literal["score_mod", "mask_mod"]

_PARAMETERS: dict[Kind, str] = {
    "score_mod": "score_mod(score, b, h, q_idx, kv_idx)",
    "mask_mod": "mask_mod(b, h, q_idx, kv_idx)",
}


class UserFileError(FlexgenError):
    """A user's file cannot be found, does not load, or does not define mods."""


@dataclass(frozen=True, slots=True)
class UserFile:
    """What was found in a user's file.

    Attributes:
        score_mod, mask_mod: the mods; at least one of them is there, or `attention`.
        attention: a flexgen.Attention of the file, whose mods these are and whose options count.
        shape: the file's SHAPE = (B, Hq, Hkv, Lq, Lk, Dqk, Dv), if it has one.
    """

    spec: FileSpec
    score_mod: Mod | None
    mask_mod: Mod | None
    attention: Attention | None
    shape: tuple[int, ...] | None


def load_user_file(spec: FileSpec) -> UserFile:
    """Execute the file and return its mods.

    Raises:
        UserFileError: no such file, an error in it (with the user's line), or no mods.
    """
    module = _load(spec.path)
    attention, mods = _named(module, spec) if spec.names else _by_convention(module, spec)
    if attention is not None:
        mods = {"score_mod": attention.score_mod, "mask_mod": attention.mask_mod}
    return UserFile(spec, mods.get("score_mod"), mods.get("mask_mod"), attention, vars(module).get("SHAPE"))


# Loading.


def _load(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserFileError(f"no file {path}", why=_why_no_file(path), fix="give the path of a Python file")
    name = f"flexgen_user_{path.stem}".replace("-", "_")
    module_spec = spec_from_file_location(name, path.resolve(), submodule_search_locations=None)
    if module_spec is None or module_spec.loader is None:
        raise UserFileError(f"{path} is not a Python file", fix="its name must end in .py")
    module = module_from_spec(module_spec)
    with _importable(path.resolve().parent), _located_errors(path):
        sys.modules[name] = module  # dataclasses and pickle look modules up there
        module_spec.loader.exec_module(module)
    torch.set_default_device(None)  # what the file set is for its own tensors; commands compute on the CPU
    return module


def _why_no_file(path: Path) -> str | None:
    if path.is_dir():
        return "it is a directory"
    if path.is_symlink():
        return "it is a link that leads to no file"
    siblings = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"the nearest name in that directory is {near[0]}" if near else None


@contextmanager
def _importable(directory: Path) -> Iterator[None]:
    """Let the file import its neighbours, as if it were run as a script."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        if str(directory) in sys.path:
            sys.path.remove(str(directory))


@contextmanager
def _located_errors(path: Path, passing: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Tell errors of the user's code at the user's line, but those of the class `passing`."""
    try:
        yield
    except passing:
        raise
    except SyntaxError as error:
        raise UserFileError(f"{path} does not parse: {error.msg}", where=_syntax_span(error)) from error
    except SystemExit as error:
        raise UserFileError(
            f"{path} exits while it is loaded",
            where=_innermost_span(error, path),
            fix='guard what only a script should do with: if __name__ == "__main__":',
        ) from error
    except FlexgenError as error:
        if error.where is not None:
            raise
        raise UserFileError(
            f"{path} does not load: {error.what}", where=_innermost_span(error, path), why=error.why, fix=error.fix
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        summary = first_line(error)
        raise UserFileError(
            f"{path} does not load: {type(error).__name__}{': ' if summary else ''}{summary}",
            where=_innermost_span(error, path),
        ) from error


def _syntax_span(error: SyntaxError) -> SourceSpan | None:
    if error.filename is None or not error.lineno:
        return None
    text = (error.text or linecache.getline(error.filename, error.lineno)).rstrip("\n")
    column = max((error.offset or 1) - 1, 0)
    end_line, end_column = error.end_lineno or error.lineno, (error.end_offset or 0) - 1
    if end_line == error.lineno and end_column <= column:
        end_column = column + 1
    return SourceSpan(_shown(error.filename), error.lineno, column, end_line, end_column, text)


def _innermost_span(error: BaseException, path: Path) -> SourceSpan | None:
    """Return the innermost place in the user's directory that the error came through."""
    home = path.resolve().parent
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename, home)]
    if not frames:
        return None
    frame = frames[-1]
    number = frame.lineno or 1
    text = linecache.getline(frame.filename, number).rstrip("\n")
    end = (frame.end_lineno or number, frame.end_colno or len(text))
    return SourceSpan(_shown(frame.filename), number, frame.colno or 0, *end, text)


def _is_users(filename: str, home: Path) -> bool:
    return Path(filename).is_relative_to(home) and "site-packages" not in Path(filename).parts


def _shown(filename: str) -> str:
    """Return the path as the user would write it."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


# Finding the mods.


def _by_convention(module: ModuleType, spec: FileSpec) -> tuple[Attention | None, dict[Kind, Mod | None]]:
    found = vars(module)
    attention = found.get("attention")
    if isinstance(attention, Attention):
        return attention, {}
    mods: dict[Kind, Mod | None] = {kind: found.get(kind) for kind in _PARAMETERS}
    if all(mod is None for mod in mods.values()):
        raise UserFileError(
            f"{spec.path} defines neither score_mod nor mask_mod",
            why=f"a file brings {' and/or '.join(_PARAMETERS.values())}, or an Attention named attention",
            fix=_suggestion(module, spec),
        )
    for name, mod in mods.items():
        if mod is not None and not callable(mod):
            raise UserFileError(
                f"{name} of {spec.path} is {type(mod).__name__}, not a function",
                why=f"a file brings {' and/or '.join(_PARAMETERS.values())}",
                fix=f"define it as a function; a tensor is read by one: def {_PARAMETERS[name]}: return table[...]",
            )
    return None, mods


def _suggestion(module: ModuleType, spec: FileSpec) -> str:
    names = [name for name, value in vars(module).items() if isinstance(value, Attention) or _is_own_mod(value, module)]
    if not names:
        return "define one of them, or name your function: FILE:name"
    return "name what to compile: " + " or ".join(f"{spec.path}:{name}" for name in names[:3])


def _is_own_mod(value: object, module: ModuleType) -> bool:
    return inspect.isfunction(value) and value.__module__ == module.__name__ and len(_kinds(value)) == 1


def _named(module: ModuleType, spec: FileSpec) -> tuple[Attention | None, dict[Kind, Mod | None]]:
    values = {name: _look_up(module, spec, name) for name in spec.names}
    attentions = [value for value in values.values() if isinstance(value, Attention)]
    if attentions:
        if len(values) > 1:
            raise UserFileError(
                f"{spec} names an Attention and something else",
                why="an Attention brings both of its mods",
                fix="name it alone",
            )
        return attentions[0], {}
    mods: dict[Kind, Mod | None] = {}
    for name, value in values.items():
        kind = _kind_of(spec, name, value)
        if kind in mods:
            raise UserFileError(f"{spec} names two of {_PARAMETERS[kind]}", fix="name one score_mod and one mask_mod")
        mods[kind] = value
    return None, mods


def _look_up(module: ModuleType, spec: FileSpec, name: str) -> Any:
    try:
        with _located_errors(spec.path, passing=AttributeError):
            return reduce(getattr, name.split("."), module)
    except AttributeError:
        own = [known for known, value in vars(module).items() if callable(value) and not known.startswith("__")]
        near = difflib.get_close_matches(name, own, n=1)
        raise UserFileError(
            f"{spec.path} has no {name}", fix=f"did you mean {spec.path}:{near[0]}?" if near else "check the name"
        ) from None


def _kind_of(spec: FileSpec, name: str, value: object) -> Kind:
    kinds = _kinds(value)
    if inspect.isfunction(value) and "." in name and next(iter(inspect.signature(value).parameters), "") == "self":
        raise UserFileError(
            f"{spec.path}:{name} is a method, and of no object",
            why="its first argument, self, would be taken for one of a mod's",
            fix=f"make an object at the top of the file, and name the method of that: FILE:object.{value.__name__}",
        )
    if len(kinds) == 2 and name in _PARAMETERS:
        return "score_mod" if name == "score_mod" else "mask_mod"
    if len(kinds) != 1:
        takes = "takes both four and five arguments" if kinds else "takes neither four nor five arguments"
        raise UserFileError(
            f"{spec.path}:{name} {takes if callable(value) else 'is not a function'}",
            why=f"the number of parameters tells {' from '.join(_PARAMETERS.values())}",
            fix="name a function with one of these signatures",
        )
    return kinds[0]


def _kinds(value: object) -> list[Kind]:
    """Return what a value can be called as."""
    counts: dict[Kind, int] = {"score_mod": 5, "mask_mod": 4}
    return [kind for kind, count in counts.items() if _takes(value, count)]


def _takes(value: object, count: int) -> bool:
    if not callable(value):
        return False
    try:
        inspect.signature(value).bind(*range(count))
    except (TypeError, ValueError):
        return False
    return True

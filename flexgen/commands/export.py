"""`flexgen export`: a stand-alone module of one configuration, for use without flexgen."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexgen.aux_outputs import AuxRequest
from flexgen.commands.arguments import add_file, add_problem
from flexgen.commands.command_text import command_text
from flexgen.commands.console import Console
from flexgen.commands.offline import triton_is_installed
from flexgen.commands.output_file import write_bytes, write_output
from flexgen.commands.subject import choose_target, load_subject
from flexgen.errors import FlexgenError, OptionError
from flexgen.export import export_module
from flexgen.export_binary import export_package
from flexgen.lowering.targets import target_named

EXAMPLES = """\
  flexgen export causal.py                       print the module
  flexgen export causal.py -o my_attention.py    write it
  flexgen export alibi.py -o my_attention.py --backward --lse
  flexgen export causal.py --binary --target sm_80,sm_90,gfx942 -o my_attention
  flexgen export mods.py:softcap,causal --target gfx942 --shape 2,32,8,4096,4096,128,128"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="MODULE.py", help="where to write it (default: print it)")
    parser.add_argument(
        "--backward",
        action="store_true",
        help="with gradients of query, key, value, and of captured tensors that require grad",
    )
    parser.add_argument(
        "--binary",
        action="store_true",
        help="write a package of machine code into the folder -o, for each --target of a list such as sm_80,sm_90",
    )
    parser.add_argument("--lse", action="store_true", help="return the logsumexp of each row beside the output")
    add_problem(parser, dtype="bf16")


def run(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.binary:
        return _run_binary(arguments, console)
    _check_output(arguments.output, arguments.file.path)
    subject = load_subject(arguments)
    target = choose_target(arguments.target, console)
    aux = AuxRequest(lse=arguments.lse)
    lowered = subject.lower(target, aux, backward=arguments.backward)
    how = command_text("export", arguments, subject, target, ["--lse"] if arguments.lse else [])
    text = export_module(lowered, layout=subject.attention.options.layout, aux=aux, how=how)
    if arguments.output is None:
        console.text(text)
        return 0
    write_output(arguments.output, text)
    console.line(str(arguments.output))
    return 0


def _run_binary(arguments: argparse.Namespace, console: Console) -> int:
    folder = _check_folder(arguments.output)
    subject = load_subject(arguments)
    asked = arguments.target.split(",") if arguments.target else [choose_target(None, console)]
    targets = [target_named(name.strip()).name for name in asked]
    aux = AuxRequest(lse=arguments.lse)
    extra = ["--binary", *(["--lse"] if arguments.lse else [])]
    how = command_text("export", arguments, subject, ",".join(targets), extra)
    lowered = [subject.lower(target, aux, backward=arguments.backward) for target in targets]
    if not triton_is_installed():
        raise FlexgenError(
            "machine code needs triton, which is not installed",
            why="triton turns the emitted source into machine code; it has wheels for Linux",
            fix="install triton, or export without --binary",
        )
    files = export_package(lowered, layout=subject.attention.options.layout, aux=aux, how=how)
    for name, content in sorted(files.items()):
        write_bytes(folder / name, content)
        console.line(str(folder / name))
    return 0


def _check_folder(folder: Path | None) -> Path:
    """Refuse a folder that cannot become a package, before the work that would be lost."""
    if folder is None:
        raise OptionError("--binary writes several files", why="they need a folder", fix="name it with -o FOLDER")
    if not folder.name.isidentifier():
        raise OptionError(
            f"{folder} cannot be imported as a package",
            why="a package's folder is a Python name",
            fix="name it like my_attention",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists already", why="its files would be mixed up", fix="name a new folder")
    return folder


def _check_output(output: Path | None, file: Path) -> None:
    """Refuse a name that the module cannot have, before the work that would be lost."""
    if output is None:
        return
    if not output.stem.isidentifier() or output.suffix != ".py":
        raise OptionError(
            f"{output} cannot be imported as a module",
            why="a module's file is a Python name that ends in .py",
            fix="name it like my_attention.py",
        )
    if output.resolve() == file.resolve():
        raise OptionError(
            f"{output} is the file of the mods", why="the module would replace it", fix="give -o another name"
        )

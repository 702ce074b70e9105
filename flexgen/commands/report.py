"""`flexgen report`: one page that shows a mask, a score_mod, the decisions, the source, and what it costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from flexgen.commands.arguments import add_backward, add_file, add_problem
from flexgen.commands.command_text import command_text
from flexgen.commands.console import Console
from flexgen.commands.mask_subject import add_place, place_of
from flexgen.commands.output_file import write_output
from flexgen.commands.report_page import render_page, report_page
from flexgen.commands.subject import choose_target, load_subject
from flexgen.errors import OptionError

EXAMPLES = """\
  flexgen report causal.py -o report.html        one page, to open in any browser
  flexgen report alibi.py -o report.html --backward --target sm_80
  flexgen report prefix.py -o report.html --batch 1 --head 3"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="REPORT.html", help="where to write it")
    add_backward(parser)
    add_place(parser)
    add_problem(parser, dtype="bf16")


def run(arguments: argparse.Namespace, console: Console) -> int:
    output: Path = arguments.output
    if output.suffix.lower() not in (".html", ".htm"):
        raise OptionError(f"{output} is no page", why="a report is HTML", fix="name it like report.html")
    subject = load_subject(arguments)
    place = place_of(arguments, subject)
    target = choose_target(arguments.target, console)
    lowered = subject.lower(target, backward=arguments.backward)
    extra = [f"--{name}={value}" for name, value in (("batch", place.b), ("head", place.h)) if value]
    command = command_text("report", arguments, subject, target, extra)
    write_output(output, render_page(report_page(subject, lowered, place, command)))
    console.line(str(output))
    return 0

"""`flexgen explain`: every decision about a kernel, its value and the reason."""

from __future__ import annotations

import argparse
import re

from flexgen.commands.arguments import add_backward, add_file, add_problem, parse_count
from flexgen.commands.console import Console, Span, wrapped
from flexgen.commands.context import context_reports
from flexgen.commands.predict import predict
from flexgen.commands.subject import choose_target, load_subject
from flexgen.explain_work import explain_work

EXAMPLES = """\
  flexgen explain causal.py                      what was proven, and what was decided
  flexgen explain causal.py --target sm_80 --dtype fp32
  flexgen explain mods.py:softcap --set USE_SUBTILING=1
  flexgen explain causal.py --shape 2,16,16,8192,8192,128,128 --backward
                                                 and the work at these sizes, and what bounds it
  flexgen explain causal.py --shape 1,16,16,131072,131072,128,128 --ranks 8 64 1024
                                                 and balance and traffic over so many ranks"""

_DECISION = re.compile(r"(?P<name>\s+\w+\s+= )(?P<value>.*?)(?P<word>\s+because: )(?P<reason>.*)")
_FACT = re.compile(r"(?P<label>  [a-z][a-z ]+?  +)(?P<rest>.*)")


def configure(parser: argparse.ArgumentParser) -> None:
    add_file(parser)
    add_problem(parser, dtype="bf16")
    add_backward(parser)
    parser.add_argument(
        "--ranks",
        type=parse_count,
        nargs="+",
        default=[],
        metavar="N",
        help="predict balance and traffic of the sequence sharded over so many ranks",
    )


def run(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments)
    lowered = subject.lower(choose_target(arguments.target, console), backward=arguments.backward)
    write_report(lowered.explain(), console)
    for work in predict(subject, lowered):
        console.line()
        write_report(explain_work(work, subject.shape), console)
    for report in context_reports(subject, lowered, arguments.ranks):
        console.line()
        write_report(report, console)
    return 0


def write_report(report: str, console: Console) -> None:
    for line in wrapped(report):
        console.line(*painted(line))


def painted(line: str) -> list[Span]:
    """Return the line as spans: section titles stand out, values more than reasons."""
    if line and not line.startswith(" "):
        return [Span(line, "bold")]
    if decision := _DECISION.fullmatch(line):
        name, value, word, reason = decision.groups()
        return [Span(name), Span(value, "cyan"), Span(word, "dim"), Span(reason)]
    if "rejected " in line:
        return [Span(line, "dim")]
    if fact := _FACT.fullmatch(line):
        return [Span(fact["label"], "cyan"), Span(fact["rest"])]
    return [Span(line)]

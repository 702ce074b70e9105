"""The program in a process of its own: one program under two names, closed pipes, and machines without triton."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from flexgen.commands.console import WIDTH

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-m", "flexgen"]
SCRIPT = [sys.executable, "-c", "import sys; from flexgen.cli import main; sys.exit(main())"]
# Runs several commands, given as one argument each, with triton made impossible to import; prints each exit code.
WITHOUT_TRITON = [
    sys.executable,
    "-c",
    "import shlex, sys; sys.modules['triton'] = None; from flexgen.cli import main\n"
    "for command in sys.argv[1:]: print('exit', main(shlex.split(command)), flush=True)",
]


def execute(program: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH)}
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT)


def test_module_and_script_are_the_same_program() -> None:
    assert execute(MODULE, "options").stdout == execute(SCRIPT, "options").stdout != ""


def test_help_options_and_cache_wait_for_no_torch() -> None:
    program = (
        "import sys; from flexgen.cli import main; main(['options']); main(['--help']); main(['cache', 'path']); "
        "assert 'torch' not in sys.modules"
    )
    done = execute([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_left_quietly(causal: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*MODULE, "compile", str(causal), "--dump-code", "--target", "sm_90"]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_without_triton_everything_up_to_emission_works(mods: Path) -> None:
    done = execute(
        WITHOUT_TRITON,
        f"compile {mods}:softcap,causal --dump-code --target sm_90",
        f"compile {mods}:causal --dump-code {mods.parent / 'out'} --target gfx942",
        f"explain {mods}:documents",
        f"mask {mods}:documents",
        "options",
    )
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^exit (\d+)$", done.stdout, re.MULTILINE) == ["0"] * 5, done.stderr
    assert "@triton.jit" in done.stdout
    assert (mods.parent / "out" / "05_forward.py").exists()


def test_without_triton_what_needs_it_says_so(causal: Path) -> None:
    done = execute(WITHOUT_TRITON, *(f"{command} {causal}" for command in ("compile", "check", "resources")))
    assert done.stdout == "exit 2\n" * 3
    assert done.stderr.count("needs triton, which is not installed") == 3
    assert "Traceback" not in done.stderr

"""The program in a process of its own: one program under two names, closed pipes, and machines without triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from flexgen.commands.console import WIDTH

ROOT = Path(__file__).parents[2]
MODULE = [sys.executable, "-m", "flexgen"]
SCRIPT = [sys.executable, "-c", "import sys; from flexgen.cli import main; sys.exit(main())"]
# As the console script does, with triton made impossible to import.
WITHOUT_TRITON = [
    sys.executable,
    "-c",
    "import sys; sys.modules['triton'] = None; from flexgen.cli import main; sys.exit(main())",
]


def execute(program: list[str], *arguments: object, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(WIDTH)}
    command = [*program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=ROOT, **settings)  # type: ignore[call-overload, no-any-return]


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
    program = " ".join(
        ["exec 3>&1;", f"'{sys.executable}' -m flexgen compile '{causal}' --dump-code --target sm_90; echo $? >&2"]
    )
    done = subprocess.run(
        ["bash", "-c", f"({program}) | true; sleep 0"],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr.split() == ["141"]


def test_without_triton_everything_up_to_emission_works(mods: Path) -> None:
    program = [*WITHOUT_TRITON]
    printed = execute(program, "compile", f"{mods}:softcap,causal", "--dump-code", "--target", "sm_90")
    assert printed.returncode == 0, printed.stderr
    assert "@triton.jit" in printed.stdout
    for arguments in (
        ("compile", f"{mods}:causal", "--dump-code", mods.parent / "out"),
        ("explain", f"{mods}:documents"),
        ("mask", f"{mods}:documents"),
    ):
        done = execute(program, *arguments)
        assert done.returncode == 0, done.stderr
    assert (mods.parent / "out" / "05_forward.py").exists()


def test_without_triton_what_needs_it_says_so(causal: Path) -> None:
    for command in ("compile", "check", "resources"):
        done = execute(WITHOUT_TRITON, command, causal)
        assert done.returncode == 2
        assert "needs triton, which is not installed" in done.stderr and "fix: " in done.stderr

"""Fresh Python processes for tests, and commands in this one."""

import os
import subprocess
import sys

from click.testing import CliRunner

PATIENCE = 600  # seconds: a process that takes longer hangs, on however busy a machine


def run_kvfold(*words):
    """What a command line prints to stdout, which must end in status 0; its error is raised."""
    from kvfold.convert.cli import kvfold

    done = CliRunner().invoke(kvfold, list(map(str, words)), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def run_python(*arguments, check=True, **options):
    """``python ARGUMENTS`` on one thread, its output captured as text; its error output is shown if
    it fails.

    ``check=False`` leaves the exit status to the caller; ``environment`` is added to that of this
    process; further options are ``subprocess.run``'s.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **options.pop("environment", {})}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=PATIENCE, **options
    )
    assert not check or done.returncode == 0, f"exit status {done.returncode}:\n{done.stderr}"
    return done

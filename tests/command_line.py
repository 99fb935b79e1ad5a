"""Run a command line in this process."""

import shlex

from typer.testing import CliRunner, Result

from compressive.cli.app import app


def run(line: str) -> Result:
    """Run the arguments of `compressive`."""
    return CliRunner().invoke(app, shlex.split(line))


def error_line(line: str) -> str:
    """Return the only line of an error message, without its prefix."""
    result = run(line)
    assert result.exit_code == 2, result.output
    (text,) = result.stderr.splitlines()
    return text.removeprefix("error: ")

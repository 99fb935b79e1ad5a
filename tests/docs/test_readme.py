"""The `sh` commands of the README run as written; test_documents.py runs everything else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

README = (ROOT / "README.md").read_text()
TEST_COMMAND = "uv run pytest"


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    lines = "".join(blocks(text, "sh")).splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


def test_ci_runs_the_readmes_test_command() -> None:
    assert TEST_COMMAND in commands(README)
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert TEST_COMMAND in ci


def chains() -> list[list[str]]:
    """Return single commands; those on the quick start's runs follow it in order."""
    shown = [c for c in commands(README) if c != TEST_COMMAND and not c.startswith("pip install")]
    first = [c for c in shown if "quickstart" in c]
    return [first, *([c] for c in shown if c not in first)]


@pytest.mark.slow
@pytest.mark.parametrize("chain", chains(), ids=lambda chain: chain[0])
def test_readme_commands_run(chain: list[str], tmp_path: Path) -> None:
    """`uv run X` runs X in this environment; `pip install` created this environment."""
    for command in chain:
        program, *arguments = command.removeprefix("uv run ").split()
        if program == "compressive":
            arguments = ["-m", program, *arguments]
        else:
            assert program == "python", f"this test cannot run {command!r}"
        run = subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},  # other tests run in parallel
            capture_output=True,
            text=True,
            timeout=1200,  # a generous limit
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout


def test_readme_example_is_short() -> None:
    example = blocks(README, "python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15

"""The command line: what it prints, and one clear line with exit code 2 on bad input."""

import re

import pytest
from typer.testing import CliRunner

from compressive.cli import app

RUN = CliRunner()


def rows(output: str) -> list[list[float]]:
    """The numbers of the table's rows that hold nothing but numbers."""
    lines = [re.findall(r"-?\d+\.\d+", line) for line in output.splitlines() if "│" in line]
    return [[float(x) for x in line] for line in lines if len(line) == 4]


def test_meter_reads_the_known_values() -> None:
    """Residual at agreement 1 and 0.5, n = 256, kappa 1024 and 10: mpmath, to the printed digit."""
    result = RUN.invoke(app, ["meter", "--batch", "256"])
    assert result.exit_code == 0
    table = {row[0]: row[1:] for row in rows(result.output)}
    assert table[1.0][:2] == [184.68, 0.0]
    assert table[0.5][0] == 189.10
    assert table[0.5][1] == pytest.approx(189.0999 - 184.6841, abs=0.006)
    assert f"log K = {6.24:.2f}" in result.output  # log 511
    predictive = [row[2] for row in table.values()]
    assert predictive == sorted(predictive)
    assert predictive[-1] < 6.24


def test_meter_repeats_by_seed() -> None:
    first, again, other = (
        RUN.invoke(app, ["meter", "--dim", "16", "--seed", seed]).output for seed in "001"
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kappa-e", "-3"], "kappa_e must be a finite number of 0 or more, got -3.0"),
        (["--kappa-b", "nan"], "kappa_b must be a finite number of 0 or more, got nan"),
        (["--dim", "1"], "--dim must be 2 or more and --batch 1 or more, got 1 and 512"),
        (["--batch", "0"], "--dim must be 2 or more and --batch 1 or more, got 256 and 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    result = RUN.invoke(app, ["meter", *arguments])
    assert result.exit_code == 2
    assert result.output.strip() == f"error: {message}"


def test_help_names_every_command() -> None:
    result = RUN.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "meter" in result.output

"""Files of other format versions are rejected with one line that names the writing version."""

import json
from pathlib import Path

import pytest
from run_files import config_text, metrics_text, results_text
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.rundir.files import CONFIG, METRICS, RESULTS
from compressive.rundir.versions import FORMAT_VERSIONS, UnsupportedFormat, check_format

SETTINGS = {"method": "byol", "train": {"batch_size": 8}}


@pytest.mark.parametrize("command", ["watch", "report", "compare"])
def test_commands_reject_a_run_of_an_older_format(command: str, tmp_path: Path) -> None:
    runs = [tmp_path / "a", tmp_path / "b"]
    for run in runs:
        (run / "evaluation").mkdir(parents=True)
        (run / CONFIG).write_text(config_text(SETTINGS))
        (run / METRICS).write_text(metrics_text([{"step": 1}]))
        (run / "evaluation" / RESULTS).write_text(results_text([]))
    old = {**SETTINGS, "about": {"versions": {"compressive": "0.1.0"}}}
    (runs[0] / CONFIG).write_text(json.dumps(old))
    words = [command, *map(str, runs[: 2 if command == "compare" else 1])]
    words += ["--out", str(tmp_path / "r.html")] if command == "report" else []
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    for part in (str(runs[0] / CONFIG), "compressive 0.1.0", "format 1", "format 2"):
        assert part in " ".join(result.output.split())


@pytest.mark.parametrize("kind", FORMAT_VERSIONS)
def test_format_error_names_both_format_numbers(kind: str, tmp_path: Path) -> None:
    present = FORMAT_VERSIONS[kind]
    check_format(tmp_path / "file", kind, present)
    check_format(tmp_path / "file", kind, str(present))  # safetensors metadata is text
    for found, number in ((None, 1), (1, 1), (present + 1, present + 1), ("x", "x")):
        with pytest.raises(UnsupportedFormat, match=rf"file.*format {number}\b.*format {present}"):
            check_format(tmp_path / "file", kind, found)

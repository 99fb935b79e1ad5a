"""An evaluation that measures nothing reports it and keeps earlier results."""

from pathlib import Path

import pytest
from tiny import photos, silent, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.evaluation.suite import evaluate
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_results_of_other_images_are_not_shown_if_nothing_was_measured(tmp_path: Path) -> None:
    run, unlabeled = tmp_path / "run", photos(tmp_path / "photos", 10)
    pretrain(tiny(), run, display=silent())
    evaluate(str(run), tasks=("knn",), device="cpu", display=silent())
    file = run / "evaluation/results.json"
    before = file.read_bytes()
    words = ["evaluate", str(run), "--tasks", "knn", "--device", "cpu", "--data", str(unlabeled)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert "kNN" not in result.stdout
    assert result.stderr == (
        "error: nothing was measured; skipped: knn, which needs labels of two classes: photos has "
        "none (--data DATA)\n"
    )
    assert file.read_bytes() == before
    # Without earlier results, no folder is created.
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "new/folder")])
    assert result.exit_code == 2
    assert not (tmp_path / "new").exists()
    # Tasks that need no labels still run.
    result = CliRunner().invoke(app, [*words, "--tasks", "knn,geometry"])
    assert result.exit_code == 0, result.output

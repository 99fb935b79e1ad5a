"""`finetune --track` and `sweep --track` log their runs and results."""

import os
import sys
from pathlib import Path

import pytest
from fake_trackers import FakeTrackers
from input_formats import class_folders, several
from tiny import CHANGES, silent, tiny
from typer.testing import CliRunner

import compressive
from compressive.cli.app import app
from compressive.rundir.folder import read_run_id


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrackers:
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))  # of the sweep
    return FakeTrackers(folder, monkeypatch)


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_finetune_is_tracked(fake: FakeTrackers, tmp_path: Path) -> None:
    images = class_folders(tmp_path / "images")
    compressive.pretrain(tiny(f"data.source={images}"), tmp_path / "run", display=silent())
    out = tmp_path / "tuned"
    options = ("--epochs", 1, "--lr", 0.01, "--batch-size", 8, "--device", "cpu")
    said = run("finetune", tmp_path / "run", images, *options, "--out", out, "--track", "wandb")
    assert "https://example.org/run" in said
    assert {each["id"] for each in fake.calls("init")} == {read_run_id(out)}
    logged = [each["values"] for each in fake.calls("log")]
    assert any("loss" in each for each in logged)
    assert any("top-1" in name for each in logged for name in each)  # of the test images
    assert all(each["exit_code"] == 0 for each in fake.calls("finish"))


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_each_run_of_a_sweep_is_tracked_and_trained_on_all_sources(
    fake: FakeTrackers, tmp_path: Path
) -> None:
    changes = [word for change in CHANGES for word in ("--set", change)]
    out = tmp_path / "sweep"
    options = ("--seeds", "0,1", "--suite", "none", "--out", out, "--track", "wandb")
    said = run("sweep", *several(tmp_path), "--recipe", "simclr/quickstart", *changes, *options)
    (total,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["all"]]
    assert total == ["all", "40", "40", "4"]
    configs = list(out.glob("**/config.json"))
    assert len(configs) == 2
    assert all("more.zip" in config.read_text() for config in configs)
    ids = {read_run_id(config.parent) for config in configs}
    assert len(ids) == 2
    assert {each["id"] for each in fake.calls("init")} == ids
    assert len(fake.calls("finish")) == 2
    assert sum("loss" in each["values"] for each in fake.calls("log")) >= 2

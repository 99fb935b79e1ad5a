"""Trackers get every value of a run, and no fault of a tracker stops or slows the run."""

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line
from fake_trackers import FakeTrackers
from tiny import Written, journal, silent, tiny

from compressive.cli.completion import complete_trackers
from compressive.config import TRACKERS, flat, override, tracker_names
from compressive.rundir.folder import read_run_id
from compressive.rundir.metrics_log import MetricsFile
from compressive.rundir.tensorboard import TensorBoardWriter
from compressive.rundir.tracker import TrackedRun, Tracker
from compressive.tracking import TrackerGroup, check_trackers, track_records
from compressive.tracking.process import TrackerProcess
from compressive.tracking.worker import make_tracker
from compressive.train import observers
from compressive.train.loop import TrainingFailed, pretrain
from compressive.train.observers import Observers

SETTINGS = {"seed": 3, "optim.lr": 0.5, "network.name": "resnet18"}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrackers:
    folder = tmp_path / "fake packages"
    folder.mkdir()
    for name in ("WANDB_PROJECT", "WANDB_DIR", "MLFLOW_EXPERIMENT_NAME", "TRACKIO_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    return FakeTrackers(folder, monkeypatch)


def group(said: list[str], seconds: float = 30.0) -> TrackerGroup:
    return TrackerGroup("wandb, mlflow,trackio", said.append, finish_seconds=seconds)


def test_files_and_trackers_have_the_same_interface() -> None:
    found: list[Tracker] = [MetricsFile(), TensorBoardWriter(), TrackerProcess("wandb", 1)]
    found += [make_tracker(name) for name in TRACKERS]
    for each in found:
        assert callable(each.start)
        assert callable(each.log)
        assert callable(each.finish)


def test_every_tracker_gets_settings_values_and_status(fake: FakeTrackers, tmp_path: Path) -> None:
    run = TrackedRun(tmp_path / "sweep" / "beta1-seed0", 0, "0123456789ab", SETTINGS)
    said: list[str] = []
    trackers = group(said)
    trackers.start(run)
    trackers.log(10, {"loss": 2.5, "rate": math.nan, "knn": None, "health": "", "note": "spike"})
    trackers.log(20, {"loss": 1.5})
    trackers.finish("stopped")

    (wandb,) = fake.calls("init")
    assert (wandb["project"], wandb["name"]) == ("compressive", "beta1-seed0")
    assert (wandb["group"], wandb["id"], wandb["resume"]) == ("sweep", "0123456789ab", "allow")
    assert wandb["config"] == SETTINGS
    assert wandb["dir"] == str(run.folder)
    logged = [each["values"] for each in fake.calls("log")]
    assert logged == [{"step": 10, "loss": 2.5}, {"step": 20, "loss": 1.5}]
    (end,) = fake.calls("finish")
    assert end["exit_code"] == 0
    assert end["summary"] == {"note": "spike", "status": "stopped"}

    (mlflow,) = fake.calls("init", "mlflow")
    assert (mlflow["experiment"], mlflow["name"]) == ("compressive", "beta1-seed0")
    assert mlflow["tags"]["compressive.run_id"] == "0123456789ab"
    params, first, second = fake.calls("log", "mlflow")
    assert params["params"] == {name: str(value) for name, value in SETTINGS.items()}
    assert first["metrics"] == [["loss", 2.5, 10]]
    assert first["tags"] == {"note": "spike"}
    assert second["metrics"] == [["loss", 1.5, 20]]
    assert [each["status"] for each in fake.calls("finish", "mlflow")] == ["KILLED"]

    (trackio,) = fake.calls("init", "trackio")
    assert (trackio["project"], trackio["name"]) == ("compressive", "beta1-seed0-012345")
    assert (trackio["config"], trackio["resume"]) == (SETTINGS, "allow")
    values = [(each["step"], each["values"]) for each in fake.calls("log", "trackio")]
    assert values[:2] == [(10, {"loss": 2.5, "note": "spike"}), (20, {"loss": 1.5})]
    assert len(fake.calls("finish", "trackio")) == 1
    assert sorted(text.partition(":")[0] for text in said) == ["mlflow", "trackio", "wandb"]


def test_run_is_tracked_and_resumed_under_one_id(
    fake: FakeTrackers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config = tiny("train.steps=4", "train.track=wandb,mlflow")

    def stop(step: int, metrics: object) -> None:
        if step == 2:
            raise StopIteration

    with pytest.raises(StopIteration):
        pretrain(config, tmp_path / "run", display=silent(), callbacks=[stop])
    display = Written()
    pretrain(config, tmp_path / "run", display=display)
    starts = fake.calls("init")
    assert [each["id"] for each in starts] == [read_run_id(tmp_path / "run")] * 2
    assert starts[0]["project"] == "mine"
    assert starts[0]["config"] == json.loads(json.dumps(flat(config)))
    assert len(fake.calls("init", "mlflow")) == 1
    assert [each["status"] for each in fake.calls("update", "mlflow")] == ["RUNNING"]
    ends = [each["summary"]["status"] for each in fake.calls("finish")]
    assert ends == ["stopped", "finished"]
    # The tracker has the values of metrics.jsonl.
    logged = [each["values"] for each in fake.calls("log")]
    losses = {each["step"]: each["loss"] for each in logged if "loss" in each}
    written = {line["step"]: line["loss"] for line in journal(tmp_path / "run") if "loss" in line}
    assert losses == written
    assert sorted(losses) == [1, 2, 3, 4]
    assert any("knn_accuracy" in each for each in logged)
    assert "https://example.org/run" in "\n".join(display.said)
    # A finished run starts no tracker.
    pretrain(config, tmp_path / "run", display=display)
    assert len(fake.calls("init")) == 2


FAULTS = ("raise import", "raise init", "raise log", "raise finish", "exit init", "exit log")


@pytest.mark.parametrize("fault", FAULTS)
def test_failing_tracker_costs_one_warning(
    fault: str, fake: FakeTrackers, tmp_path: Path, clean: list[dict[str, Any]]
) -> None:
    fake.fail(fault)
    display = Written()
    config = tiny("train.steps=4", "train.track=wandb")
    outcome = pretrain(config, tmp_path / "run", display=display)
    assert outcome.step == outcome.total == 4
    assert journal(tmp_path / "run") == clean
    warnings = [text for text in display.said if text.startswith("wandb: ") and "without" in text]
    (warning,) = warnings
    assert "\n" not in warning
    assert ("exit code 3" if "exit" in fault else "ConnectionError: no network;") in warning
    log = tmp_path / "run" / "trackers" / "wandb.log"
    assert str(log) in warning
    if "raise" in fault:  # with everything that the tracker printed
        assert "a long explanation" in log.read_text()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the metrics of the same run without trackers."""
    out = tmp_path_factory.mktemp("clean")
    pretrain(tiny("train.steps=4"), out / "run", display=silent())
    return journal(out / "run")


@pytest.mark.parametrize("fault", ["hang import", "hang init", "hang log", "hang finish"])
def test_hanging_tracker_is_killed(fault: str, fake: FakeTrackers, tmp_path: Path) -> None:
    fake.fail(fault)
    said: list[str] = []
    trackers = TrackerGroup("wandb", said.append, finish_seconds=0.5)
    start = time.monotonic()
    trackers.start(TrackedRun(tmp_path, 0, "0123456789ab", {}))
    for step in range(200):
        trackers.log(step, {"text": 2000 * "x"})  # more than a pipe holds
    assert time.monotonic() - start < 1
    (process,) = trackers._trackers
    child = process._process
    assert child is not None
    until = start + 60
    while not fake.calls("import") and time.monotonic() < until:
        time.sleep(0.01)
    start = time.monotonic()
    trackers.finish("finished")
    assert time.monotonic() - start < 4
    assert child.poll() is not None
    (warning,) = [text for text in said if "no answer" in text]
    assert "0.5 s" in warning
    trackers.finish("finished")  # a second call does nothing
    assert len(fake.calls("import")) == 1


def test_tracker_that_falls_behind_is_turned_off(fake: FakeTrackers, tmp_path: Path) -> None:
    fake.fail("hang init")
    tracker = TrackerProcess("wandb", 30, most_pending=5)
    tracker.start(TrackedRun(tmp_path))
    for step in range(300):
        tracker.log(step, {"text": 2000 * "x"})
    start = time.monotonic()
    tracker.finish("finished")
    assert time.monotonic() - start < 5
    (warning,) = tracker.take_messages()
    assert "5 log points" in warning


def test_killed_training_is_marked_as_failed(fake: FakeTrackers, tmp_path: Path) -> None:
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from compressive.rundir.tracker import TrackedRun\n"
        "from compressive.tracking.process import TrackerProcess\n"
        "tracker = TrackerProcess('wandb', 30)\n"
        f"tracker.start(TrackedRun(Path({str(tmp_path)!r})))\n"
        "tracker.log(1, {'loss': 2.0})\n"
        "while not tracker.take_messages(): time.sleep(0.05)\n"
        "time.sleep(0.2); os.kill(os.getpid(), 9)\n"
    )
    path = ":".join(sys.path)
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})
    until = time.monotonic() + 20
    while not fake.calls("finish") and time.monotonic() < until:
        time.sleep(0.05)
    (end,) = fake.calls("finish")
    assert (end["exit_code"], end["summary"]["status"]) == (1, "failed")
    assert [each["values"]["loss"] for each in fake.calls("log")] == [2.0]


def test_restarts_continue_with_the_same_tracker(
    fake: FakeTrackers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny("train.steps=4", "train.track=wandb", "health.max_restarts=1", "optim.lr=1e30")
    with pytest.raises(TrainingFailed):
        pretrain(config, tmp_path / "run", display=silent())
    assert len(fake.calls("init")) == 1
    (end,) = fake.calls("finish")
    assert (end["exit_code"], end["summary"]["status"]) == (1, "failed")


def test_only_the_first_process_tracks(
    fake: FakeTrackers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observers, "rank", lambda: 1)
    watching = Observers(tiny("train.track=wandb"), silent())
    watching.open(TrackedRun(tmp_path), is_over=False)
    watching.close()
    assert not fake.calls("import")


def test_results_of_an_evaluation_are_added_to_the_run(fake: FakeTrackers, tmp_path: Path) -> None:
    from compressive.evaluation.suite import evaluate

    pretrain(tiny("train.track=wandb"), tmp_path / "run", display=silent())
    results, _ = evaluate(tmp_path / "run", tasks="knn", device="cpu", display=silent())
    first, second = fake.calls("init")
    assert first["id"] == second["id"]
    values = fake.calls("log")[-1]["values"]
    assert values.pop("step") == 2
    assert values == {f"evaluation/{each.key}": each.value for each in results.records}
    assert values


def test_missing_tracker_at_an_evaluation_is_a_note(
    fake: FakeTrackers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    track_records(tmp_path, [], said.append)  # no run
    pretrain(tiny("train.track=wandb"), tmp_path / "run", display=silent())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    track_records(tmp_path / "run", [], said.append)
    (note,) = said
    assert "compressive[wandb]" in note


@pytest.mark.parametrize("command", ["pretrain builtin", "sweep builtin --seeds 0,1", "finetune"])
@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("wandbb", r"wandbb.*did you mean wandb\?"),
        ("wandb,tensorflow", r"wandb, mlflow, trackio.*tensorflow"),
        ("trackio", r"train.track=trackio.*compressive\[trackio\]"),
        ("mlflow,wandb", r"mlflow and wandb.*compressive\[mlflow,wandb\]"),
    ],
)
def test_unknown_and_missing_trackers_are_one_line(
    command: str, names: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = importlib.util.find_spec
    missing = set(TRACKERS)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in missing else hidden(name)
    )
    if command == "finetune":
        command = "finetune cifar10-byol-r18 builtin"
    assert re.search(expected, error_line(f"{command} --track {names}"))


def test_option_and_setting_may_not_contradict(fake: FakeTrackers) -> None:
    message = error_line("pretrain builtin --track wandb --set train.track=mlflow")
    assert "--track wandb" in message
    assert "train.track=mlflow" in message


def test_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ValueError, match="trackio"):
        check_trackers("trackio")


def test_names_are_parsed_and_completed() -> None:
    assert tracker_names(" wandb, mlflow ,wandb") == ["wandb", "mlflow"]
    assert tracker_names("") == []
    assert complete_trackers("wandb,m") == ["wandb,mlflow"]
    with pytest.raises(ValueError, match=r"train\.track"):
        override(tiny(), "train.track=tensorboard")


def test_worker_does_not_import_torch() -> None:
    code = "import sys, compressive.tracking.worker; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

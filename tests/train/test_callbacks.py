"""Callbacks see what metrics.jsonl and the folder hold; an exception stops a run that is saved."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import together
from tiny import differences, journal, last, silent, tiny

import compressive
from compressive.rundir import checkpoint
from compressive.train import callbacks
from compressive.train.callbacks import Callback, Callbacks
from compressive.train.loop import TrainingFailed, pretrain
from compressive.train.outcome import Outcome

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = tiny("train.steps=6", "train.log_every=2", "probe.every_epochs=0.6")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run without callbacks."""
    threads, out = torch.get_num_threads(), tmp_path_factory.mktemp("plain") / "run"
    torch.set_num_threads(1)
    pretrain(CONFIG, out, display=silent())
    torch.set_num_threads(threads)
    return out


class Recorder(Callback):
    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, Any]]] = []
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.checkpoints: list[tuple[int, bool]] = []
        self.ends: list[Outcome] = []

    def on_log(self, step: int, metrics: Mapping[str, float | str]) -> None:
        self.logs.append((step, dict(metrics)))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.evaluations.append((step, dict(metrics)))

    def on_checkpoint(self, step: int, path: Path) -> None:
        self.checkpoints.append((step, checkpoint.step_of(path) == step and path.is_file()))

    def on_end(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


def test_callbacks_see_the_lines_and_files_of_the_run(tmp_path: Path) -> None:
    recorder, steps = Recorder(), list[int]()
    out = tmp_path / "run"
    given = [recorder, lambda step, metrics: steps.append(step)]
    outcome = pretrain(CONFIG, out, display=silent(), callbacks=given)
    _, *lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    logged = [{"step": step, **metrics} for step, metrics in recorder.logs]
    assert logged == [line for line in lines if "loss" in line]
    measured = [{"step": step, **metrics} for step, metrics in recorder.evaluations]
    assert measured == [line for line in lines if "knn_accuracy" in line]
    assert measured
    assert steps == [2, 4, 6]
    assert recorder.checkpoints == [(0, True), (6, True)]
    assert recorder.ends == [outcome]
    assert all(type(value) in (float, str) for _, each in recorder.logs for value in each.values())


def test_callbacks_do_not_change_the_run(tmp_path: Path, plain: Path) -> None:
    pretrain(CONFIG, tmp_path / "run", display=silent(), callbacks=[Recorder()])
    assert not differences(last(tmp_path / "run"), last(plain))


class Broken(Recorder):
    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "_where"):
            return self._fail
        return super().__getattribute__(name)

    def _fail(self, *given: object) -> None:
        raise ZeroDivisionError("my mistake")


@pytest.mark.parametrize("where", ["on_log", "on_evaluation", "on_checkpoint", "on_end"])
def test_exception_of_a_callback_is_raised_after_saving(
    where: str, tmp_path: Path, plain: Path
) -> None:
    broken, after, out = Broken(where), Recorder(), tmp_path / "run"
    with pytest.raises(ZeroDivisionError, match="my mistake"):
        pretrain(CONFIG, out, display=silent(), callbacks=[broken, after])
    stopped = checkpoint.steps(out / "checkpoints")[-1]
    expected = {"on_log": 2, "on_evaluation": 4, "on_checkpoint": 1, "on_end": 6}[where]
    assert checkpoint.step_of(stopped) == expected
    if where != "on_end":
        assert "ZeroDivisionError: my mistake" in journal(out)[-1]["stopped"]
        assert not after.ends
        # The same call without the mistake completes the run, bitwise as if it had not stopped.
        pretrain(CONFIG, out, display=silent())
    assert not differences(last(out), last(plain))


def test_interrupt_in_a_callback_is_not_held_back(tmp_path: Path) -> None:
    def interrupt(step: int, metrics: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pretrain(CONFIG, tmp_path / "run", display=silent(), callbacks=[interrupt])


def test_failed_training_does_not_call_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    config = tiny("train.steps=4", "health.max_restarts=0", "optim.lr=1e30")
    with pytest.raises(TrainingFailed):
        pretrain(config, tmp_path / "run", display=silent(), callbacks=[recorder])
    assert recorder.logs
    assert not recorder.ends


def test_only_functions_and_callbacks_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"callbacks.*int"):
        Callbacks([3])  # type: ignore[list-item]
    assert compressive.Callback is Callback
    monkeypatch.setattr(callbacks, "rank", lambda: 1)
    recorder = Recorder()
    Callbacks([recorder]).on_log(1, {})
    assert not recorder.logs


def stop_in_first_process(rank: int, folder: Path) -> None:
    """Run in each process: only the first one gets the exception, and no process waits forever."""

    def fail(step: int, metrics: object) -> None:
        raise ZeroDivisionError

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    try:
        outcome = pretrain(CONFIG, folder / "run", display=silent(), callbacks=[fail])
        said = str(outcome.step)
    except ZeroDivisionError:
        said = "raised"
    (folder / f"process{rank}").write_text(said)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_exception_stops_all_processes(tmp_path: Path) -> None:
    together(stop_in_first_process, (tmp_path,), 2)
    assert [(tmp_path / f"process{rank}").read_text() for rank in (0, 1)] == ["raised", "2"]

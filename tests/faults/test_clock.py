"""Training and `watch` work if the system clock jumps by a year."""

import io
import json
import os
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from run_files import config_text, metrics_text
from tiny import silent, tiny

from compressive.cli.watch import watch
from compressive.rundir import checkpoint
from compressive.train.loop import pretrain

YEAR = 365 * 86400.0


class Jumping:
    """A replacement for `time.time` that jumps at every call."""

    def __init__(self, jump: float) -> None:
        self.now, self.jump = time.time(), jump

    def __call__(self) -> float:
        self.now += self.jump
        return self.now


@pytest.mark.slow
@pytest.mark.parametrize(
    ("jump", "save_every", "expected"),
    [(-YEAR, "1e-9", [0, 1, 2, 3, 4, 4]), (YEAR, "99", [0, 4])],
)
def test_throughput_and_checkpoints_do_not_depend_on_the_system_clock(
    jump: float,
    save_every: str,
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[int] = []
    save = checkpoint.save_step

    def record(folder: Path, step: int, state: dict[str, object]) -> Path:
        saved.append(step)
        return save(folder, step, state)

    monkeypatch.setattr(checkpoint, "save_step", record)
    monkeypatch.setattr(time, "time", Jumping(jump))
    changes = "train.steps=4", f"train.save_every={save_every}"
    assert pretrain(tiny(*changes), tmp_path / "run", display=silent()).step == 4
    assert saved == expected
    _, *lines = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    first, *rates = [line["images_per_second"] for line in lines if "loss" in line]
    assert first == 0.0  # unknown at the first log point
    assert len(rates) == 3
    assert all(0.1 < rate < 1e5 for rate in rates)


def test_latest_checkpoint_is_chosen_by_step_not_by_file_time(tmp_path: Path) -> None:
    now = time.time()
    for step in (9, 10, 100):
        path = checkpoint.save_step(tmp_path, step, {"step": step, "w": torch.zeros(2)})
        then = now - step * YEAR / 10
        os.utime(path, (then, then))
    names = ["step_00000010.safetensors", "step_00000100.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[1]["step"] == 100


@pytest.mark.parametrize("jump", [-YEAR, YEAR])
def test_watch_measures_the_time_since_the_last_line_with_its_own_clock(
    jump: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"method": "byol", "train": {"batch_size": 8, "steps": 3}}
    (tmp_path / "config.json").write_text(config_text(settings))
    lines: list[dict[str, float]] = [{"step": 1, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text(metrics_text(lines))
    now, frames = [5.0], [(50.0, 0), (30.0, 0), (7.0, 2), (9.0, 0), (2.0, 3)]  # seconds, new step

    def wait(_: float) -> None:
        monkeypatch.setattr(time, "time", Jumping(jump))
        seconds, step = frames.pop(0)
        now[0] += seconds
        if step:
            lines.append({"step": step, "loss": 1.0})
            (tmp_path / "metrics.jsonl").write_text(metrics_text(lines))

    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    watch(tmp_path, console=console, sleep=wait, clock=lambda: now[0])
    drawn = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    shown = [part.split(" ago")[0] for part in drawn.split("last update ")[1:]]
    assert list(dict.fromkeys(shown)) == ["0 s", "50 s", "1 min", "9 s"]
    assert frames == []

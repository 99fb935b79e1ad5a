"""Temporarily missing image folders, and processes of a run that are killed."""

import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny import CHANGES, photos, silent, sorted_photos, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.data import source as source_module
from compressive.data.decode import Unreadable
from compressive.data.loaders import Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.source import DataUnavailable
from compressive.data.sources import open_source
from compressive.train.loop import pretrain


@pytest.mark.slow
@pytest.mark.parametrize("leaves_mount_point", [False, True])
def test_temporarily_missing_folder_makes_no_image_unreadable(
    leaves_mount_point: bool, tmp_path: Path
) -> None:
    folder, away = photos(tmp_path / "photos", 8), tmp_path / "away"
    source, index = open_source(folder), torch.arange(8)
    expected = [source.image(i) for i in range(8)]
    folder.rename(away)
    if leaves_mount_point:
        folder.mkdir()
    threading.Timer(0.5, lambda: away.rename(folder)).start()
    with Streaming(source, side=40, device="cpu", workers=2) as loader:
        (batch,) = loader.batches([BatchIndices(index, torch.zeros_like(index))])
        assert loader.bad == []
    assert batch.index.tolist() == index.tolist()
    for image, height, width, whole in zip(*batch[:3], expected, strict=True):
        assert torch.equal(image[:, :height, :width], whole)


def test_permanently_missing_folder_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(source_module.time, "sleep", waited.append)
    folder = photos(tmp_path / "photos", 8)
    source = open_source(folder)
    folder.rename(tmp_path / "away")
    with pytest.raises(DataUnavailable) as found:
        source.image(0)
    assert found.value.errno == errno.ENOENT
    assert str(found.value.strerror).startswith(
        f"{folder} has been unavailable for 31 seconds (No such"
    )
    assert waited == [0.1, 1.0, 2.0, 4.0, 8.0, 16.0]
    with pytest.raises(DataUnavailable):
        pretrain(tiny(), tmp_path / "run", source=source, display=silent())


def test_deleted_file_is_unreadable_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module.time, "sleep", None)
    source = open_source(photos(tmp_path, 3))
    (tmp_path / "001.png").unlink()
    with pytest.raises(Unreadable, match="No such file"):
        source.image(1)


@pytest.mark.parametrize("line", ["pretrain builtin", "evaluate x", "embed x builtin"])
def test_non_numeric_world_size_gives_a_one_line_error(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "x")
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2, result.output
    assert result.stderr == (
        "error: WORLD_SIZE must be a whole number, got 'x' in the environment; start with "
        "torchrun, or run `unset WORLD_SIZE`\n"
    )


@pytest.mark.stress
@pytest.mark.distributed
def test_killed_process_makes_the_others_exit_with_one_line(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [*CHANGES, "train.steps=100000", "train.precision=float32", "train.save_every=99"]
    words = [sys.executable, "-m", "compressive", "pretrain", str(sorted_photos())]
    words += [word for change in settings for word in ("--set", change)]
    words += ["--out", str(tmp_path / "run")]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            words,
            env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        metrics, start = tmp_path / "run/metrics.jsonl", time.monotonic()
        while not (metrics.exists() and metrics.read_text().count("\n") > 3):
            assert time.monotonic() - start < 120
            assert processes[0].poll() is None, processes[0].communicate()[1]
            time.sleep(0.2)
        processes[1].send_signal(signal.SIGKILL)
        _, stderr = processes[0].communicate(timeout=60)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert errors[0].startswith("error: another process of this run ended or does not answer (")
    assert "Traceback" not in stderr
    assert processes[0].returncode == 1

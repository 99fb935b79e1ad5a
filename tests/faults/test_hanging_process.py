"""If a process hangs, the others exit with a one-line error after a time limit."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from launched import free_port, pretrain_words, stop_all, wait_for_step

from compressive.cli.terminal import one_line_errors
from compressive.watchdog.limits import (
    COLLECTIVE_TIMEOUT,
    SILENCE_TIMEOUT,
    collective_timeout,
    silence_timeout,
)


@pytest.mark.parametrize(
    ("name", "limit", "default"),
    [(COLLECTIVE_TIMEOUT, collective_timeout, 1800), (SILENCE_TIMEOUT, silence_timeout, 120)],
)
def test_time_limits_come_from_the_environment(
    name: str, limit: Callable[[], int], default: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name, raising=False)
    assert limit() == default
    monkeypatch.setenv(name, "45")
    assert limit() == 45
    for text in ("2", "-5", "1e3", "half an hour"):
        monkeypatch.setenv(name, text)
        with pytest.raises(ValueError, match=f"{name} must be .* got '{text}'"):
            limit()


@pytest.mark.parametrize(
    "text",
    [
        "Application timeout caused pair closure",
        "Timed out waiting 5000ms for recv operation to complete",
        "Connection closed by peer [127.0.0.1]:42645. This is typically caused by a crash",
        "[/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting",
        "Socket closed [127.0.0.1]:42645",
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    ],
)
def test_errors_of_gloo_and_nccl_are_printed_as_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left, one_line_errors():
        raise RuntimeError(f"{text}\nmore")
    assert left.value.exit_code == 1
    line = capsys.readouterr().err
    assert line.startswith("error: another process of this run ended or does not answer (")
    assert line.endswith("; its own output says why; run the same command to resume\n")
    assert line.count("\n") == 1


def test_other_runtime_errors_keep_their_traceback() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), one_line_errors():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 8x16)")


def waiting_process(
    tmp_path: Path, hanging: int, number: signal.Signals, limits: dict[str, str]
) -> tuple[float, str]:
    """Signal one of two processes; return the seconds until the other exits and its error."""
    words = [sys.executable, "-m", "compressive"]
    words += pretrain_words(tmp_path / "run", "train.steps=100000")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs: list[subprocess.Popen[str]] = []
    for rank in "01":
        own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        with (tmp_path / rank).open("w") as log:
            job = subprocess.Popen(
                words, env=os.environ | shared | own | limits, stdout=log, stderr=log, text=True
            )
        jobs.append(job)
    try:
        wait_for_step(tmp_path / "run", 3, jobs[0])
        jobs[hanging].send_signal(number)
        begin = time.monotonic()
        assert jobs[1 - hanging].wait(60) == 1
        seconds = time.monotonic() - begin
    finally:
        for job in jobs:
            stop_all(job)
    output = (tmp_path / str(1 - hanging)).read_text()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert errors[0].startswith("error: another process of this run ended or does not answer (")
    assert "Traceback" not in output
    return seconds, errors[0]


@pytest.mark.stress
@pytest.mark.distributed
@pytest.mark.parametrize("hanging", [0, 1])
def test_frozen_process_makes_the_other_exit_with_one_line(hanging: int, tmp_path: Path) -> None:
    """The limit of collectives is not reached: the other notices that heartbeats are missing."""
    limits = {SILENCE_TIMEOUT: "5"}
    seconds, error = waiting_process(tmp_path, hanging, signal.SIGSTOP, limits)
    assert 4 < seconds < 30
    assert f"rank {hanging} on " in error  # rank 0 also holds the store
    assert re.search(rf"rank {1 - hanging} waits in [a-z -]+ of step \d+", error)


@pytest.mark.stress
@pytest.mark.distributed
@pytest.mark.parametrize("hanging", [0, 1])
def test_collective_timeout_names_the_silent_rank(hanging: int, tmp_path: Path) -> None:
    seconds, error = waiting_process(tmp_path, hanging, signal.SIGSTOP, {COLLECTIVE_TIMEOUT: "5"})
    assert 4 < seconds < 30
    assert f"rank {hanging} on " in error


@pytest.mark.stress
@pytest.mark.distributed
def test_killed_process_is_named(tmp_path: Path) -> None:
    seconds, error = waiting_process(tmp_path, 1, signal.SIGKILL, {})
    assert seconds < 20
    assert re.search(r"rank 1 on \S+ has been silent for \d+ s, last in .* of step \d+", error)

"""If a process hangs, the others exit with a one-line error after a time limit."""

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import typer
from launched import free_port, pretrain_words, stop_all, wait_for_step

from compressive import distributed
from compressive.cli.terminal import one_line_errors

# The command line with a shorter time limit.
PROGRAM = """
import datetime, sys
from compressive import distributed
from compressive.cli.app import app
distributed.TIMEOUT = datetime.timedelta(seconds=5)
app()
"""


def test_processes_wait_half_an_hour_for_each_other() -> None:
    assert timedelta(minutes=30) == distributed.TIMEOUT


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


@pytest.mark.stress
@pytest.mark.distributed
@pytest.mark.parametrize("hanging", [0, 1])
def test_hanging_process_makes_the_other_exit_with_one_line(hanging: int, tmp_path: Path) -> None:
    words = [sys.executable, "-c", PROGRAM]
    words += pretrain_words(tmp_path / "run", "train.steps=100000")
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs: list[subprocess.Popen[str]] = []
    for rank in "01":
        own = {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": "1"}
        with (tmp_path / rank).open("w") as log:
            job = subprocess.Popen(
                words, env=os.environ | shared | own, stdout=log, stderr=log, text=True
            )
        jobs.append(job)
    try:
        wait_for_step(tmp_path / "run", 3, jobs[0])
        jobs[hanging].send_signal(signal.SIGSTOP)
        assert jobs[1 - hanging].wait(30) == 1
    finally:
        for job in jobs:
            stop_all(job)
    output = (tmp_path / str(1 - hanging)).read_text()
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert errors[0].startswith("error: another process of this run ended or does not answer (")
    assert "Traceback" not in output

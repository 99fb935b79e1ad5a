"""The Slurm script with a real torchrun: time limit, preemption, and resuming afterwards."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import last_step, ranks, setting_words, stop_all, wait_for_step
from tiny import differences, journal, last, sorted_photos

SCRIPT = Path(__file__).parents[2] / "docs" / "pretrain.slurm"
SRUN = """#!/bin/bash
for _ in $(seq 2 $SLURM_NNODES); do "$@" & done
exec "$@"
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> requeued.txt; fi
"""
STEPS = 30


def slurm(folder: Path, out: Path, *, machines: int = 1) -> subprocess.Popen[str]:
    """Start two processes with the script in a folder with fakes of Slurm's programs."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    cluster = {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_NNODES": str(machines),
        "SLURM_GPUS_ON_NODE": str(2 // machines),
        "SLURM_JOB_ID": str(os.getpid()),  # determines the port
    }
    words = [SCRIPT, sorted_photos(), "c-simclr/quickstart", out]
    words += setting_words(f"train.steps={STEPS}")
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            words, cwd=folder, env=os.environ | cluster, stdout=log, stderr=log, text=True
        )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that the script trained without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    job = slurm(folder, folder / "run")
    try:
        assert job.wait(120) == 0, (folder / "log").read_text()
    finally:
        stop_all(job)
    assert not (folder / "requeued.txt").exists()
    return folder / "run"


@pytest.mark.stress
@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_interrupted_job_saves_and_the_next_one_finishes_it(
    number: signal.Signals, whole: Path, tmp_path: Path
) -> None:
    """Slurm sends SIGUSR1 before the time limit, and SIGTERM if it preempts the job."""
    out, log = tmp_path / "run", tmp_path / "log"
    job = slurm(tmp_path, out)
    try:
        wait_for_step(out, 7, job)
        job.send_signal(number)
        code = job.wait(60)
    finally:
        stop_all(job)
    stopped = last(out)["step"]
    assert 7 <= stopped < STEPS
    assert f"stopped and saved at step {stopped} of {STEPS} in {out}; run" in log.read_text()
    if number == signal.SIGUSR1:
        assert code == 0, log.read_text()
        assert (tmp_path / "requeued.txt").read_text() == f"requeue {os.getpid()}\n"
    else:
        assert code != 0  # Slurm requeues a preempted job, but not a canceled one
        assert not (tmp_path / "requeued.txt").exists()

    job = slurm(tmp_path, out)
    try:
        assert job.wait(120) == 0, log.read_text()
    finally:
        stop_all(job)
    assert f"resuming from step {stopped} of {STEPS}" in log.read_text()
    assert last_step(out) == STEPS
    assert differences(last(whole), last(out)) == []
    assert journal(whole) == journal(out)


@pytest.mark.stress
@pytest.mark.distributed
def test_killed_processes_of_two_machines_are_restarted(whole: Path, tmp_path: Path) -> None:
    """Two torchruns simulate two machines; the process of each is killed once."""
    out, log = tmp_path / "run", tmp_path / "log"
    job = slurm(tmp_path, out, machines=2)
    try:
        for kill in range(2):
            wait_for_step(out, 5 + 10 * kill, job)
            os.kill(ranks(job.pid)[kill], signal.SIGKILL)
        assert job.wait(240) == 0, log.read_text()
    finally:
        stop_all(job)
    assert log.read_text().count("resuming from step") == 2
    assert differences(last(whole), last(out)) == []
    assert journal(whole) == journal(out)

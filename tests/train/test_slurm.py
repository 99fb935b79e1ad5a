"""The Slurm script starts the documented command, saves before the time limit and requeues."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "pretrain.slurm"
# Stand-ins for Slurm's programs, which record their arguments.
SRUN = """#!/bin/bash
printf '%s\\n' "$@" > srun.txt
trap "echo saved > saved.txt; exit 143" TERM
for _ in $(seq $WAIT); do sleep 0.05; done
exit $CODE
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then seq 7 9999 | sed s/^/node/; else echo "$@" >> requeued.txt; fi
"""
WORDS = ["/data/imagenet", "c-byol/imagenet-r50-300", "runs/a b", "--seed", "1"]


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_JOB_ID": "123",
        "WAIT": "0",
        "CODE": "0",
    }


def test_every_node_starts_the_same_command(tmp_path: Path, cluster: dict[str, str]) -> None:
    subprocess.run([SCRIPT, *WORDS], cwd=tmp_path, env=cluster, check=True)
    given = (tmp_path / "srun.txt").read_text().splitlines()
    start = given.index("-m")
    assert given[start:] == [
        *("-m", "compressive", "pretrain", "/data/imagenet"),
        *("--recipe", "c-byol/imagenet-r50-300", "--out", "runs/a b", "--seed", "1"),
    ]
    options = dict(zip(given[1:start:2], given[2:start:2], strict=True))
    assert given[0] == "torchrun"
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--max-restarts": "3",
        "--rdzv-id": "123",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "node7:20123",
    }
    assert not (tmp_path / "requeued.txt").exists()


def test_failed_run_is_not_requeued(tmp_path: Path, cluster: dict[str, str]) -> None:
    done = subprocess.run([SCRIPT, *WORDS], cwd=tmp_path, env=cluster | {"CODE": "2"})
    assert done.returncode == 2
    assert not (tmp_path / "requeued.txt").exists()


def stopped(folder: Path, cluster: dict[str, str], *numbers: signal.Signals) -> int:
    """Send signals to the script during its run; return its exit code."""
    job = subprocess.Popen([SCRIPT, *WORDS], cwd=folder, env=cluster | {"WAIT": "1000"})
    until = time.monotonic() + 30
    while not (folder / "srun.txt").exists() and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.3)  # wait until both have set their traps
    for number in numbers:
        job.send_signal(number)
        time.sleep(0.02)
    return job.wait(30)


def test_time_limit_saves_and_requeues(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert stopped(tmp_path, cluster, signal.SIGUSR1) == 0
    assert (tmp_path / "saved.txt").read_text() == "saved\n"
    assert (tmp_path / "requeued.txt").read_text() == "requeue 123\n"


def test_preempted_job_saves_and_is_left_to_slurm(tmp_path: Path, cluster: dict[str, str]) -> None:
    assert stopped(tmp_path, cluster, signal.SIGTERM) == 143
    assert (tmp_path / "saved.txt").read_text() == "saved\n"
    assert not (tmp_path / "requeued.txt").exists()


def test_later_signals_do_not_interrupt_the_save(tmp_path: Path, cluster: dict[str, str]) -> None:
    slow = SRUN.replace("echo saved", "trap '' TERM; sleep 0.5; echo saved")
    (tmp_path / "srun").write_text(slow)
    assert stopped(tmp_path, cluster, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM) == 0
    assert (tmp_path / "saved.txt").read_text() == "saved\n"
    assert (tmp_path / "requeued.txt").read_text() == "requeue 123\n"


def test_run_that_finished_is_not_requeued(tmp_path: Path, cluster: dict[str, str]) -> None:
    (tmp_path / "srun").write_text(SRUN.replace("exit 143", "exit 0"))
    assert stopped(tmp_path, cluster, signal.SIGUSR1) == 0
    assert (tmp_path / "saved.txt").read_text() == "saved\n"
    assert not (tmp_path / "requeued.txt").exists()


def test_missing_arguments_print_the_usage(tmp_path: Path, cluster: dict[str, str]) -> None:
    done = subprocess.run(
        [SCRIPT, "/data"], cwd=tmp_path, env=cluster, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "usage: sbatch pretrain.slurm IMAGES RECIPE OUT" in done.stderr
    assert not (tmp_path / "srun.txt").exists()

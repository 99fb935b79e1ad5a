"""Processes under torchrun train into a folder on S3, are killed, restarted and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import last_step, pretrain_words, ranks, stop_all, wait_for_step
from s3_server import BUCKET, S3, call, environment, running_server
from tiny import differences, journal, last

from compressive.rundir.stored_output import local_copy

s3 = pytest.fixture(running_server)
STEPS = 40
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", "3", "-m", "compressive"]
ADDRESS = f"s3://{BUCKET}/runs/restarted"


@pytest.mark.stress
@pytest.mark.distributed
def test_killed_processes_resume_a_run_on_storage(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill each rank once; end with the weights of a local run, on this and another machine."""
    for name, value in (environment(s3, tmp_path / "cache") | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    words = pretrain_words(tmp_path / "whole", f"train.steps={STEPS}")
    subprocess.run([*TORCHRUN, *words], check=True, timeout=300)

    words = [*TORCHRUN, *words[:-1], ADDRESS]
    run, log = local_copy(ADDRESS), tmp_path / "log"
    with log.open("w") as file:
        job = subprocess.Popen(words, stdout=file, stderr=file, text=True)
    try:
        for killed in (0, 1):
            wait_for_step(run, 8 + 12 * killed, job)
            os.kill(ranks(job.pid)[killed], signal.SIGKILL)
            until = time.monotonic() + 120
            while log.read_text().count("resuming from step") <= killed:
                assert job.poll() is None, log.read_text()
                assert time.monotonic() < until, log.read_text()
                time.sleep(0.05)
        assert job.wait(300) == 0, log.read_text()
    finally:
        stop_all(job)
    assert last_step(run) == STEPS
    assert differences(last(tmp_path / "whole"), last(run)) == []
    assert journal(tmp_path / "whole") == journal(run)
    listing = call(s3, "GET", f"/{BUCKET}?list-type=2&prefix=runs/restarted/").decode()
    for path in run.rglob("*"):
        if path.is_file():
            assert f"<Key>runs/restarted/{path.relative_to(run)}</Key>" in listing
    # Another machine downloads the run and finds that it is finished.
    there = os.environ | {"COMPRESSIVE_CACHE": str(tmp_path / "elsewhere")}
    done = subprocess.run(words, env=there, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"already finished: all {STEPS} steps are done" in done.stdout + done.stderr

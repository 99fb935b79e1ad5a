"""A run whose processes are killed and restarted by torchrun reaches the same weights."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import last_step, pretrain_words, ranks, stop_all, wait_for_step
from tiny import differences, journal, last

KILLS = 10
STEPS = 36
EARLY = 5  # kill as soon as the process has started
RESUMING = "resuming from step"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TORCHRUN += ["--max-restarts", str(KILLS), "-m", "compressive"]


@pytest.mark.stress
@pytest.mark.distributed
def test_a_run_survives_ten_kills_bitwise(tmp_path: Path) -> None:
    """Kill each rank in turn at different steps, and once before torch is imported."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    words = [*TORCHRUN, *pretrain_words(tmp_path / "whole", f"train.steps={STEPS}")]
    subprocess.run(words, env=environment, check=True, timeout=300)

    out = tmp_path / "killed"
    words = [*TORCHRUN, *pretrain_words(out, f"train.steps={STEPS}")]
    log = tmp_path / "log"
    killed: set[int] = set()
    with log.open("w") as file:
        job = subprocess.Popen(words, env=environment, stdout=file, stderr=file, text=True)
    try:
        for kill in range(KILLS):
            while kill % 2 not in (found := ranks(job.pid)) or found[kill % 2] in killed:
                assert job.poll() is None, log.read_text()
                time.sleep(0.02)
            if kill != EARLY:
                resumed = kill - (kill > EARLY)
                while log.read_text().count(RESUMING) < resumed:  # metrics are of this start then
                    assert job.poll() is None, log.read_text()
                    time.sleep(0.02)
                wait_for_step(out, 3 * kill + 2, job)
            os.kill(found[kill % 2], signal.SIGKILL)
            killed |= set(found.values())
        assert job.wait(300) == 0, log.read_text()
    finally:
        stop_all(job)
    assert log.read_text().count(RESUMING) == KILLS - 1
    assert last_step(out) == STEPS
    assert differences(last(tmp_path / "whole"), last(out)) == []
    assert journal(tmp_path / "whole") == journal(out)

"""Machines join and leave a run under `torchrun --nnodes MIN:MAX`; the global batch stays."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launched import free_port, last_step, pretrain_words, ranks, stop_all, wait_for_step
from tiny import differences, journal, last

STEPS = 300
ELASTIC = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
    "COMPRESSIVE_SPARE_PROCESSES": "wait",
}


class Cluster:
    """torchrun agents on the loopback interface; each is a machine with `processes` processes."""

    def __init__(self, folder: Path, *changes: str, nodes: str = "1:2", processes: int = 1) -> None:
        self.out: Path = folder / "run"
        self.log: Path = folder / "log"
        self.words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        self.words += ["--nproc-per-node", str(processes), "--max-restarts", "20"]
        self.words += ["--rdzv-backend", "c10d", "--rdzv-id", "test"]
        self.words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        self.words += ["--rdzv-conf", "last_call_timeout=2", "-m", "compressive"]
        self.words += pretrain_words(self.out, f"train.steps={STEPS}", *changes)
        self.agents: list[subprocess.Popen[str]] = []

    def join(self) -> subprocess.Popen[str]:
        with self.log.open("a") as file:
            agent = subprocess.Popen(
                self.words, env=os.environ | ELASTIC, stdout=file, stderr=file, text=True
            )
        self.agents.append(agent)
        return agent

    def wait_for_processes(self, count: int, seconds: float = 90) -> None:
        """Wait until a start with this many processes has made a few steps."""
        until = time.monotonic() + seconds
        while worlds(self.log)[-1:] != [count]:
            assert self.agents[0].poll() is None, self.log.read_text()
            assert time.monotonic() < until, (worlds(self.log), self.log.read_text()[-3000:])
            time.sleep(0.05)
        wait_for_step(self.out, last_step(self.out) + 5, self.agents[0])


def worlds(log: Path) -> list[int]:
    """Return the number of processes of each start that a log shows."""
    found = re.findall(r"float32(?:, (\d+) processes)?$", log.read_text(), re.MULTILINE)
    return [int(count or 1) for count in found]


@contextmanager
def cluster(
    folder: Path, *changes: str, nodes: str = "1:2", processes: int = 1
) -> Iterator[Cluster]:
    made = Cluster(folder, *changes, nodes=nodes, processes=processes)
    try:
        yield made
    finally:
        for agent in made.agents:
            stop_all(agent)


@pytest.mark.stress
@pytest.mark.distributed
def test_machine_joins_and_leaves(tmp_path: Path) -> None:
    """A second torchrun joins, leaves on SIGTERM, joins again and is killed without warning."""
    with cluster(tmp_path) as nodes:
        first = nodes.join()
        nodes.wait_for_processes(1)
        second = nodes.join()
        nodes.wait_for_processes(2)
        second.send_signal(signal.SIGTERM)
        nodes.wait_for_processes(1)
        third = nodes.join()
        nodes.wait_for_processes(2)
        for process in (third.pid, *ranks(third.pid).values()):
            os.kill(process, signal.SIGKILL)
        nodes.wait_for_processes(1)
        assert first.wait(240) == 0, nodes.log.read_text()
    assert worlds(nodes.log) == [1, 2, 1, 2, 1]
    assert last_step(nodes.out) == STEPS
    lines = [line["step"] for line in journal(nodes.out) if "loss" in line]
    assert lines == list(range(1, STEPS + 1))


@pytest.mark.stress
@pytest.mark.distributed
def test_processes_that_do_not_divide_the_batch_wait(tmp_path: Path) -> None:
    """With three processes and 8 images two train, and end with the weights of two processes."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

    def train(out: Path, processes: int, spare: str) -> subprocess.CompletedProcess[str]:
        own = {"OMP_NUM_THREADS": "1", "COMPRESSIVE_SPARE_PROCESSES": spare}
        command = [*words, str(processes), "-m", "compressive"]
        command += pretrain_words(out, "train.steps=6")
        settings = {"env": os.environ | own, "capture_output": True, "text": True, "timeout": 200}
        return subprocess.run(command, **settings)

    refused = train(tmp_path / "refused", 3, "refuse")
    assert refused.returncode == 1
    lines = [line for line in refused.stderr.splitlines() if "train.batch_size must be" in line]
    assert len(lines) == 3
    assert all("start 2 processes" in line for line in lines)
    assert 'Traceback (most recent call last):\n  File "/' not in refused.stderr.split("error:")[0]
    assert not (tmp_path / "refused" / "metrics.jsonl").exists()

    done = train(tmp_path / "three", 3, "wait")
    assert done.returncode == 0, done.stderr
    assert "note: 2 of 3 processes train and 1 wait" in done.stdout
    assert train(tmp_path / "two", 2, "wait").returncode == 0
    assert differences(last(tmp_path / "two"), last(tmp_path / "three")) == []
    assert journal(tmp_path / "two") == journal(tmp_path / "three")

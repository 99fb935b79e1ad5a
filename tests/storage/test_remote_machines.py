"""Runs on S3 over several torchruns, each with a local folder of its own; machines are lost."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import free_port, last_step, pretrain_words, stop_all
from s3_server import BUCKET, S3, call, environment, running_server
from tiny import differences, journal

from compressive.rundir import checkpoint
from compressive.rundir.sharded_checkpoint import load_shards
from compressive.rundir.stored_output import local_copy
from compressive.storage.mirror import Mirror

s3 = pytest.fixture(running_server)
pytestmark = [pytest.mark.stress, pytest.mark.distributed]
PARALLEL = ["ddp"] + ["fsdp"] * (tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
PACED = Path(__file__).parents[1] / "paced_training.py"
STEPS = 80


class Machines:
    """torchruns on the loopback interface; each has a cache, and so a local folder, of its own."""

    def __init__(self, s3: S3, folder: Path, name: str, nodes: str, *changes: str) -> None:
        self.s3, self.folder = s3, folder
        self.prefix = f"runs/{name}"
        self.address = f"s3://{BUCKET}/{self.prefix}"
        self.log = folder / "log"
        self.nodes = nodes
        self.arguments = [*pretrain_words(folder, f"train.steps={STEPS}", *changes)[:-1]]
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self.new_job()

    def new_job(self) -> None:
        self.words = [*TORCHRUN, "--nnodes", self.nodes, "--nproc-per-node", "1"]
        self.words += ["--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        self.words += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        self.words += ["--rdzv-conf", "last_call_timeout=2", str(PACED)]
        self.words += [*self.arguments, self.address]

    def join(self, machine: str) -> None:
        more = environment(self.s3, self.folder / machine) | {
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "60",
        }
        with self.log.open("a") as file:
            settings: dict[str, Any] = {"env": os.environ | more, "stdout": file, "stderr": file}
            self.agents[machine] = subprocess.Popen(self.words, text=True, **settings)

    def kill(self, machine: str) -> None:
        """Kill a torchrun and its processes without warning."""
        stop_all(self.agents.pop(machine))

    def local(self, machine: str) -> Path:
        before = os.environ.get("COMPRESSIVE_CACHE")
        os.environ["COMPRESSIVE_CACHE"] = str(self.folder / machine)
        try:
            return local_copy(self.address)
        finally:
            os.environ.pop("COMPRESSIVE_CACHE")
            if before is not None:
                os.environ["COMPRESSIVE_CACHE"] = before

    def stored_step(self) -> int:
        """Return the step of the last checkpoint on storage."""
        path = f"/{BUCKET}?list-type=2&max-keys=1000&prefix={self.prefix}/checkpoints/"
        found = re.findall(r"step_(\d+)\.safetensors</Key>", call(self.s3, "GET", path).decode())
        return max(map(int, found), default=0)

    def wait(self, condition: Callable[[], object], seconds: float = 240) -> None:
        until = time.monotonic() + seconds
        while not condition():
            ended = [code for each in self.agents.values() if (code := each.poll()) is not None]
            assert not ended, self.log.read_text()[-5000:]
            assert time.monotonic() < until, self.log.read_text()[-5000:]
            time.sleep(0.05)

    def count(self, text: str) -> int:
        return self.log.read_text().count(text) if self.log.exists() else 0

    def finish(self) -> None:
        for agent in self.agents.values():
            assert agent.wait(300) == 0, self.log.read_text()[-5000:]
        self.agents.clear()


@contextmanager
def machines(*arguments: Any) -> Iterator[Machines]:
    made = Machines(*arguments)
    try:
        yield made
    finally:
        for agent in made.agents.values():
            stop_all(agent)


def whole_state(run: Path) -> dict[str, Any]:
    """Return the last checkpoint in a folder with whole tensors."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    state = load_shards(*found, "cpu", sharded=False)
    assert state.pop("run_id")
    return state


@pytest.mark.parametrize("parallel", PARALLEL)
def test_lost_machines_are_replaced_by_empty_ones(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: str
) -> None:
    """Lose the second machine, then both; end with the weights of an uninterrupted local run."""
    change = f"train.parallel={parallel}"
    words = pretrain_words(tmp_path / "whole", f"train.steps={STEPS}", change)
    alone = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "compressive", *words]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    subprocess.run(alone, check=True, timeout=400)

    with machines(s3, tmp_path, f"lost-{parallel}", "2", change) as nodes:
        nodes.join("a")
        time.sleep(1)  # the first one holds the rendezvous
        nodes.join("b")
        nodes.wait(lambda: nodes.stored_step() > 0)
        nodes.kill("b")
        nodes.join("c")  # with an empty folder
        nodes.wait(lambda: nodes.count("resuming from step") == 1)
        before = nodes.stored_step()
        nodes.wait(lambda: nodes.stored_step() > before)
        for machine in ("a", "c"):
            nodes.kill(machine)
        assert 0 < nodes.stored_step() < STEPS
        nodes.new_job()
        nodes.join("d")
        nodes.join("e")
        nodes.wait(lambda: nodes.count("resuming from step") == 2)
        nodes.finish()
        first = [m for m in ("d", "e") if last_step(nodes.local(m)) == STEPS]
        assert len(first) == 1  # only one machine has the metrics
        address, run = nodes.address, nodes.local(first[0])
    resumed = [int(n) for n in re.findall(r"resuming from step (\d+)", nodes.log.read_text())]
    assert all(step > 0 for step in resumed)
    for name, value in environment(s3, tmp_path / "reader").items():
        monkeypatch.setenv(name, value)
    mirror = Mirror(address, tmp_path / "downloaded")
    mirror.pull(mirror.objects())
    names = [p.relative_to(run) for p in sorted(run.rglob("*")) if p.is_file()]
    assert names
    for name in names:
        assert (run / name).read_bytes() == (tmp_path / "downloaded" / name).read_bytes()
    found = whole_state(tmp_path / "downloaded")
    assert differences(whole_state(tmp_path / "whole"), found) == []
    assert journal(tmp_path / "whole") == journal(tmp_path / "downloaded")
    if parallel == "fsdp":
        assert len(list((tmp_path / "downloaded/checkpoints").glob(f"*{STEPS}.*.shards/*"))) == 2


def test_machines_with_their_own_folders_join_and_leave(s3: S3, tmp_path: Path) -> None:
    """A second machine joins and leaves on request; no step is lost."""
    with machines(s3, tmp_path, "elastic", "1:2") as nodes:
        nodes.join("a")
        nodes.wait(lambda: last_step(nodes.local("a")) > 5)
        nodes.join("b")
        nodes.wait(lambda: nodes.count(", 2 processes") == 1)
        nodes.wait(lambda: nodes.count("resuming from step") == 1)
        time.sleep(2)
        nodes.agents["b"].send_signal(signal.SIGTERM)
        leaving = nodes.agents.pop("b")
        nodes.wait(lambda: nodes.count("resuming from step") == 2)
        leaving.wait(60)
        nodes.finish()
        run = nodes.local("a")
    assert last_step(run) == STEPS
    lines = [line["step"] for line in journal(run) if "loss" in line]
    assert lines == list(range(1, STEPS + 1))
    resumed = re.findall(r"resuming from step (\d+)", nodes.log.read_text())
    stopped = re.findall(r"stopped at step (\d+)", nodes.log.read_text())
    assert [int(step) for step in resumed] == sorted(map(int, resumed))
    assert nodes.stored_step() == STEPS, (resumed, stopped)

"""Runs that share a device: how many, with which memory, and that each is what it is alone."""

import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from run_files import record, results_text
from tiny import CHANGES, Written, silent, sorted_photos

from compressive.rundir.fingerprint import file_fingerprint
from compressive.sweep.packing import (
    GpuMemory,
    Packing,
    gpu_memory,
    gpu_sharing,
    needs_gpu_alone,
    parse_at_once,
)
from compressive.sweep.processes import Processes, Slot, last_line
from compressive.sweep.runner import sweep

GB = 10**9


@pytest.mark.parametrize(("text", "count"), [("auto", None), ("1", 1), (3, 3), (" 2 ", 2)])
def test_number_of_runs_is_read(text: str | int, count: int | None) -> None:
    assert parse_at_once(text) == count


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", 0])
def test_invalid_number_of_runs_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError, match=r"--at-once.*auto") as error:
        parse_at_once(text)
    assert repr(text) in str(error.value)


class SimulatedGpu:
    """A GPU whose runs need `each` bytes, and whose throughput saturates at `most` images/s."""

    def __init__(self, each: float, most: float, alone: float = 100.0, other: float = 0.0) -> None:
        self.each, self.most, self.alone, self.other, self.running = each, most, alone, other, 0
        self.said: list[str] = []

    def memory(self) -> GpuMemory:
        return GpuMemory(int(GB * (self.other + self.running * self.each)), 100 * GB)

    def final_number(self, runs: int = 20, cores: int = 64) -> int:
        """Return the number of runs at a time after a while."""
        packing = Packing(None, runs, self.memory, self.said.append, cores)
        assert packing.limit == 1
        for line in range(60):
            self.running = min(runs, packing.limit)
            rate = min(self.alone * self.running, self.most) / max(1, self.running)
            packing.update({str(i): (line, rate) for i in range(self.running)})
        return packing.limit


@pytest.mark.parametrize(
    ("gpu", "count"),
    [
        (SimulatedGpu(each=1, most=450), 5),  # the fifth adds 12 %, the sixth nothing
        (SimulatedGpu(each=1, most=101), 2),  # one run starts while another one trains
        (SimulatedGpu(each=1, most=90), 2),
        (SimulatedGpu(each=25, most=900), 3),  # 4 * 25 * 1.1 GB do not fit
        (SimulatedGpu(each=25, most=900, other=30), 2),
        (SimulatedGpu(each=50, most=900), 1),
    ],
)
def test_runs_are_added_while_memory_and_throughput_permit(gpu: SimulatedGpu, count: int) -> None:
    assert gpu.final_number() == count
    assert f"now {count} at a time" in gpu.said[-1]
    assert all("\n" not in text for text in gpu.said)


def test_packing_that_slows_all_runs_down_is_reverted() -> None:
    gpu = SimulatedGpu(each=1, most=900)
    packing = Packing(None, 9, gpu.memory, cores=64)
    for line in range(2):
        packing.update({"a": (line, 100.0)})
    assert packing.limit == 2
    for line in range(2, 5):
        packing.update({"a": (line, 45.0), "b": (line, 45.0)})
    assert packing.limit == 1


def test_packing_is_bounded_by_cores_and_runs() -> None:
    assert SimulatedGpu(each=1, most=900).final_number(cores=6) == 3
    assert SimulatedGpu(each=1, most=900).final_number(runs=2) == 2
    assert SimulatedGpu(each=1, most=900).final_number(cores=1) == 1


def test_nothing_is_decided_before_every_run_was_measured() -> None:
    """A run that compiles or evaluates has no throughput, and that of the others is higher."""
    gpu = SimulatedGpu(each=1, most=900)
    packing = Packing(None, 9, gpu.memory, cores=64)
    packing.update({"a": None})
    packing.update({"a": (3, 100.0)})  # includes the compilation
    assert packing.limit == 1
    packing.update({"a": (4, 100.0)})
    assert packing.limit == 2
    for _ in range(3):
        packing.update({"a": (9, 100.0)})
        packing.update({"a": (9, 100.0), "b": None})
        packing.update({"a": (9, 100.0), "b": (1, 100.0)})
    assert packing.limit == 2


def test_without_a_gpu_one_run_is_automatic() -> None:
    packing = Packing(None, 9, lambda: None, cores=64)
    for line in range(9):
        packing.update({"a": (line, 100.0)})
    assert packing.limit == 1
    fixed = Packing(4, 9, SimulatedGpu(each=50, most=1).memory)
    for line in range(9):
        fixed.update({str(i): (line, 1.0) for i in range(4)})
    assert fixed.limit == 4


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)


def test_memory_is_that_of_the_visible_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    script(tmp_path / "nvidia-smi", f'echo "$@" > {tmp_path}/asked; echo "7, 100"')
    asked = tmp_path / "asked"
    assert gpu_memory("auto") == GpuMemory(7 * 2**20, 100 * 2**20)
    assert "-i 0 " in asked.read_text()
    assert gpu_memory("cuda:2") is not None
    assert "-i 2 " in asked.read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-abc")
    assert gpu_memory("cuda:1") is not None
    assert "-i GPU-abc " in asked.read_text()
    assert gpu_memory("cuda:2") is None
    assert gpu_memory("cpu") is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_memory("auto") is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for broken in ("exit 9", "echo No devices were found", "true"):
        script(tmp_path / "nvidia-smi", broken)
        assert gpu_memory("auto") is None
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory("auto") is None


@pytest.mark.parametrize("is_usable", [True, False])
def test_mps_runs_during_the_sweep(
    is_usable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    text = f'echo "$1" "$CUDA_MPS_PIPE_DIRECTORY" >> {log}; [ "$1" = -d ] || cat >> {log}'
    script(tmp_path / "nvidia-cuda-mps-control", text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    monkeypatch.setenv("COMPRESSIVE_COMPILE_AHEAD", "auto")
    said: list[str] = []
    with gpu_sharing(said.append, probe=["sh", "-c", "true" if is_usable else "false"]) as more:
        assert ("CUDA_MPS_PIPE_DIRECTORY" in more) == is_usable
        assert more["COMPRESSIVE_COMPILE_AHEAD"] == "off"  # its memory would be that of a run
        assert len(said) == (0 if is_usable else 1)
        (start,) = log.read_text().splitlines()
        if is_usable:
            assert start == f"-d {more['CUDA_MPS_PIPE_DIRECTORY']}"
            assert Path(more["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert log.read_text().splitlines()[-1] == "quit"
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))  # the user has started it
    with gpu_sharing(said.append) as more:
        assert more == {"COMPRESSIVE_COMPILE_AHEAD": "off"}
    assert log.read_text().count("quit") == 1


@pytest.mark.parametrize(
    ("line", "is_gpu"),
    [
        ("pretrain exited with 1: error: not enough memory on the GPU", True),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", True),
        ("error: network.name is not known, got 'no_such_network'", False),
        ("training failed after 3 restarts: loss is not finite", False),
    ],
)
def test_errors_of_a_full_gpu_are_recognized(line: str, is_gpu: bool) -> None:
    assert needs_gpu_alone(line) == is_gpu


def test_as_many_jobs_run_as_the_limit_permits(tmp_path: Path) -> None:
    processes, running, most = Processes(Packing(2, 5)), set[int](), list[int]()

    def work(job: int, slot: Slot) -> None:
        running.add(job)
        most.append(len(running))
        code = processes.call(["sh", "-c", f"sleep 0.1; echo {job}; exit {job}"], tmp_path / "log")
        running.discard(job)
        assert code == job

    processes.run_all(range(5), work)
    assert max(most) == 2
    assert len(most) == 5
    assert last_line(tmp_path / "log") in "34"


def test_released_slot_lets_the_next_job_start(tmp_path: Path) -> None:
    processes, order = Processes(Packing(1, 2)), list[str]()
    next_started = threading.Event()

    def work(job: int, slot: Slot) -> None:
        order.append(f"start {job}")
        if job:
            next_started.set()
        else:
            slot.release()
            slot.release()
            assert next_started.wait(10)
        order.append(f"end {job}")

    processes.run_all(range(2), work)
    assert order[:2] == ["start 0", "start 1"]
    assert len(order) == 4


def test_exception_of_a_job_is_raised_after_the_others(tmp_path: Path) -> None:
    processes, ended = Processes(Packing(1, 3)), list[int]()

    def work(job: int, slot: Slot) -> None:
        if job == 0:
            raise OSError("disk full")
        ended.append(job)

    with pytest.raises(OSError, match="disk full"):
        processes.run_all(range(3), work)
    assert ended == [1, 2]


def test_stop_ends_all_processes_and_starts_no_other(tmp_path: Path) -> None:
    processes, codes = Processes(Packing(2, 5)), dict[int, int]()
    (tmp_path / "wait.py").write_text(WAIT)

    def work(job: int, slot: Slot) -> None:
        log, words = tmp_path / f"{job}.log", [sys.executable, "-SE", str(tmp_path / "wait.py")]
        codes[job] = processes.call(words, log, seconds=0.05)

    def stop() -> None:
        logs = [tmp_path / f"{job}.log" for job in range(2)]
        while not all(path.exists() and "ready" in path.read_text() for path in logs):
            time.sleep(0.01)
        processes.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    processes.run_all(range(5), work)
    thread.join()
    assert codes == {0: 7, 1: 7}


WAIT = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(7))
print("ready", flush=True)
time.sleep(60)
"""

# Replaces `python -m compressive`: a run fails if another one holds the GPU, as if it were full.
CROWDED = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[-1])
if sys.argv[1] == "evaluate":
    (out / "evaluation").mkdir()
    (out / "evaluation" / "results.json").write_text(RESULTS)
    sys.exit()
gpu = out.parent / "logs" / "gpu"
try:
    os.close(os.open(gpu, os.O_CREAT | os.O_EXCL))
except FileExistsError:
    print("error: CUDA out of memory")
    sys.exit(1)
time.sleep(0.5)
out.mkdir(exist_ok=True)
gpu.unlink()
"""


@pytest.mark.slow
def test_run_that_failed_for_lack_of_memory_is_repeated_alone(tmp_path: Path) -> None:
    results = results_text([record("logistic", "d", "top-1", 0.5)], about={"data": "d"})
    (tmp_path / "program.py").write_text(CROWDED.replace("RESULTS", repr(results)))
    fake: dict[str, Any] = {"program": [sys.executable, "-SE", str(tmp_path / "program.py")]}
    vary, display = ["bottleneck.beta=0,1,2"], Written()
    out = tmp_path / "packed"
    found = sweep("builtin", out, vary=vary, display=display, at_once=3, **fake)
    assert [row.done for row in found.rows] == [1, 1, 1]
    assert not found.failed
    assert sum("repeated alone" in text for text in display.said) == 2
    # Alone the same error is a failure.
    (tmp_path / "alone" / "logs").mkdir(parents=True)
    out = tmp_path / "one"
    stuck = CROWDED.replace(
        "out.parent", repr(tmp_path / "alone").replace("PosixPath", "pathlib.Path")
    )
    (tmp_path / "program.py").write_text(stuck.replace("RESULTS", repr(results)))
    (tmp_path / "alone" / "logs" / "gpu").touch()
    found = sweep("builtin", out, vary=["bottleneck.beta=0"], display=silent(), at_once=1, **fake)
    assert len(found.failed) == 1


@pytest.mark.stress
def test_packed_runs_equal_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real runs on the CPU: weights are bitwise equal, and the tables are the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changes = [*CHANGES, "train.steps=6", "train.precision=float32"]
    given: dict[str, Any] = {"recipe": "c-simclr/quickstart", "changes": changes, "tasks": "knn"}
    found = {}
    for name, at_once in (("alone", "auto"), ("packed", 2)):
        vary = ["bottleneck.beta=0,1"]
        made = sweep(
            str(sorted_photos()),
            tmp_path / name,
            vary=vary,
            at_once=at_once,
            display=silent(),
            **given,
        )
        assert not made.failed
        runs = [tmp_path / name / f"beta{beta}-seed0" for beta in (0, 1)]
        weights = [file_fingerprint(run / "encoder.safetensors") for run in runs]
        found[name] = weights, [(row.setting, row.figures) for row in made.rows]
    assert found["alone"] == found["packed"]
    assert len(set(found["alone"][0])) == 2


@pytest.mark.slow
def test_ctrl_c_stops_all_packed_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(WAIT)
    out = tmp_path / "sweep"
    fake = [sys.executable, "-SE", str(tmp_path / "program.py")]

    def interrupt() -> None:
        logs = [out / "logs" / f"beta{beta}-seed0.log" for beta in (0, 1)]
        while not all(path.exists() and "ready" in path.read_text() for path in logs):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    vary = ["bottleneck.beta=0,1,2"]
    found = sweep("builtin", out, vary=vary, display=silent(), at_once=2, program=fake)
    thread.join()
    assert found.interrupted
    assert not found.failed
    assert not (out / "logs" / "beta2-seed0.log").exists()

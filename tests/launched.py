"""Training commands in separate processes, which tests kill, stop and signal."""

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from tiny import CHANGES, sorted_photos

# Bitwise equal runs need one precision. With a checkpoint every 0.3 s a resumed run repeats some
# steps.
SETTINGS = (*CHANGES, "train.precision=float32", "train.save_every=0.005")


def setting_words(*changes: str) -> list[str]:
    """Return the settings of a tiny run as arguments."""
    return [word for change in (*SETTINGS, *changes) for word in ("--set", change)]


def pretrain_words(out: Path, *changes: str) -> list[str]:
    """Return the arguments of `compressive` for a tiny run."""
    return ["pretrain", str(sorted_photos()), *setting_words(*changes), "--out", str(out)]


def free_port() -> int:
    """Return a port that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def ranks(process: int) -> dict[int, int]:
    """Return the ids of the training processes that a process has started, by rank."""
    found: dict[int, int] = {}
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the process may exit at any time
            for child in map(int, task.read_text().split()):
                found |= ranks(child)
                for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    if entry.startswith(b"RANK="):
                        found[int(entry[5:])] = child
    return found


def last_step(run: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, 0 if there is none."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for_step(run: Path, step: int, job: subprocess.Popen[str], seconds: float = 120) -> None:
    """Wait until a run has logged a step; fail if its process exits before that."""
    until = time.monotonic() + seconds
    while last_step(run) < step:
        assert job.poll() is None, f"ended with {job.returncode} at step {last_step(run)}"
        assert time.monotonic() < until, f"step {last_step(run)} after {seconds} s, not {step}"
        time.sleep(0.02)


def stop_all(job: subprocess.Popen[str]) -> None:
    """Kill a process and its training processes, if any are left."""
    for process in (job.pid, *ranks(job.pid).values()):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    job.wait()

"""Losses of a run whose number of processes changes, compared with uninterrupted runs.

    python benchmarks/elastic.py --out docs/results/2026-11-18-drills/elastic.json

Trains C-SimCLR on built-in images with gloo on CPUs: with one process, with two, with two that are
stopped and resumed, and with 1, 2, 4 and 1 processes one after another in one run folder.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

from compressive.rundir import checkpoint

STEPS, PART = 160, 40
SETTINGS = (
    *("data.limit=512", "views.size=32", "network.name=test_resnet", "network.hidden_dim=64"),
    *("network.projection_dim=32", "optim.name=sgd", "optim.lr=0.1", "optim.warmup_epochs=1"),
    *("train.batch_size=32", f"train.steps={STEPS}", "train.device=cpu", "train.log_every=1"),
    *("train.precision=float32", "train.tensorboard=false", "probe.every_epochs=100"),
)


def losses(run: Path) -> dict[int, float]:
    """Return the loss of each step that a run has logged."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[1:-1] if path.exists() else []
    found = [json.loads(line) for line in lines]
    return {line["step"]: line["loss"] for line in found if "loss" in line}


def train(run: Path, processes: int, until: int | None = None) -> int:
    """Train with a number of processes, until a step or the end; return the last step."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(processes), "-m", "compressive", "pretrain", "builtin"]
    words += [word for setting in SETTINGS for word in ("--set", setting)] + ["--out", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "120"}
    with tempfile.TemporaryFile("w+") as log:
        job = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
        while job.poll() is None:
            if until is not None and max(losses(run), default=0) >= until:
                job.send_signal(signal.SIGTERM)
                job.wait()
            time.sleep(0.05)
        if until is None and job.returncode:
            log.seek(0)
            raise SystemExit(log.read()[-3000:])
    return max(losses(run))


def weights(run: Path) -> torch.Tensor:
    """Return all weights in the last checkpoint of a run as one vector."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    state = found[1]["learner"]
    floats = [value for value in state.values() if value.is_floating_point()]
    return torch.cat([value.flatten().double() for value in floats])


def compare(run: Path, base: Path, parts: dict[int, int]) -> dict[str, Any]:
    """Return the deviations of a run from another; `parts` maps last steps to processes."""
    ours, theirs = losses(run), losses(base)
    assert ours.keys() == theirs.keys() == set(range(1, STEPS + 1))
    first, rows = 1, []
    for last, processes in parts.items():
        off = [abs(ours[step] / theirs[step] - 1) for step in range(first, last + 1)]
        rows.append({"processes": processes, "steps": [first, last], "max_relative": max(off)})
        first = last + 1
    a, b = weights(run), weights(base)
    start = next((step for step in ours if ours[step] != theirs[step]), None)
    after = [] if start is None else [start + i for i in (0, 1, 4, 9, 19, 39)]
    return {
        "parts": rows,
        "first_step_that_differs": start,
        "relative_by_step": {step: abs(ours[step] / theirs[step] - 1) for step in after},
        "weights_relative": float((a - b).norm() / b.norm()),
        "weights_are_bitwise_equal": torch.equal(a, b),
    }


def main() -> None:
    """Run all trainings and write the deviations as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("elastic.json"))
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        one, two, stopped, changing = (Path(folder) / name for name in ("1", "2", "2+2", "1-2-4-1"))
        train(one, 1)
        train(two, 2)
        same = {train(stopped, 2, PART): 2, train(stopped, 2): 2}
        changes: dict[int, int] = {}
        for i, processes in enumerate((1, 2, 4, 1)):
            last = train(changing, processes, None if i == 3 else PART * (i + 1))
            changes[last] = processes
        found = {
            "torch": torch.__version__,
            "settings": list(SETTINGS),
            "loss": {"first": losses(one)[1], "last": losses(one)[STEPS]},
            "two_stopped_and_resumed_against_two": compare(stopped, two, same),
            "changing_against_one": compare(changing, one, changes),
            "two_against_one": compare(two, one, {PART: 2, STEPS: 2}),
        }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()

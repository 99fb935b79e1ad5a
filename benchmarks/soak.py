"""Train for many steps and report whether memory, threads and open files stay constant.

    python benchmarks/soak.py --steps 10000

Trains timm's smallest ResNet on 64 images with all periodic work (log, checkpoint, evaluation) made
frequent, reads /proc/self every half second, and prints as JSON the median of each quantity over
the second and over the last tenth of the run. The first tenth fills caches.
"""

import argparse
import json
import os
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from timing import environment

from compressive.config import Config, override
from compressive.data.source import ImageSource
from compressive.progress import Display
from compressive.train.loop import pretrain

SETTINGS = (
    "views.size=16",
    "network.name=test_resnet",
    "network.hidden_dim=16",
    "network.projection_dim=8",
    "train.batch_size=8",
    "train.device=cpu",
    "train.log_every=5",
    "train.save_every=0.05",
    "probe.every_epochs=10",
    "health.min_participation_ratio=0",
    "health.collapse_std=0",
)


def resources() -> dict[str, int]:
    """Return resident KiB, threads and open files of this process."""
    status = Path("/proc/self/status").read_text()
    numbers = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    return {
        "resident_kib": int(numbers["VmRSS"]),
        "running_threads": int(numbers["Threads"]),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def soak(steps: int, out: Path) -> dict[str, object]:
    """Train and return the resources early and late, and the sizes of the run's files."""
    pixels = torch.randint(0, 256, (64, 3, 16, 16), dtype=torch.uint8)
    source = ImageSource(
        name="noise",
        count=64,
        read=pixels.__getitem__,
        place=str,
        labels=torch.arange(64) % 4,
        classes=("a", "b", "c", "d"),
    )
    readings: list[dict[str, int]] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.5):
            readings.append(resources())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    try:
        config = override(Config(), *SETTINGS, f"train.steps={steps}")
        pretrain(config, out, display=Display(quiet=True), source=source)
    finally:
        done.set()
        watcher.join()
    tenth = len(readings) // 10
    early, late = readings[tenth : 2 * tenth], readings[-tenth:]
    files = {str(p.relative_to(out)): p.stat().st_size for p in out.rglob("*") if p.is_file()}
    return {
        "steps": steps,
        "seconds": round(time.monotonic() - start, 1),
        "readings": len(readings),
        **{
            name: [statistics.median(each[name] for each in part) for part in (early, late)]
            for name in resources()
        },
        "files": files,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(parser.parse_args().steps, Path(folder) / "run")
    print(json.dumps(found | environment("cpu"), indent=1))

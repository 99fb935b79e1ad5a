"""Runs of one second for tests: a network of 0.4 million weights on images of 16 pixels."""

import atexit
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor

from compressive.config import Config, flat, override
from compressive.progress import Display
from compressive.rundir import checkpoint

# Disable collapse detection: a few images in one or two dimensions would trigger it. Online
# evaluation runs every 5 steps. TensorBoard takes longer than the run.
CHANGES = (
    "views.size=16",
    "network.name=test_resnet",
    "network.hidden_dim=16",
    "network.projection_dim=8",
    "optim.name=sgd",
    "optim.warmup_epochs=0",
    "train.batch_size=8",
    "train.steps=2",
    "train.device=cpu",
    "train.log_every=1",
    "train.tensorboard=false",
    "probe.every_epochs=1",
    "health.min_participation_ratio=0",
    "health.collapse_std=0",
)
TIMING = ("images_per_second", "data_wait_fraction")


def tiny(*changes: str) -> Config:
    return override(Config(), f"data.source={sorted_photos()}", *CHANGES, *changes)


@functools.cache
def sorted_photos() -> Path:
    """Return 40 images in 5 class folders, which all tests share.

    Generating the built-in dataset would take a second.
    """
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    for label in range(5):
        (folder / f"class{label}").mkdir()
        for i in range(8):
            noise(16, 16, seed=8 * label + i).save(folder / f"class{label}" / f"{i}.png")
    return folder


def words(config: Config) -> list[str]:
    """Return command-line arguments that set this config, whatever the recipe."""
    settings = flat(config)
    settings.pop("recipe")
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def silent() -> Display:
    return Display(quiet=True)


class Written(Display):
    """A display that records its messages."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def last(run: Path) -> dict[str, Any]:
    """Return the state in a run's last checkpoint, without the run id, which is unique."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    assert found[1].pop("run_id")
    return found[1]


def journal(run: Path) -> list[dict[str, Any]]:
    """Return the metrics lines of a run without timings and header."""
    _, *lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for name in TIMING:
            line.pop(name, None)
        # "data wait" depends on timing and replaces "ok", which only repeats other metrics.
        if line.get("health", "").startswith(("data wait", "ok")):
            line.pop("health")
    return lines


def tensors(state: Any, place: str = "") -> dict[str, Any]:
    """Return every leaf of a nested state by its path."""
    if isinstance(state, dict):
        pairs = list(state.items())
    elif isinstance(state, list | tuple):
        pairs = list(enumerate(state))
    else:
        return {place: state}
    return {
        name: leaf
        for key, value in pairs
        for name, leaf in tensors(value, f"{place}.{key}" if place else str(key)).items()
    }


def differences(one: Any, other: Any) -> list[str]:
    """Return the paths at which two states are not bitwise equal."""
    a, b = tensors(one), tensors(other)
    shared = a.keys() & b.keys()
    return sorted((a.keys() | b.keys()) - shared) + sorted(
        name for name in shared if not _same(a[name], b[name])
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
    return type(a) is type(b) and a == b


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def photos(folder: Path, count: int, side: int = 24) -> Path:
    """Write images of different widths to a flat, unlabeled folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        noise(side, side + i, seed=i).save(folder / f"{i:03d}.png")
    return folder

"""Small evaluation contexts for tests: noise images and a network of mean colors."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from tiny import noise
from torch import Tensor, nn

from compressive.augment.ops import MEAN, STD
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Record, Results


def pictures(folder: Path, classes: dict[str, int], seed: int = 0) -> None:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noise(16, 16, seed=seed + i).save(folder / name / f"{name or 'flat'}{seed + i}.png")


def shard(path: Path, words: Sequence[str | None], folder: Path) -> None:
    pictures(folder, {"": len(words)})
    data = [{"bytes": (folder / f"flat{i}.png").read_bytes()} for i in range(len(words))]
    pq.write_table(pa.table({"image": data, "label": pa.array(words, pa.string())}), path)


class Mean(nn.Module):
    """A network whose features are the mean colors of the normalized image."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3)) * self.one


def context_of(place: Path, **more: object) -> EvalContext:
    network = Mean().eval()
    model = FrozenModel(name="mean", network=network, size=16, **more)  # pyright: ignore
    splits = open_splits(str(place), seed=0)
    return EvalContext(model, splits, Results("mean"), device=torch.device("cpu"))


def place(folder: Path, train: dict[str, int], test: dict[str, int]) -> Path:
    pictures(folder / "train", train)
    pictures(folder / "test", test, seed=50)
    return folder


CIFAR10 = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


LEVELS = 25 * np.arange(10, dtype=np.uint8)


class Level(nn.Module):
    """A network whose only feature is the gray level of the image, 0 to 255."""

    one: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return 255 * (x[:, :1].mean((2, 3)) * STD[0] + MEAN[0]) * self.one


def put(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 24), (level,) * 3).save(path, quality=95)


def level_context(tmp_path: Path) -> EvalContext:
    for split in ("train", "test"):
        for name, level in zip(CIFAR10, LEVELS.tolist(), strict=True):
            put(tmp_path / "cifar" / split / name / "0.png", level)
    model = FrozenModel(name="level", network=Level().eval(), size=16)
    splits = open_splits(str(tmp_path / "cifar"), seed=0)
    found = EvalContext(model, splits, Results("level"), device=torch.device("cpu"))
    levels = torch.from_numpy(LEVELS).float()
    found.classifier = lambda feats: -(feats - levels).square()
    return found


def figures(context: EvalContext, metric: str = "top-1") -> dict[str, Record]:
    return {r.dataset: r for r in context.results.records if r.metric == metric}

"""Plant duplicates, leaks, label errors and damaged files in a data set, and count what is found.

python benchmarks/inspect_planted.py CIFAR10 --out docs/results/2026-11-17-inspect
"""

import argparse
import io
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "src"))

import numpy as np
import pyarrow as pa
import torch
from PIL import Image, ImageEnhance
from pyarrow import parquet

from compressive.data.source import Source
from compressive.data.sources import open_source


def _encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _cropped(image: Image.Image, random: np.random.Generator) -> bytes:
    """Cut off an eighth of each side at a random position."""
    width, height = (round(side * 7 / 8) for side in image.size)
    left, top = (int(random.integers(0, a - b + 1)) for a, b in zip(image.size, (width, height)))
    return _encoded(image.crop((left, top, left + width, top + height)))


def _resized(image: Image.Image) -> bytes:
    return _encoded(image.resize([round(side * 1.5) for side in image.size], Image.BICUBIC))


NEAR: dict[str, Callable[[Image.Image, np.random.Generator], bytes]] = {
    "JPEG, quality 75": lambda image, _: _encoded(image, "JPEG", quality=75),
    "resized by 1.5": lambda image, _: _resized(image),
    "brightness times 1.3": lambda image, _: _encoded(ImageEnhance.Brightness(image).enhance(1.3)),
    "cropped by 1/8": _cropped,
    "mirrored": lambda image, _: _encoded(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
}


@dataclass
class Planted:
    """What was planted; a row is (split, number). Pairs are a copy and its original."""

    pairs: dict[str, list[tuple[tuple[str, int], tuple[str, int]]]] = field(default_factory=dict)
    labels: list[tuple[str, int]] = field(default_factory=list)
    damaged: list[tuple[str, int]] = field(default_factory=list)


def plant(
    place: str, folder: Path, *, copies: int, label_share: float, seed: int = 0
) -> Planted:
    """Write train.parquet and test.parquet with planted errors; `copies` is per kind."""
    sources = {split: open_source(place, split) for split in ("train", "test")}
    rows = {split: [_png(source, i) for i in range(len(source))] for split, source in sources.items()}
    labels = {split: _label_list(source) for split, source in sources.items()}
    random, found = np.random.default_rng(seed), Planted()
    free = {split: list(random.permutation(len(rows[split]))) for split in sources}

    def copy(kind: str, split: str, change: Callable[[Image.Image], bytes] | None) -> None:
        """Append changed copies of images of a split to train."""
        pairs = found.pairs.setdefault(kind, [])
        for _ in range(copies):
            i = int(free[split].pop())
            content = rows[split][i]
            if change is not None:
                content = change(Image.open(io.BytesIO(content)))
            pairs.append((("train", len(rows["train"])), (split, i)))
            rows["train"].append(content)
            labels["train"].append(labels[split][i])

    for split, name in (("train", "copy"), ("test", "leak")):
        copy(f"{name}: same file", split, None)
        copy(f"{name}: same pixels, other file", split, lambda image: _encoded(image, "BMP"))
        for kind, change in NEAR.items():
            copy(f"{name}: {kind}", split, lambda image, c=change: c(image, random))
    classes = sources["train"].classes or ()
    for split in sources:
        for _ in range(round(label_share * len(sources[split]))):
            i = int(free[split].pop())
            other = int(random.integers(1, len(classes)))
            labels[split][i] = (labels[split][i] + other) % len(classes)
            found.labels.append((split, i))
    for _ in range(max(1, copies // 10)):
        i = int(free["train"].pop())
        rows["train"][i] = rows["train"][i][: len(rows["train"][i]) // 2]
        found.damaged.append(("train", i))
    folder.mkdir(parents=True, exist_ok=True)
    for split in sources:
        _write(folder / f"{split}.parquet", rows[split], labels[split], classes)
    return found


def _png(source: Source, i: int) -> bytes:
    return _encoded(Image.fromarray(source.image(i).permute(1, 2, 0).numpy()), compress_level=1)


def _label_list(source: Source) -> list[int]:
    assert source.labels is not None
    return source.labels.tolist()


def _write(path: Path, rows: list[bytes], labels: list[int], classes: tuple[str, ...]) -> None:
    names = {"info": {"features": {"label": {"names": list(classes), "_type": "ClassLabel"}}}}
    image = pa.array([{"bytes": row, "path": None} for row in rows], pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    table = pa.table({"image": image, "label": pa.array(labels, pa.int64())})
    about = {b"huggingface": json.dumps(names).encode()}
    parquet.write_table(table.replace_schema_metadata(about), path, row_group_size=1000)

"""Read the transfer data sets of the paper from the layouts that their authors publish."""

import csv
import errno
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from compressive.data.shards import open_parquet
from compressive.data.source import ImageSource, Source, read_file, subset
from compressive.data.splits import per_class
from compressive.data.torchvision_sets import open_torchvision
from compressive.evaluation.datasets.layouts import whole

_LabeledFile = tuple[str, int]  # path, class
_PER_CLASS = 30  # training images per class of Caltech-101, as is usual


class Found(NamedTuple):
    """A data set as published; `val` is None if there is no published validation split."""

    train: Source
    val: Source | None
    test: Source
    notes: tuple[str, ...] = ()


def read_dataset(name: str, root: Path, seed: int) -> Found:
    """Read a data set by its name in the table of the paper."""
    readers: dict[str, Callable[[Path], Found]] = {
        "food101": partial(_by_torchvision, "Food101"),
        "cifar10": partial(_read_cifar, "cifar10"),
        "cifar100": partial(_read_cifar, "cifar100"),
        "flowers": _flowers,
        "pet": _pet,
        "cars": _cars,
        "caltech101": partial(_caltech101, seed=seed),
        "dtd": partial(_by_torchvision, "DTD", val=True),  # its partition 1
        "sun397": _sun397,
        "aircraft": partial(_by_torchvision, "FGVCAircraft", val=True),  # its variants
        "birdsnap": _birdsnap,
    }
    return readers[name](root)


def _by_torchvision(kind: str, root: Path, *, val: bool = False) -> Found:
    place = f"torchvision:{kind}@{root}"
    splits = ("train", "val", "test") if val else ("train", "test")
    found = {split: open_torchvision(place, split, download=False) for split in splits}
    return Found(found["train"], found.get("val"), found["test"])


def _read_cifar(name: str, root: Path) -> Found:
    """Read CIFAR with torchvision, or from parquet files in a folder of its name."""
    parts = {split: sorted((root / name).rglob(f"{split}*.parquet")) for split in ("train", "test")}
    if not all(parts.values()):
        return _by_torchvision(name.upper(), root)
    train, test = (open_parquet(root / name, files) for files in parts.values())
    return Found(train, None, test)


def _pet(root: Path) -> Found:
    """Read Oxford Pets from its lists of names and classes.

    torchvision is not used because it would decode every image to get its class.
    """
    base, names = root / "oxford-iiit-pet", {}

    def listed(split: str) -> list[_LabeledFile]:
        rows = []
        for line in _read_lines(base / "annotations" / f"{split}.txt"):
            image, label, *_ = line.split()
            rows.append((f"{base}/images/{image}.jpg", int(label) - 1))
            names[int(label) - 1] = image.rpartition("_")[0].replace("_", " ")
        return rows

    train, test = listed("trainval"), listed("test")
    return _of_files("pet", [names[i] for i in sorted(names)], train=train, test=test)


def _flowers(root: Path) -> Found:
    """Read Oxford Flowers; train is the small split and test the large one."""
    base = root / "flowers-102"
    labels, lists = _mat(base / "imagelabels.mat")["labels"], _mat(base / "setid.mat")
    parts = {
        split: [(f"{base}/jpg/image_{i:05}.jpg", int(labels[i - 1]) - 1) for i in lists[key]]
        for split, key in (("train", "trnid"), ("val", "valid"), ("test", "tstid"))
    }
    return _of_files("flowers", [str(i + 1) for i in range(int(labels.max()))], **parts)


def _cars(root: Path) -> Found:
    """Read Stanford Cars; unlike torchvision, accept the test labels in either of two folders."""
    base = root / "stanford_cars"
    devkit = base / "devkit"
    test = _first(folder / "cars_test_annos_withlabels.mat" for folder in (devkit, base))
    lists = {"train": devkit / "cars_train_annos.mat", "test": test}
    parts = {
        split: [
            (f"{base}/cars_{split}/{row['fname']}", int(row["class"]) - 1)
            for row in np.atleast_1d(_mat(file)["annotations"])
        ]
        for split, file in lists.items()
    }
    return _of_files("cars", _mat(devkit / "cars_meta.mat")["class_names"].tolist(), **parts)


def _caltech101(root: Path, seed: int) -> Found:
    """Read Caltech-101: 30 images of each folder for training and the rest for test.

    The background is one of the folders, as in BYOL's table (102 x 30 = 3,060 images). torchvision
    omits it.
    """
    base = _first(root / name for name in ("caltech101", "caltech-101")) / "101_ObjectCategories"
    classes = sorted(entry.name for entry in os.scandir(base) if entry.is_dir())
    files = [
        (f"{base}/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(base / name))
        if file.lower().endswith(".jpg")
    ]
    if not files:
        raise FileNotFoundError(errno.ENOENT, "no images", f"{base}/CLASS/*.jpg")
    whole = _source("caltech101", classes, files)
    parts = per_class(torch.tensor([label for _, label in files]), _PER_CLASS, seed=seed)
    background = "BACKGROUND_Google"
    notes = (
        f"{_PER_CLASS} images of each class drawn with seed {seed} for training, the rest is test",
        f"{background} is {'one of the classes' if background in classes else 'missing'}",
    )
    return Found(subset(whole, parts.kept), None, subset(whole, parts.held), notes)


def _sun397(root: Path) -> Found:
    """Read the first of the ten splits of SUN397; torchvision has no splits."""
    base = root / "SUN397"
    folders = (base / "Partitions", base, root / "Partitions")
    lists = _first(folder / "Training_01.txt" for folder in folders).parent
    classes = _read_lines(lists / "ClassName.txt")
    ids = {name: i for i, name in enumerate(classes)}
    parts = {
        split: [
            (f"{base}{line}", ids[line.rpartition("/")[0]]) for line in _read_lines(lists / file)
        ]
        for split, file in (("train", "Training_01.txt"), ("test", "Testing_01.txt"))
    }
    return _of_files("sun397", [name.removeprefix("/") for name in classes], **parts)


def _birdsnap(root: Path) -> Found:
    """Read Birdsnap; many of its images are no longer online."""
    base = root / "birdsnap"
    species = {row["id"]: row["common"] for row in _table(base / "species.txt")}
    ids = {key: i for i, key in enumerate(species)}
    held = set(_read_lines(base / "test_images.txt")[1:])
    parts: dict[str, list[_LabeledFile]] = {"train": [], "test": []}
    for row in _table(base / "images.txt"):
        part = parts["test" if row["path"] in held else "train"]
        part.append((f"{base}/download/images/{row['path']}", ids[row["species_id"]]))
    return _of_files("birdsnap", list(species.values()), **parts)


def _of_files(name: str, classes: Sequence[str], **parts: list[_LabeledFile]) -> Found:
    """Return the splits of lists of files, without missing files."""
    every = [path for rows in parts.values() for path, _ in rows]
    # List whole folders: 50,000 single queries are slow on a network drive.
    folders = filter(os.path.isdir, {os.path.dirname(path) for path in every})
    there = {f"{folder}/{file}" for folder in folders for file in os.listdir(folder)}
    sources = {}
    for split, rows in parts.items():
        present = [(path, label) for path, label in rows if path in there]
        if not present:
            lost = rows[0][0] if rows else f"image listed for {split}"
            raise FileNotFoundError(errno.ENOENT, f"no images of {split}", lost)
        sources[split] = _source(name, classes, present)
    missing = len(every) - sum(len(source) for source in sources.values())
    notes = (f"{missing:,} of {len(every):,} images are missing",) if missing else ()
    return Found(sources["train"], sources.get("val"), sources["test"], notes)


def _source(name: str, classes: Sequence[str], rows: list[_LabeledFile]) -> Source:
    return ImageSource(
        name=name,
        count=len(rows),
        read=lambda i: read_file(rows[i][0]),
        place=lambda i: rows[i][0],
        labels=torch.tensor([label for _, label in rows]),
        classes=tuple(classes),
    )


def _first(paths: Iterable[Path]) -> Path:
    """Return the first path that exists, or the first one for the error message."""
    paths = list(paths)
    return next((path for path in paths if path.exists()), paths[0])


def _read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _table(path: Path) -> list[dict[str, str]]:
    """Read the rows of a tab-separated file with a header."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _mat(path: Path) -> dict[str, Any]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise ValueError(f"{path} is a Matlab file, which needs scipy: pip install scipy") from None
    with open(path, "rb") as file, whole(path.name):
        return loadmat(file, squeeze_me=True)

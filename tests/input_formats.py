"""The same small images in every input format: what is planted, and a writer for each format."""

import csv
import functools
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tiny import noise
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

CLASSES = ("ant", "bee", "cat")
COUNTS = {"train": 10, "test": 2}  # images of each class
SIDE = 16


class Planted(NamedTuple):
    """An image: its split, its class, its name and its pixels."""

    split: str
    label: int
    name: str
    image: Image.Image

    @property
    def png(self) -> bytes:
        file = io.BytesIO()
        self.image.save(file, "PNG")
        return file.getvalue()

    @property
    def folder(self) -> str:
        return f"{CLASSES[self.label]}/{self.name}"


def planted(split: str = "") -> list[Planted]:
    """Return the images of a split, or of all, in the order of class folders."""
    return [each for each in _every() if split in ("", each.split)]


@functools.cache
def _every() -> list[Planted]:
    found = []
    for split, count in COUNTS.items():
        for label in range(len(CLASSES)):
            for i in range(count):
                seed = 100 * label + i + 1000 * (split == "test")
                found.append(Planted(split, label, f"{i}.png", noise(SIDE, SIDE, seed=seed)))
    return found


def pixels(images: Iterable[Planted]) -> Tensor:
    return torch.from_numpy(np.stack([np.array(each.image) for each in images])).permute(0, 3, 1, 2)


def labels(images: Iterable[Planted]) -> Tensor:
    return torch.tensor([each.label for each in images])


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def class_folders(root: Path) -> Path:
    for each in planted("train"):
        put(root / "photos" / each.folder, each.png)
    return root / "photos"


def flat_folder(root: Path) -> Path:
    for each in planted("train"):
        put(root / "photos" / f"{each.label}{each.name}", each.png)
    return root / "photos"


def split_folders(root: Path) -> Path:
    for each in planted():
        put(root / "photos" / each.split / each.folder, each.png)
    return root / "photos"


def parquet(root: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as file

    features = {"image": {"_type": "Image"}, "label": {"names": CLASSES, "_type": "ClassLabel"}}
    about = json.dumps({"info": {"features": features}})
    (root / "photos").mkdir()
    for split in COUNTS:
        some = planted(split)
        rows = [{"bytes": each.png, "path": None} for each in some]
        table = pa.table({"image": rows, "label": [each.label for each in some]})
        table = table.replace_schema_metadata({"huggingface": about})
        file.write_table(table, root / "photos" / f"{split}-00000-of-00001.parquet")
    return root / "photos"


def add_to_tar(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    about = tarfile.TarInfo(name)
    about.size = len(data)
    tar.addfile(about, io.BytesIO(data))


def webdataset(root: Path) -> Path:
    (root / "photos").mkdir()
    for split in COUNTS:
        with tarfile.open(root / "photos" / f"{split}-000.tar", "w") as tar:
            for i, each in enumerate(planted(split)):
                add_to_tar(tar, f"{i:04d}.png", each.png)
                add_to_tar(tar, f"{i:04d}.cls", CLASSES[each.label].encode())
    return root / "photos"


def tar_archive(ending: str, mode: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        with tarfile.open(root / f"photos{ending}", mode) as tar:  # type: ignore[call-overload]
            for each in planted():
                add_to_tar(tar, f"photos/{each.split}/{each.folder}", each.png)
        return root / f"photos{ending}"

    return write


def zip_archive(root: Path) -> Path:
    with zipfile.ZipFile(root / "photos.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for each in reversed(planted()):  # the order in the archive does not count
            archive.writestr(f"photos/{each.split}/{each.folder}", each.png)
    return root / "photos.zip"


def rows_of_list(root: Path) -> list[dict[str, Any]]:
    """Write all images and return the rows of a list of them."""
    found = []
    for each in planted():
        name = f"{each.split}_{each.folder.replace('/', '_')}"
        put(root / "files" / name, each.png)
        found.append({"path": f"files/{name}", "label": CLASSES[each.label], "split": each.split})
    return found


def text_list(root: Path) -> Path:
    paths = [row["path"] for row in rows_of_list(root) if row["split"] == "train"]
    (root / "photos.txt").write_text("\n".join(paths))
    return root / "photos.txt"


def table_list(ending: str) -> Callable[[Path], Path]:
    def write(root: Path) -> Path:
        path, rows = root / f"photos{ending}", rows_of_list(root)
        with open(path, "w", newline="") as file:
            delimiter = "\t" if ending == ".tsv" else ","
            table = csv.DictWriter(file, rows[0], delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
        return path

    return write


def parquet_list(root: Path) -> Path:
    import pyarrow as pa
    from pyarrow import parquet as file

    file.write_table(pa.Table.from_pylist(rows_of_list(root)), root / "photos.parquet")
    return root / "photos.parquet"


def hugging_face(split: str) -> Any:
    import datasets

    kinds = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[*CLASSES])}
    some = planted(split)
    columns = {"image": [e.image for e in some], "label": [e.label for e in some]}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(kinds))


def hugging_face_dict(root: Path) -> Any:
    import datasets

    return datasets.DatasetDict({split: hugging_face(split) for split in COUNTS})


def saved_dataset(root: Path) -> Path:
    hugging_face("train").save_to_disk(root / "photos", num_shards=2)
    return root / "photos"


def saved_dataset_dict(root: Path) -> Path:
    hugging_face_dict(root).save_to_disk(root / "photos")
    return root / "photos"


def arrow_files(root: Path) -> Path:
    saved_dataset_dict(root)
    (root / "arrow").mkdir()
    for split in COUNTS:
        (file,) = (root / "photos" / split).glob("*.arrow")
        file.rename(root / "arrow" / f"photos-{split}.arrow")
    return root / "arrow"


def torchvision_set(root: Path) -> str:
    """Write the layout of torchvision's DTD."""
    base = root / "dtd" / "dtd"
    for each in planted():
        put(base / "images" / CLASSES[each.label] / f"{each.split}{each.name}", each.png)
    for split in ("train", "val", "test"):
        names = [f"{CLASSES[e.label]}/{split}{e.name}\n" for e in planted(split)]
        put(base / "labels" / f"{split}1.txt", "".join(names).encode())
    return f"torchvision:DTD@{root}"


def several(root: Path) -> list[Path]:
    """Return a folder with two of the classes and an archive with the third."""
    for each in planted():
        if each.label < 2:
            put(root / "folder" / each.split / each.folder, each.png)
    with zipfile.ZipFile(root / "more.zip", "w") as archive:
        for each in planted():
            if each.label == 2:
                archive.writestr(f"{each.split}/{each.folder}", each.png)
                archive.writestr(f"{each.split}/dog/{each.name}", each.png[:-1])  # unreadable
    return [root / "folder", root / "more.zip"]


class Photos(Dataset[dict[str, Any]]):
    """A data set as a user writes it: dicts with a PIL image and a class, nothing else."""

    def __init__(self, split: str = "train") -> None:
        self.images: list[Planted] = planted(split)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"image": self.images[i].image, "label": CLASSES[self.images[i].label]}


def tensors(root: Path) -> dict[str, TensorDataset]:
    return {s: TensorDataset(pixels(planted(s)), labels(planted(s))) for s in COUNTS}


def subsets(root: Path) -> dict[str, Subset[Any]]:
    """Return what random_split returns, with float images, which ToTensor makes."""
    whole = TensorDataset(pixels(planted()) / 255, labels(planted()))
    parts = {split: [i for i, e in enumerate(planted()) if e.split == split] for split in COUNTS}
    return {split: Subset(whole, part) for split, part in parts.items()}


class Format(NamedTuple):
    """How to write or build a format, and what it keeps."""

    make: Callable[[Path], Any]
    has_labels: bool = True
    has_test: bool = True
    has_names: bool = True  # of the classes
    is_path: bool = True


FORMATS: dict[str, Format] = {
    "flat folder": Format(flat_folder, has_labels=False, has_test=False),
    "class folders": Format(class_folders, has_test=False),
    "split folders": Format(split_folders),
    "parquet files": Format(parquet),
    "tar files": Format(webdataset),
    "save_to_disk": Format(saved_dataset, has_test=False),
    "save_to_disk with splits": Format(saved_dataset_dict),
    "arrow files": Format(arrow_files),
    "zip archive": Format(zip_archive),
    "tar archive": Format(tar_archive(".tar", "w")),
    "tar.gz archive": Format(tar_archive(".tar.gz", "w:gz")),
    "tar.xz archive": Format(tar_archive(".tar.xz", "w:xz")),
    "tar.bz2 archive": Format(tar_archive(".tar.bz2", "w:bz2")),
    "txt list": Format(text_list, has_labels=False, has_test=False),
    "csv list": Format(table_list(".csv")),
    "tsv list": Format(table_list(".tsv")),
    "parquet list": Format(parquet_list),
    "torchvision:NAME": Format(torchvision_set),
    "datasets.Dataset": Format(lambda root: hugging_face("train"), has_test=False, is_path=False),
    "datasets.DatasetDict": Format(hugging_face_dict, is_path=False),
    "ImageFolder": Format(
        lambda root: ImageFolder(str(class_folders(root))), has_test=False, is_path=False
    ),
    "torch Dataset": Format(lambda root: Photos(), has_test=False, is_path=False),
    "dict of torch Datasets": Format(
        lambda root: {split: Photos(split) for split in COUNTS}, is_path=False
    ),
    "TensorDataset": Format(tensors, has_names=False, is_path=False),
    "Subset of floats": Format(subsets, has_names=False, is_path=False),
}

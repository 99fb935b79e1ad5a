"""Open test sets with a distribution shift, from their published folder layouts."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.data.decode import EXTENSIONS, decode
from compressive.data.source import ImageSource, Source, read_file
from compressive.evaluation.datasets.imagenet_labels import IMAGENET, objectnet_ids
from compressive.evaluation.datasets.layouts import (
    ARCHIVES,
    SEVERITIES,
    SHIFTS,
    CropKind,
    expected,
    find_folder,
    named_files,
    whole,
)
from compressive.evaluation.datasets.videos import read_vid, read_ytbb

CELLS = ("imagenet-c", "tiny-imagenet-c", "cifar10-c", "cifar100-c")


@dataclass(frozen=True, eq=False, kw_only=True)
class GroundTruth:
    """Correct answers for logits over the classes of a classifier.

    Video sets have their own classes: `owner` maps ImageNet ids to them, and `right` holds them.
    """

    classes: int  # number of logits per image
    right: Int64[Tensor, "images most"]  # any of these is correct; rows are padded with -1
    allowed: Int64[Tensor, " some"] | None = None  # classes of a masked argmax; None: all
    owner: Int64[Tensor, " ids"] | None = None  # video class of each ImageNet id, -1: none
    video_classes: int = 0
    anchors: Int64[Tensor, " anchors"] | None = None  # frames in the middle of their set
    neighbors: Int64[Tensor, "anchors around"] | None = None  # frames around each, -1: none

    def __post_init__(self) -> None:
        assert (self.owner is None) == (self.anchors is None) == (self.neighbors is None)
        assert bool(len(self.right)), "no images"
        assert int(self.right.max()) < (self.video_classes or self.classes), "no such class"
        assert bool((self.right >= 0).any(1).all()), "an image without a right answer"

    def to(self, device: torch.device | str) -> "GroundTruth":
        """Move all tensors to a device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {k: v.to(device) for k, v in values.items() if torch.is_tensor(v)}
        return replace(self, **moved)


def padded(rows: Sequence[Collection[int]]) -> Int64[Tensor, "rows most"]:
    """Return sets of different sizes as one table: sorted rows, padded with -1."""
    most = max(map(len, rows), default=0)
    return torch.tensor(
        [sorted(row) + [-1] * (most - len(row)) for row in rows], dtype=torch.int64
    ).reshape(len(rows), most)


class Shift(NamedTuple):
    """Images, their correct answers, and their preprocessing."""

    name: str
    source: Source
    answers: GroundTruth
    crop: CropKind
    notes: tuple[str, ...]  # for the protocol of every record


def open_shift(name: str, root: str | Path, wnids: Sequence[str] | None = None) -> Shift:
    """Open a natural robustness set; `wnids` are the sorted 1000 ImageNet classes of the logits.

    They are needed if the folders of the set are wnids. Raise FileNotFoundError, with the expected
    layout, if the set is missing.
    """
    if name not in _OPENERS:
        kind = "is opened by open_cell" if name in CELLS else "is not known"
        raise ValueError(f"{name!r} {kind}; open_shift opens {', '.join(_OPENERS)}")
    if wnids is not None and (len(wnids) != IMAGENET or list(wnids) != sorted(set(wnids))):
        raise ValueError(f"wnids must be ImageNet's {IMAGENET}, sorted, got {len(wnids)} names")
    with whole(f"{name} in {root}"), named_files(name):
        return _OPENERS[name](name, find_folder(name, root), wnids)


def open_cell(
    name: str,
    root: str | Path,
    corruption: str,
    severity: int,
    classes: Sequence[str] | None = None,
) -> Shift:
    """Open one corruption at one severity, from 1 to 5, of a corrupted set.

    `classes` are the wnids in the order of the logits; CIFAR's files hold class numbers instead.
    """
    if name not in CELLS:
        raise ValueError(f"{name!r} has no corruptions; allowed are {', '.join(CELLS)}")
    if corruption not in NAMES + EXTRAS:
        allowed = ", ".join(NAMES + EXTRAS)
        raise ValueError(f"corruption must be one of {allowed}, got {corruption!r}")
    if severity not in SEVERITIES:
        raise ValueError(f"severity must be from 1 to {SEVERITIES[-1]}, got {severity}")
    place = _corruption(name, find_folder(name, root), corruption)
    if place is None:
        raise FileNotFoundError(f"no {corruption} of {name} in {root}: {expected(name)}")
    if name.startswith("cifar"):
        with named_files(name):
            return _cifar_cell(name, place, severity)
    images = _class_folders(place / str(severity), name)
    ids = _ranks(name, place, images, classes)
    notes = (f"{corruption} {severity}", "published files, not resized")
    return _shift(name, images, {k: (ids[k],) for k in images}, classes=len(ids), notes=notes)


def corruptions_at(name: str, root: str | Path) -> tuple[str, ...]:
    """Return the corruptions of a set on disk: first those of the 15, then the 4 extra ones."""
    base = find_folder(name, root)
    return tuple(c for c in NAMES + EXTRAS if _corruption(name, base, c) is not None)


def _corruption(name: str, base: Path, corruption: str) -> Path | None:
    if name.startswith("cifar"):
        file = base / f"{corruption}.npy"
        return file if file.is_file() else None
    places = (base / f"{archive}{corruption}" for archive in ARCHIVES)
    return next((place for place in places if place.is_dir()), None)


def _cifar_cell(name: str, file: Path, severity: int) -> Shift:
    """Read the rows of one severity; the files hold the five severities one after another."""
    array = np.load(file, mmap_mode="r")
    labels = np.load(file.with_name("labels.npy"))
    classes = 100 if name == "cifar100-c" else 10
    count, rest = divmod(len(array), len(SEVERITIES))
    images = array.dtype == np.uint8 and array.shape[1:] == (32, 32, 3) and count > 0 and not rest
    if not images or labels.shape != array.shape[:1] or labels.max() >= classes:
        raise ValueError(
            f"{file} must be uint8 (50000, 32, 32, 3) with a label below {classes} for each in "
            f"labels.npy, got {array.dtype} {array.shape} and {labels.shape}; download both again"
        )
    start = (severity - 1) * count

    def pixels(i: int) -> UInt8[Tensor, "3 h w"]:
        return torch.from_numpy(np.array(array[start + i])).permute(2, 0, 1)

    source = ImageSource(name=name, count=count, read=pixels, place=lambda i: f"{file}:{start + i}")
    right = torch.from_numpy(labels[start : start + count].astype(np.int64))[:, None]
    notes = (f"{file.stem} {severity}", "published files, no JPEG, not resized")
    return _with_count(name, source, GroundTruth(classes=classes, right=right), notes)


def _open_by_wnid(name: str, base: Path, wnids: Sequence[str] | None) -> Shift:
    images = _class_folders(base, name)
    ids = _ranks(name, base, images, wnids)
    allowed = torch.tensor(sorted(ids[folder] for folder in images))
    return _shift(name, images, {k: (ids[k],) for k in images}, allowed=allowed)


def _open_v2(name: str, base: Path, wnids: Sequence[str] | None) -> Shift:
    """Open ImageNetV2, whose folders are ids; as names they would sort 0, 1, 10, 100, ..."""
    images = {k: v for k, v in _class_folders(base, name).items() if k.isdecimal()}
    if wrong := [folder for folder in images if int(folder) >= IMAGENET]:
        raise ValueError(f"{base} must have folders from 0 to {IMAGENET - 1}, got {wrong[0]}")
    return _shift(name, images, {folder: (int(folder),) for folder in images})


def _open_objectnet(name: str, base: Path, wnids: Sequence[str] | None) -> Shift:
    ids = objectnet_ids(base / "mappings")
    images = {k: v for k, v in _class_folders(base / "images", name).items() if k in ids}
    allowed = torch.tensor(sorted({i for several in ids.values() for i in several}))
    notes = ("2 px of red border cut off first", "any id of the true class is right")
    return _shift(name, images, ids, allowed=allowed, border=2, notes=notes)


def _open_videos(name: str, base: Path, wnids: Sequence[str] | None) -> Shift:
    if name == "ytbb-robust":
        folder, videos, owner = base / "ytbb_videos", read_ytbb(base), "the anchor's"
    else:
        folder, videos, owner = base / "val", read_vid(base), "their own"
    frames = videos.frames()
    if not frames:
        raise ValueError(
            f"the annotations of {name} for {folder} contain no usable anchor; download them again"
        )
    there = {f"{p.name}/{file}" for p in folder.glob("*") if p.is_dir() for file in os.listdir(p)}
    if missing := [frame for frame in frames if frame not in there]:
        raise FileNotFoundError(
            f"{len(missing)} of {len(frames)} frames of {name} are not in {folder}, the first is "
            f"{missing[0]}: {expected(name)}"
        )
    place = {frame: i for i, frame in enumerate(frames)}
    answers = GroundTruth(
        classes=IMAGENET,
        right=padded([videos.right[frame] for frame in frames]),
        owner=videos.classes.owner,
        video_classes=len(videos.classes.names),
        anchors=torch.tensor([place[anchor] for anchor in videos.neighbors]),
        neighbors=padded([[place[frame] for frame in near] for near in videos.neighbors.values()]),
    )
    source = _files(name, [f"{folder}/{frame}" for frame in frames])
    return _with_count(name, source, answers, (f"neighbors have {owner} labels",))


_OPENERS: Mapping[str, Callable[[str, Path, Sequence[str] | None], Shift]] = {
    "imagenet-a": _open_by_wnid,
    "imagenet-r": _open_by_wnid,
    "imagenet-v2": _open_v2,
    "imagenet-v2-threshold0.7": _open_v2,
    "imagenet-v2-top-images": _open_v2,
    "objectnet": _open_objectnet,
    "imagenet-vid-robust": _open_videos,
    "ytbb-robust": _open_videos,
}


def _ranks(
    name: str, base: Path, folders: Collection[str], classes: Sequence[str] | None
) -> dict[str, int]:
    """Return the index of each class among the logits, which is not the index of its folder."""
    if classes is None:
        hint = "imagenet_wnids(folder of ImageNet)" if "tiny" not in name else "those of training"
        raise ValueError(f"{name} needs the wnids of the classes of the logits; give {hint}")
    ids = {wnid: i for i, wnid in enumerate(classes)}
    if unknown := sorted(set(folders) - ids.keys()):
        raise ValueError(f"{base} has a folder {unknown[0]}, which is not among {len(ids)} classes")
    return ids


def _class_folders(base: Path, name: str) -> dict[str, list[str]]:
    """Return the sorted image paths of each subfolder that has any."""
    found: dict[str, list[str]] = {}
    for folder in sorted(path for path in base.glob("[!.]*") if path.is_dir()):
        files = sorted(file for file in os.listdir(folder) if not file.startswith("."))
        if images := [file for file in files if os.path.splitext(file)[1].lower() in EXTENSIONS]:
            found[folder.name] = [f"{folder}/{file}" for file in images]
    if not found:
        raise FileNotFoundError(f"no folders with images of {name} in {base}: {expected(name)}")
    return found


def _shift(
    name: str,
    images: Mapping[str, Sequence[str]],
    ids: Mapping[str, Sequence[int]],
    *,
    classes: int = IMAGENET,
    allowed: Tensor | None = None,
    border: int = 0,
    notes: tuple[str, ...] = (),
) -> Shift:
    """Open class folders; the correct ids of an image are those of its folder."""
    files = [file for folder in images.values() for file in folder]
    if not files:
        where = "in the folders of its classes"
        raise FileNotFoundError(f"no images of {name} {where}: {expected(name)}")
    right = padded([ids[folder] for folder, inside in images.items() for _ in inside])
    answers = GroundTruth(classes=classes, right=right, allowed=allowed)
    return _with_count(name, _files(name, files, border), answers, notes)


def _files(name: str, files: Sequence[str], border: int = 0) -> Source:
    def read(i: int) -> Any:
        data = read_file(files[i])
        return decode(data)[:, border:-border, border:-border] if border else data

    return ImageSource(name=name, count=len(files), read=read, place=lambda i: files[i])


def _with_count(name: str, source: Source, answers: GroundTruth, notes: tuple[str, ...]) -> Shift:
    """Return the shift, with a note if the number of images is not the published one."""
    whole = SHIFTS[name].images
    if whole and len(source) not in whole:
        notes += (f"{len(source)} images on disk, the published set has {whole[0]}",)
    return Shift(name, source, answers, SHIFTS[name].crop, notes)

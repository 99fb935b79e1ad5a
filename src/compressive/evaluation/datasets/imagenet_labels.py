"""Map the class names of test sets to ImageNet ids, in the order of PyTorch."""

import json
import pickle
import re
import tomllib
from collections.abc import Iterable
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

IMAGENET = 1000  # classes


class VideoClasses(NamedTuple):
    """Classes of a video set, and the class of each ImageNet id (-1: none)."""

    names: tuple[str, ...]
    owner: Int64[Tensor, " ids"]


def vid_classes(misc: Path) -> VideoClasses:
    """Return the 30 classes of ImageNet-Vid, from the files of the data set if they exist."""
    stems = ("wnid_map", "imagenet_class_index", "imagenet_vid_class_index")
    paths = [misc / f"{stem}.json" for stem in stems]
    if not all(path.is_file() for path in paths):
        return _packaged_classes("imagenet-vid")
    parents, imagenet, videos = map(read_json, paths)
    ids = {wnid: int(key) for key, (wnid, *_) in imagenet.items()}
    classes = {wnid: int(key) for key, (wnid, *_) in videos.items()}
    owner = torch.full((IMAGENET,), -1)
    for wnid, parent in parents.items():
        owner[ids[wnid]] = classes[parent]
    return VideoClasses(tuple(videos[str(i)][1] for i in range(len(videos))), owner)


def ytbb_classes() -> VideoClasses:
    """Return the 24 classes of YouTube-BoundingBoxes; five of them are not in ImageNet."""
    return _packaged_classes("ytbb")


def imagenet_wnids(root: str | Path) -> tuple[str, ...]:
    """Return the 1000 ILSVRC class names such as n01440764, sorted; their ranks are PyTorch ids.

    They are read from the folders of train/ or val/, of the Kaggle layout, or of the root; else
    from LOC_synset_mapping.txt; else from torchvision's meta.bin.
    """
    root = Path(root).expanduser()
    kaggle = root / "ILSVRC" / "Data" / "CLS-LOC" / "train"
    folders = [path for path in (root / "train", root / "val", kaggle, root) if path.is_dir()]
    names: dict[Path, Iterable[str]] = {
        folder: [path.name for path in folder.iterdir() if path.is_dir()] for folder in folders
    }
    if (text := root / "LOC_synset_mapping.txt").is_file():
        names[text] = [line.split(" ")[0] for line in text.read_text().splitlines()]
    if (meta := root / "meta.bin").is_file():
        with suppress(pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError):
            names[meta], _ = torch.load(meta, weights_only=True)
    found = []
    for place, listed in names.items():
        wnids = tuple(sorted({name for name in listed if re.fullmatch(r"n\d{8}", name)}))
        if len(wnids) == IMAGENET:
            return wnids
        if wnids:
            found.append(f"{len(wnids)} in {place}")
    raise FileNotFoundError(
        f"{root} lacks the {IMAGENET} class names of ImageNet: {', '.join(found) or 'found none'}"
        "; it needs train/ or val/ with a folder n01440764, ... for each, or "
        "LOC_synset_mapping.txt, or torchvision's meta.bin"
    )


def objectnet_ids(mappings: Path) -> dict[str, tuple[int, ...]]:
    """Return the ImageNet ids of each ObjectNet folder that has any: 113 folders, 125 ids.

    The mapping is folder -> ObjectNet label -> ImageNet label texts -> their line numbers (from 0)
    in the file of all 1000 -> PyTorch ids.
    """
    folders = read_json(mappings / "folder_to_objectnet_label.json")
    texts = read_json(mappings / "objectnet_to_imagenet_1k.json")
    lines_of_ids = read_json(mappings / "pytorch_to_imagenet_2012_id.json")
    of_line = {int(line): int(key) for key, line in lines_of_ids.items()}
    file = mappings / "imagenet_to_label_2012_v2"
    lines = file.read_text(encoding="utf-8").splitlines()
    ids = {line.strip(): of_line[number] for number, line in enumerate(lines) if line.strip()}
    found = {}
    for folder, label in folders.items():
        wanted = texts[label].split("; ") if label in texts else []
        if unknown := [text for text in wanted if text.strip() not in ids]:
            raise ValueError(f"{file} has no line {unknown[0]!r}, which {label!r} maps to")
        if wanted:
            found[folder] = tuple(sorted(ids[text.strip()] for text in wanted))
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file; raise ValueError with its name if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not complete JSON: {error}; download it again") from None


def _packaged_classes(name: str) -> VideoClasses:
    """Read the ids of each class, such as "7-24,80", from video_classes.toml."""
    file = files("compressive.evaluation.datasets").joinpath("video_classes.toml")
    table: dict[str, str] = tomllib.loads(file.read_text(encoding="utf-8"))[name]
    owner = torch.full((IMAGENET,), -1)
    for video_class, ranges in enumerate(table.values()):
        for span in filter(None, ranges.split(",")):
            first, _, last = span.partition("-")
            owner[int(first) : int(last or first) + 1] = video_class
    return VideoClasses(tuple(table), owner)

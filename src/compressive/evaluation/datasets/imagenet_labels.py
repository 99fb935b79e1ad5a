"""Map the class names of test sets to ImageNet ids, in the order of PyTorch."""

import json
import pickle
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int64
from torch import Tensor

IMAGENET = 1000  # classes

_BIRDS = "7-24,80-100,127-146"
_CARS = "407,436,468,511,609,627,656,661,751,817"
# The metadata of imagenet-testbed (modestyachts), also in evaluation.md 4.3; ids in PyTorch order.
_VID = {
    "airplane": "404",
    "antelope": "351-353",
    "bear": "294-297",
    "bicycle": "444,671",
    "bird": _BIRDS,
    "bus": "654,779,874",
    "car": _CARS,
    "cattle": "345",
    "dog": "151-268",
    "domestic cat": "281-285",
    "elephant": "385-386",
    "fox": "277-280",
    "giant panda": "388",
    "hamster": "333",
    "horse": "339",
    "lion": "291",
    "lizard": "38-48",
    "monkey": "370-382",
    "motorcycle": "665",
    "rabbit": "330,332",
    "red panda": "387",
    "sheep": "348",
    "snake": "52-68",
    "squirrel": "335",
    "tiger": "292",
    "train": "466",
    "turtle": "33-37",
    "watercraft": "403,472,484,510,554,576,625,628,724,780,814,833,871,913-914",
    "whale": "147-148",
    "zebra": "340",
}
_YTBB = {
    "person": "981-983",
    "bird": _BIRDS,
    "bicycle": "444,671",
    "boat": "472,554,576,625,814,914",
    "bus": "654,779,874",
    "bear": "294-297",
    "cow": "",
    "cat": "281-287",
    "giraffe": "",
    "potted plant": "985-986",
    "horse": "339",
    "motorcycle": "665",
    "knife": "499,623",
    "airplane": "404",
    "skateboard": "",
    "train": "466",
    "truck": "555,569,675,717,734,864,867",
    "zebra": "340",
    "toilet": "",
    "dog": "151-268",
    "elephant": "385-386",
    "umbrella": "879",
    "none": "",
    "car": _CARS,
}


class VideoClasses(NamedTuple):
    """Classes of a video set, and the class of each ImageNet id (-1: none)."""

    names: tuple[str, ...]
    owner: Int64[Tensor, " ids"]


def vid_classes(misc: Path) -> VideoClasses:
    """Return the 30 classes of ImageNet-Vid, from the files of the data set if they exist."""
    files = ("wnid_map", "imagenet_class_index", "imagenet_vid_class_index")
    if not all((misc / f"{name}.json").is_file() for name in files):
        return _of_table(_VID)
    parents, imagenet, videos = (read_json(misc / f"{name}.json") for name in files)
    ids = {wnid: int(key) for key, (wnid, *_) in imagenet.items()}
    classes = {wnid: int(key) for key, (wnid, *_) in videos.items()}
    owner = torch.full((IMAGENET,), -1)
    for wnid, parent in parents.items():
        owner[ids[wnid]] = classes[parent]
    names = tuple(videos[str(i)][1] for i in range(len(videos)))
    return VideoClasses(names, owner)


def ytbb_classes() -> VideoClasses:
    """Return the 24 classes of YouTube-BoundingBoxes; five of them are not in ImageNet."""
    return _of_table(_YTBB)


def imagenet_wnids(root: str | Path) -> tuple[str, ...]:
    """Return the 1000 ILSVRC class names such as n01440764, sorted; their ranks are PyTorch ids.

    They are read from the folders of train/ or val/, of the Kaggle layout, or of the root; else
    from LOC_synset_mapping.txt; else from torchvision's meta.bin.
    """
    root = Path(root).expanduser()
    seen = []
    kaggle = root / "ILSVRC" / "Data" / "CLS-LOC" / "train"
    for folder in (root / "train", root / "val", kaggle, root):
        if folder.is_dir():
            seen.append(
                (folder, _all_wnids(path.name for path in folder.iterdir() if path.is_dir()))
            )
    if (text := root / "LOC_synset_mapping.txt").is_file():
        seen.append(
            (text, _all_wnids(line.split(" ")[0] for line in text.read_text().splitlines()))
        )
    if (meta := root / "meta.bin").is_file():
        seen.append((meta, _all_wnids(_meta(meta))))
    for _, wnids in seen:
        if len(wnids) == IMAGENET:
            return wnids
    found = ", ".join(f"{len(wnids)} in {place}" for place, wnids in seen if wnids) or "found none"
    raise FileNotFoundError(
        f"{root} has not the {IMAGENET} class names of ImageNet: {found}; it needs train/ or val/ "
        f"with a folder n01440764, ... for each, or LOC_synset_mapping.txt, or torchvision's "
        f"meta.bin"
    )


def objectnet_ids(mappings: Path) -> dict[str, tuple[int, ...]]:
    """Return the ImageNet ids of each ObjectNet folder that has any: 113 folders, 125 ids.

    The path is folder -> ObjectNet label -> ImageNet label texts -> their lines, from 0, in the
    file of all 1000 -> PyTorch ids.
    """
    folders = read_json(mappings / "folder_to_objectnet_label.json")
    texts = read_json(mappings / "objectnet_to_imagenet_1k.json")
    of_line = {
        int(line): int(key)
        for key, line in read_json(mappings / "pytorch_to_imagenet_2012_id.json").items()
    }
    file = mappings / "imagenet_to_label_2012_v2"
    lines = file.read_text(encoding="utf-8").splitlines()
    ids = {line.strip(): of_line[number] for number, line in enumerate(lines) if line.strip()}
    found = {}
    for folder, label in folders.items():
        wanted = texts[label].split("; ") if label in texts else []
        if unknown := [text for text in wanted if text.strip() not in ids]:
            raise ValueError(f"{file} has no line {unknown[0]!r}, which {label!r} stands for")
        if wanted:
            found[folder] = tuple(sorted(ids[text.strip()] for text in wanted))
    return found


def read_json(path: Path) -> Any:
    """Read a JSON file; raise ValueError with its name if it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} is not a complete JSON file: {error}; download it again"
        ) from None


def _of_table(table: dict[str, str]) -> VideoClasses:
    owner = torch.full((IMAGENET,), -1)
    for video_class, ranges in enumerate(table.values()):
        for span in filter(None, ranges.split(",")):
            first, _, last = span.partition("-")
            owner[int(first) : int(last or first) + 1] = video_class
    return VideoClasses(tuple(table), owner)


def _all_wnids(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({name for name in names if re.fullmatch(r"n\d{8}", name)}))


def _meta(path: Path) -> Iterable[str]:
    try:
        names, _ = torch.load(path, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, TypeError):
        return ()
    return names

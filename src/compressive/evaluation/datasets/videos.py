"""Anchor frames and their neighbors in the two video robustness sets."""

import csv
from pathlib import Path
from typing import NamedTuple

from compressive.evaluation.datasets.imagenet_labels import (
    VideoClasses,
    read_json,
    vid_classes,
    ytbb_classes,
)

WITHIN = 10  # frames on either side of an anchor

# Review marks of YTBB-Robust for pairs that must not be compared.
_DIFFERENT = {
    *("dissimilar", "problematic", "incorrect", "dont know", "deformation"),
    *("background-change", "occlusion-increased", "blur-increase", "bad-anchor"),
}
# Usual folders of the annotations of YTBB-Robust, which are not in the archive of its frames.
_KEPT = (".", "metadata", "misc", "ytbb-robust_metadata", "../ytbb-robust_metadata")


class Videos(NamedTuple):
    """Anchors with their neighbors, and the correct video classes of every frame."""

    classes: VideoClasses
    neighbors: dict[str, list[str]]  # by anchor; frames are written folder/file
    right: dict[str, set[int]]

    def frames(self) -> list[str]:
        """Return all frames once, neighbors after their anchor."""
        pairs = self.neighbors.items()
        return [*dict.fromkeys(frame for anchor, near in pairs for frame in (anchor, *near))]


def read_vid(root: Path) -> Videos:
    """Read ImageNet-Vid-Robust, where every frame has its own labels."""
    pmsets = read_json(root / "metadata" / "pmsets.json")
    labels = read_json(root / "metadata" / "labels.json")
    neighbors = {_frame(anchor): [*map(_frame, near)] for anchor, near in pmsets.items()}
    right = {_frame(key): {int(label) for label in found} for key, found in labels.items()}
    videos = Videos(vid_classes(root / "misc"), neighbors, right)
    if bare := [frame for frame in videos.frames() if not right.get(frame)]:
        raise ValueError(f"{root}/metadata/labels.json has no label for {bare[0]} of pmsets.json")
    return videos


def read_ytbb(root: Path) -> Videos:
    """Read YTBB-Robust: reviewed anchors and neighbors, which have the labels of their anchor.

    An anchor is kept if it is marked good, neither bad nor unsure, and no review of a neighbor
    marks it bad. A neighbor is kept if it is marked similar and has no mark in `_DIFFERENT`. The
    labels of an anchor are those of its annotation and the original one in the CSV file.
    """
    classes = ytbb_classes()
    ids = {name: i for i, name in enumerate(classes.names)}
    table = _annotation(root, "ytbb_robustness_test_anchors_full.csv")
    first = _first_labels(table)
    reviews = _marks(_annotation(root, "pmk_labels.json"))
    bad = {anchor for (anchor, _), marks in reviews.items() if "bad-anchor" in marks}
    neighbors: dict[str, list[str]] = {}
    right: dict[str, set[int]] = {}
    for (anchor,), marks in _marks(_annotation(root, "anchor_labels.json")).items():
        if "good" in marks and not marks & {"bad", "unsure"} and anchor not in bad:
            if (folder := anchor.split("/")[0]) not in first:
                raise ValueError(f"{table} has no row for the anchor {anchor}; download it again")
            neighbors[anchor] = []
            right[anchor] = {ids[mark] for mark in marks & ids.keys()} | {first[folder]}
    for (anchor, near), marks in reviews.items():
        similar = "similar" in marks and not marks & _DIFFERENT
        if similar and anchor in neighbors and 0 < _distance(anchor, near) <= WITHIN:
            neighbors[anchor].append(near)
            right[near] = right[anchor]
    return Videos(classes, neighbors, right)


def _annotation(root: Path, name: str) -> Path:
    for folder in _KEPT:
        if (path := root / folder / name).is_file():
            return path
    raise FileNotFoundError(
        f"no {name} in {root} or {', '.join(_KEPT[1:])}: the annotations of YTBB-Robust are not in "
        f"the archive of its frames; imagenet-testbed and wise-ft have them in ytbb-robust_metadata"
    )


def _marks(path: Path) -> dict[tuple[str, ...], set[str]]:
    """Return the review marks of each frame or pair of frames; the last review wins."""
    found = read_json(path)
    names: list[str] = found["labels"]
    return {
        tuple(map(_frame, row["key"].split(","))): {names[mark] for mark in row["labels"]}
        for row in found["annotations"]
    }


def _first_labels(path: Path) -> dict[str, int]:
    """Return the label of each folder's anchor; labels 22 and 23 are swapped in the CSV file."""
    exchanged = {22: 23, 23: 22}
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(f"{r['ytid']}_{r['time_ms']}", int(r["label"])) for r in csv.DictReader(file)]
    return {folder: exchanged.get(label, label) for folder, label in rows}


def _distance(anchor: str, frame: str) -> int:
    """Return the number of frames between two of one folder; 0 if their folders differ."""
    (here, one), (there, other) = (key.split("/") for key in (anchor, frame))
    number = [int(name.removeprefix("frame-").partition(".")[0]) for name in (one, other)]
    return abs(number[0] - number[1]) if here == there else 0


def _frame(key: str) -> str:
    """Return folder/file of a frame; some keys start with other folders."""
    return "/".join(key.strip().split("/")[-2:])

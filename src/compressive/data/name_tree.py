"""Splits and classes from the names of files in an archive, as for a folder with these files."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from compressive.data.decode import EXTENSIONS
from compressive.data.source import SPLITS, choose_split

_Parts = tuple[str, ...]


class Branch(NamedTuple):
    """Indices of the images of a split, in the order of a folder, and their labels if any."""

    index: list[int]
    labeled: dict[str, Any]  # arguments of `ImageSource`


def choose_branch(
    names: Sequence[str], split: str, place: str | Path, whole: Sequence[str] = ("train",)
) -> Branch:
    """Return the images of a split among files with these names, and the classes.

    A single top folder that holds everything is skipped. Then the rules of folders apply: split
    folders, class folders, or a flat folder without labels. Hidden files are left out. `whole` are
    the names of the split of all images, if there are no split folders.
    """
    images = {i: parts for i, name in enumerate(names) if _is_image(parts := _parts(name))}
    images = _without_root(images)
    named = _split_names(images.values())
    chosen = choose_split(split, named or whole, place)
    if named:
        others = sum(parts[0] not in named or len(parts) == 1 for parts in images.values())
        if others:
            splits = ", ".join(named)
            warnings.warn(
                f"{place} has the splits {splits}; not used: {others:,} images", stacklevel=1
            )
    inside = {i: p[1:] for i, p in images.items() if len(p) > 1 and p[0] == chosen}
    inside = inside if named else images
    # Sorted as a folder is listed: images of a folder come before its subfolders.
    index = sorted(inside, key=lambda i: _listing_order(inside[i]))
    # Class ids are the same in every split, even if a split lacks a class.
    below = [p[1:] for p in images.values() if p[0] in named] if named else images.values()
    classes = tuple(sorted({p[0] for p in below if len(p) > 1}))
    if len(classes) < 2 or any(len(parts) == 1 for parts in inside.values()):
        return Branch(index, {})
    ids = {name: i for i, name in enumerate(classes)}
    labels = np.array([ids[inside[i][0]] for i in index], dtype=np.int64)
    return Branch(index, {"labels": torch.from_numpy(labels), "classes": classes})


def _parts(name: str) -> _Parts:
    return tuple(part for part in name.split("/") if part not in ("", "."))


def _is_image(parts: _Parts) -> bool:
    """Return whether a file is an image and neither hidden nor metadata of macOS."""
    if not parts or any(part.startswith(".") or part == "__MACOSX" for part in parts):
        return False
    return os.path.splitext(parts[-1])[1].lower() in EXTENSIONS


def _without_root(images: dict[int, _Parts]) -> dict[int, _Parts]:
    """Drop folders that hold everything, except split folders."""
    while images and len({parts[0] for parts in images.values()}) == 1:
        is_split = next(iter(images.values()))[0].lower() in SPLITS
        if is_split or any(len(parts) == 1 for parts in images.values()):
            break
        images = {i: parts[1:] for i, parts in images.items()}
    return images


def _split_names(images: Any) -> list[str]:
    """Return the top folders that are splits; a single one among others may be a class."""
    tops: dict[str, int] = {}  # the deepest level in each
    for parts in images:
        if len(parts) > 1:
            tops[parts[0]] = max(tops.get(parts[0], 0), len(parts))
    named = sorted(name for name in tops if name.lower() in SPLITS)
    if len(named) == 1 and len(tops) > 1 and tops[named[0]] == 2:
        return []
    return named


def _listing_order(parts: _Parts) -> tuple[tuple[int, str], ...]:
    return (*((1, folder) for folder in parts[:-1]), (0, parts[-1]))

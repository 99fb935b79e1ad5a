"""Torchvision data sets as sources, from disk or downloaded."""

import difflib
import inspect
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from compressive.data.decode import Unreadable, first_line, rgb
from compressive.data.source import (
    CALLED,
    ImageSource,
    NoSplit,
    Source,
    choose_split,
    labeled,
    read_file,
)
from compressive.rundir.files import local_path

# These sets load a pickle file without a check of its checksum.
_PICKLED = ("LSUN", "LSUNClass")


def open_torchvision(place: str, split: str, *, download: bool = True) -> Source:
    """Open `torchvision:NAME` or `torchvision:NAME@ROOT`, and download it if it is missing."""
    from torchvision import datasets

    name, _, folder = place.removeprefix("torchvision:").partition("@")
    kind = getattr(datasets, name, None)
    if name in _PICKLED:
        risk = "loads a pickle file, which could run code"
        raise ValueError(f"{place} {risk}; give its images as a folder")
    if not (inspect.isclass(kind) and issubclass(kind, datasets.VisionDataset)):
        known = [one for one in datasets.__all__ if one not in ("FakeData", "VisionDataset")]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"torchvision.datasets has no {name!r}; {hint}")
    root = local_path(folder or os.environ.get("COMPRESSIVE_DATA") or "~/.cache/compressive")
    accepts = _parameters(kind)
    # With `str` as the loader, items are file paths and labels, and no image is read.
    offered: dict[str, Any] = {"root": str(root), "loader": str}
    given = {key: value for key, value in offered.items() if key in accepts}
    make = cast(Callable[..., Any], kind)

    def build(**chosen: Any) -> Any:
        try:
            return make(**given, **chosen)
        except (OSError, RuntimeError):  # missing; some sets raise an error on a second download
            if not download or "download" not in accepts:
                raise
            root.mkdir(parents=True, exist_ok=True)
            return make(**given, **chosen, download=True)

    was_there = root.exists()
    try:
        return _of_torchvision(place, _with_split(build, accepts, split, place), "loader" in given)
    except (OSError, RuntimeError) as error:
        if not was_there:
            with suppress(OSError):
                root.rmdir()  # fails if a partial download is in it
        raise FileNotFoundError(
            f"{place} is not in {root} and could not be downloaded ({first_line(error)}); connect "
            f"to the internet, or name the folder that holds it: torchvision:{name}@FOLDER"
        ) from error
    except TypeError as error:
        why = f"is not a set of images with one class each ({first_line(error)})"
        raise ValueError(f"{place} {why}") from error


def _parameters(kind: type) -> set[str]:
    """Return the names of the constructor's parameters; `**kwargs` means those of the parent."""
    names = set()
    for parent in kind.__mro__:
        parameters = inspect.signature(parent.__init__).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def _with_split(build: Callable[..., Any], accepts: set[str], split: str, place: str) -> Any:
    """Build a set with its split given by `train=`, by `split=`, or not at all."""
    if "split" not in accepts:
        flagged = "train" in accepts
        chosen = choose_split(split, ("train", "test") if flagged else ("train",), place)
        return build(train=chosen == "train") if flagged else build()
    words = ""
    for name in CALLED.get(split, (split,)):
        try:
            return build(split=name)
        except ValueError as error:
            if "split" not in str(error):
                raise
            words = first_line(error)
    raise NoSplit(f"{place} has no split {split!r}; {words}")


def _listed_files(dataset: Any) -> tuple[list[str], list[int]] | None:
    """Return the files and classes that a set lists; older versions have no `loader`."""
    files, labels = (getattr(dataset, name, None) for name in ("_image_files", "_labels"))
    if files is None or labels is None or not len(files) == len(labels) == len(dataset):
        return None
    return [str(file) for file in files], list(labels)


def _of_torchvision(place: str, dataset: Any, by_path: bool) -> Source:
    match dataset[0]:
        case (str() | Image.Image(), int() | np.integer() | None):
            every = range(len(dataset))
        case _:
            raise TypeError("its items are not pairs of an image and a class")
    files: list[str] = []
    known = (getattr(dataset, name, None) for name in ("targets", "labels", "y"))
    values = next((v for v in known if v is not None and len(v) == len(dataset)), None)
    if by_path:
        files, values = map(list, zip(*(dataset[i] for i in every), strict=True))
    elif known_files := _listed_files(dataset):
        (files, values), by_path = known_files, True
    elif values is None:
        values = [dataset[i][1] for i in every]

    def pixels(i: int) -> UInt8[Tensor, "3 h w"]:
        try:
            return rgb(dataset[i][0])
        except Exception as error:  # as in `decode`
            raise Unreadable(first_line(error)) from error

    names = getattr(dataset, "classes", None) or []
    return ImageSource(
        name=place.partition("@")[0],
        count=len(dataset),
        read=(lambda i: read_file(files[i])) if by_path else pixels,
        place=(lambda i: files[i]) if by_path else (lambda i: f"{place}:{i}"),
        span=(lambda i: (files[i], 0, -1)) if by_path else None,
        **labeled(
            [None if value is None else int(value) for value in values],
            # ImageNet's classes have several names each.
            [name if isinstance(name, str) else ", ".join(name) for name in names],
        ),
    )

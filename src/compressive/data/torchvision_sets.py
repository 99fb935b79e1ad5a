"""Torchvision's named sets as sources: found on disk, or fetched, in whatever way each wants."""

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

# They read it wherever they are called from, without a look at its checksum.
_PICKLED = ("LSUN", "LSUNClass")


def open_torchvision(place: str, split: str, *, download: bool = True) -> Source:
    """A set by its name, `torchvision:NAME` or `torchvision:NAME@ROOT`, fetched if need be."""
    from torchvision import datasets

    name, _, folder = place.removeprefix("torchvision:").partition("@")
    kind = getattr(datasets, name, None)
    if name in _PICKLED:
        risk = "keeps a pickle beside its images, which could run code"
        raise ValueError(f"{place} {risk}; give its images as a folder")
    if not (inspect.isclass(kind) and issubclass(kind, datasets.VisionDataset)):
        known = [one for one in datasets.__all__ if one not in ("FakeData", "VisionDataset")]
        near = difflib.get_close_matches(name, known, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(known)}"
        raise ValueError(f"torchvision.datasets has no {name!r}; {hint}")
    root = local_path(folder or os.environ.get("COMPRESSIVE_DATA") or "~/.cache/compressive")
    accepts = _parameters(kind)
    # With `str` in place of a decoder a set tells its files and their labels without reading any.
    offered: dict[str, Any] = {"root": str(root), "loader": str}
    given = {key: value for key, value in offered.items() if key in accepts}
    make = cast(Callable[..., Any], kind)

    def build(**chosen: Any) -> Any:
        try:
            return make(**given, **chosen)
        except (OSError, RuntimeError):  # not there yet; some sets refuse to download twice
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
                root.rmdir()  # it is empty, or has what came before the connection broke
        raise FileNotFoundError(
            f"{place} is not in {root} and could not be fetched ({first_line(error)}); it needs "
            f"internet once, or the folder that has it: torchvision:{name}@FOLDER"
        ) from error
    except TypeError as error:
        why = f"is not a set of images with one class each ({first_line(error)})"
        raise ValueError(f"{place} {why}") from error


def _parameters(kind: type) -> set[str]:
    """What a class can be made with; `**kwargs` stands for what its parent takes."""
    names = set()
    for parent in kind.__mro__:
        parameters = inspect.signature(parent.__init__).parameters
        names |= parameters.keys()
        if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            break
    return names


def _with_split(build: Callable[..., Any], accepts: set[str], split: str, place: str) -> Any:
    """A torchvision set in the way it wants its split told: a flag, a word, or not at all."""
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


def _of_torchvision(place: str, dataset: Any, by_path: bool) -> Source:
    match dataset[0]:
        case (str() | Image.Image(), int() | np.integer() | None):
            every = range(len(dataset))
        case _:
            raise TypeError("its items are not an image and a class")
    files: list[str] = []
    known = (getattr(dataset, name, None) for name in ("targets", "labels", "y"))
    values = next((v for v in known if v is not None and len(v) == len(dataset)), None)
    if by_path:
        files, values = map(list, zip(*(dataset[i] for i in every), strict=True))
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
        **labeled(
            [None if value is None else int(value) for value in values],
            # ImageNet's classes have several names each.
            [name if isinstance(name, str) else ", ".join(name) for name in names],
        ),
    )

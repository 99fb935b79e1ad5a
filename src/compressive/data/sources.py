"""Open a source: a folder, shards, an archive, a list, a torchvision set, or Python objects."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from compressive.data.archives import archive_ending, has_sidecars, open_archive
from compressive.data.decode import EXTENSIONS, MAX_PIXELS
from compressive.data.image_lists import is_list, open_list
from compressive.data.location import ALLOWED, PYTHON, ImageData, check_exists
from compressive.data.remote_shards import open_remote
from compressive.data.saved_datasets import open_arrow, saved_splits
from compressive.data.several import open_objects
from compressive.data.shard_file import split_in_name
from compressive.data.shards import open_parquet, open_tar
from compressive.data.source import (
    SPLITS,
    ImageSource,
    NoSplit,
    Source,
    choose_split,
    read_file,
    subset,
    with_max_pixels,
)
from compressive.data.torchvision_sets import open_torchvision
from compressive.data.unsupported import FOREIGN, archive_hint, conversion_hint, file_advice
from compressive.rundir.files import local_path
from compressive.rundir.places import split_places
from compressive.storage.address import is_remote

__all__ = ["ImageSource", "Source", "open_source", "subset"]

_MANY = 10  # images next to shards that make a folder ambiguous; a few may be a banner
_FAR = 100  # folders that are searched for images; a folder may hold a million annotations
_BUILTIN = {"train": 6000, "test": 2400}  # images; the 12 classes have equal numbers


def open_source(place: ImageData, split: str = "train", *, max_pixels: int = MAX_PIXELS) -> Source:
    """Open a source of images:

    - `builtin`: synthetic images, splits train and test.
    - `torchvision:NAME` or `torchvision:NAME@ROOT`: a torchvision set, downloaded if missing; ROOT
      defaults to `$COMPRESSIVE_DATA`, else `~/.cache/compressive`.
    - `*.parquet` as written by Hugging Face, `*.tar` as written by WebDataset: one file, or a
      folder of them (also in `data/`). The name of a file or its folder contains the split.
    - `s3://`, `gs://` or `hf://`: such a file or folder on object storage.
    - A folder written by `save_to_disk` of Hugging Face's datasets, or `*.arrow` files.
    - `.zip`, `.tar.gz` and other compressed tar archives of the following kinds of folders.
    - `.txt`, `.csv`, `.tsv` or `.parquet`: a list of image files with the column `path` and
      optionally `label` and `split`; `.txt` has only paths.
    - Folders `train`, `val`, ... as in ImageNet: one split each, as one of the following.
    - Class folders: images only in subfolders, two or more. The topmost folder is the class.
    - A flat folder: images directly in it, with those of subfolders if there are any; no labels.

    - A list of several of these: one source with all images; classes are merged by name.
    - A Python object: a `Source`, `datasets.Dataset`, torchvision `ImageFolder` or any map-style
      torch `Dataset`, or a dict of them by split, such as `datasets.DatasetDict`.

    A source without splits is `train`. Images are recognized by their extension, in upper or lower
    case. Hidden files and folders are skipped. The order is that of the sorted names. Images with
    more than `max_pixels` pixels are unreadable.
    """
    if not isinstance(place, str | Path) or len(split_places(str(place))) > 1:
        opened = open_objects(place, split, partial(open_source, max_pixels=max_pixels))
        return with_max_pixels(opened, max_pixels)
    text = str(place)
    if text == "builtin":
        return _open_builtin(split)
    if text.startswith(PYTHON):
        raise ValueError(f"{text} is a Python object, which cannot be opened by name; give a path")
    if text.startswith("torchvision:"):
        return with_max_pixels(open_torchvision(text, split), max_pixels)
    if is_remote(text):
        return with_max_pixels(open_remote(text, split), max_pixels)
    check_exists(text)
    path = local_path(place)
    source = _open_path(path, split)
    if not len(source):
        raise ValueError(
            f"no images in {path}, split {split}: looked for {' '.join(sorted(EXTENSIONS))} in it "
            "and its subfolders, for *.parquet, *.tar and *.arrow; "
            f"{archive_hint(path)}allowed: {ALLOWED}"
        )
    return with_max_pixels(source, max_pixels)


def _open_path(path: Path, split: str) -> Source:
    if path.is_file() and (opened := _open_file(path, split)) is not None:
        return opened
    if saved := saved_splits(path):
        return open_arrow(path, saved[choose_split(split, saved, path)])
    parquet, tars, arrow = (_shards(path, kind) for kind in (".parquet", ".tar", ".arrow"))
    # ImageNet's root often still holds the archives that its folders were extracted from.
    if tars and _split_folders(path):
        tars = {}
    shard = next(chain(*parquet.values(), *tars.values(), *arrow.values()), None)
    if path.is_dir() and shard is not None:
        images = list(islice(_image_paths(path), _MANY))
        if len(images) == _MANY:
            raise ValueError(
                f"{path} is ambiguous: it holds images, such as {images[0]}, and the shard "
                f"{shard.relative_to(path)}; give {shard} itself, or move it elsewhere"
            )
    if parquet:
        return open_parquet(path, parquet[choose_split(split, parquet, path)])
    if tars:
        return open_tar(path, tars[choose_split(split, tars, path)])
    if arrow:
        return open_arrow(path, arrow[choose_split(split, arrow, path)])
    if not path.is_dir():
        raise ValueError(f"{path} is {file_advice(path)}")
    return _open_folder(path, split)


def _open_file(path: Path, split: str) -> Source | None:
    """Open a list or an archive; return None for other files and for shards."""
    if is_list(path):
        return open_list(path, split)
    ending = archive_ending(path)
    if ending and not (ending == ".tar" and has_sidecars(path)):
        return open_archive(path, split, split_in_name(path.name))
    return None


def _image_paths(folder: str | Path) -> Iterator[str]:
    """Yield relative paths of images in a folder and its subfolders, at most `_FAR` folders."""
    for place, folders, files in islice(os.walk(folder), _FAR):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in EXTENSIONS:
                yield os.path.relpath(os.path.join(place, name), folder)


class _Listing(NamedTuple):
    images: list[str]
    folders: list[str]
    shards: list[str]
    foreign: list[str]


def _listing(folder: str | Path) -> _Listing:
    """List the names in a folder by kind, sorted, without opening files."""
    found = _Listing([], [], [], [])
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            extension = name[name.rfind(".") :].lower()
            if name.startswith("."):
                continue
            try:
                is_folder, is_file = entry.is_dir(), entry.is_file()
            except OSError:  # a link to itself; with an image extension, reading it will fail
                is_folder = is_file = False
            if is_folder:
                found.folders.append(name)
            elif extension in EXTENSIONS:
                found.images.append(name)
            elif is_file and extension in (".parquet", ".tar", ".arrow"):
                found.shards.append(name)
            elif extension in FOREIGN:
                found.foreign.append(extension)
    for names in found:
        names.sort()
    return found


def _below(folder: str, prefix: str, above: tuple[str, ...], foreign: Counter[str]) -> list[str]:
    """List images in a folder and its subfolders, with the prefix; count unsupported ones."""
    # A link to one of its own parent folders is skipped, because it would recurse without end.
    real = os.path.realpath(folder)
    if real in above or any(path.startswith(f"{real.rstrip('/')}/") for path in above):
        return []
    images, folders, _, others = _listing(folder)
    foreign.update(others)
    found = [prefix + name for name in images]
    for name in folders:
        found += _below(f"{folder}/{name}", f"{prefix}{name}/", (*above, real), foreign)
    return found


def _open_folder(root: Path, split: str) -> Source:
    splits = _split_folders(root)
    beside = _beside(root, splits) if splits else ""
    try:
        chosen = choose_split(split, splits or ["train"], root)
    except NoSplit as error:
        hint = f"; it also has {beside}: move the images of this split to {root / split}"
        raise NoSplit(f"{error}{hint if beside else ''}") from None
    if beside:
        note = f"{root} has the splits {', '.join(splits)}; not used: {beside}"
        warnings.warn(note, stacklevel=1)
    base = root / chosen if splits else root
    direct, folders, _, others = _listing(base)
    foreign = Counter(others)
    above = (os.path.realpath(base),)
    inner = {name: _below(f"{base}/{name}", f"{name}/", above, foreign) for name in folders}
    inner = {name: paths for name, paths in inner.items() if paths}
    paths = [*direct, *chain.from_iterable(inner.values())]
    if foreign:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in foreign.most_common())
        hint = conversion_hint(foreign)
        warnings.warn(f"skipped unsupported files in {root}: {kinds}; {hint}", stacklevel=1)
    # Class ids are the same in every split, even if a split lacks a class.
    other_splits = [root / other for other in splits if other != chosen]
    others = [folder / name for folder in other_splits for name in _listing(folder).folders]
    unknown = [path for path in others if path.name not in inner]
    elsewhere = {path.name for path in unknown if _below(str(path), "", (), Counter())}
    classes = tuple(sorted(elsewhere | inner.keys()))
    labeled = {}
    if not direct and len(classes) > 1:
        ids = {name: i for i, name in enumerate(classes)}
        own = np.array([ids[name] for name in inner], dtype=np.int64)  # keep int64 if empty
        labels = np.repeat(own, [len(paths) for paths in inner.values()])
        labeled = {"labels": torch.from_numpy(labels), "classes": classes}
    return ImageSource(
        name=root.resolve().name,
        count=len(paths),
        read=lambda i: read_file(f"{base}/{paths[i]}"),
        place=lambda i: f"{base}/{paths[i]}",
        span=lambda i: (f"{base}/{paths[i]}", 0, -1),
        root=str(base),
        **labeled,
    )


def _beside(root: Path, splits: list[str]) -> str:
    """Describe the images outside of the split folders."""
    images, folders, *_ = _listing(root)
    other = [name for name in folders if name not in splits]
    left = [f"{name}/" for name in other if next(_image_paths(root / name), "")]
    left += [f"{len(images):,} images"] if images else []
    more = f" and {len(left) - 5} more" if len(left) > 5 else ""
    return ", ".join(left[:5]) + more


def _split_folders(root: Path) -> list[str]:
    """Return the subfolders that are splits; a single one among others may be a class."""
    if not root.is_dir():
        return []
    folders = _listing(root).folders
    named = [name for name in folders if name.lower() in SPLITS]
    if len(named) == 1 and len(folders) > 1 and not _listing(root / named[0]).folders:
        return []
    inside = {name: _listing(root / name) for name in named}
    return [name for name, found in inside.items() if found.images or found.folders]


def _shards(path: Path, suffix: str) -> dict[str, list[Path]]:
    """Return the shards of each split."""
    if path.is_file():
        # A single file is also the train split, whatever its name.
        own = split_in_name(path.name) or "train"
        return {name: [path] for name in ("train", own)} if path.suffix.lower() == suffix else {}
    found: dict[str, list[Path]] = {}
    for folder in (path, path / "data"):
        inside = [folder / name for name in sorted(SPLITS)]
        for part in filter(Path.is_dir, [folder, *inside]):
            default = "train" if part is folder else part.name
            for name in _listing(part).shards:
                if name.lower().endswith(suffix):
                    found.setdefault(split_in_name(name) or default, []).append(part / name)
    return found


def _open_builtin(split: str) -> Source:
    from compressive.data.synthetic import CLASSES, pictures

    split = choose_split(split, _BUILTIN, "builtin")
    pixels, labels = (torch.from_numpy(a) for a in pictures(_BUILTIN[split], split=split))
    return ImageSource(
        name="builtin",
        count=len(pixels),
        read=lambda i: pixels[i],
        place=lambda i: f"builtin:{split}:{i}",
        labels=labels,
        classes=CLASSES,
    )

"""Check the location of a source of images without importing torch."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressive.rundir.files import local_path
from compressive.rundir.places import split_places
from compressive.storage.address import is_remote

# A path or name, a list of sources, a dict of them by split, a `Source`, or a data set.
ImageData = Any
ALLOWED = (
    "a folder of images or of class folders, with or without train/ and val/; a folder of *.parquet"
    " or *.tar shards, or one of them, also on s3://, gs:// or hf://; a folder of save_to_disk or"
    " *.arrow; a .zip or .tar.gz archive; a .txt, .csv or .parquet list of paths; torchvision:NAME;"
    " or builtin"
)
PYTHON = "python:"  # prefix of the name of a source object, which cannot be opened by name
_NOT_PATHS = ("torchvision:", PYTHON)


def check_exists(place: str) -> None:
    """Raise an error with similar names if this is a path and nothing is there."""
    if len(several := split_places(place)) > 1:
        for each in several:
            check_exists(each)
        check_distinct(several)
        return
    if place == "builtin" or place.startswith(_NOT_PATHS):
        return
    if not place.strip():
        raise ValueError(f"the source of images is empty; it can be {ALLOWED}")
    if is_remote(place):
        from compressive.storage.remote_file import list_shards

        list_shards(place)
        return
    path = local_path(place)
    if not path.exists():
        raise FileNotFoundError(_missing(path))


def check_distinct(places: Sequence[str | Path]) -> None:
    """Raise ValueError if a source is given twice or is a folder inside of another one."""
    known: list[Path] = []
    for i, place in enumerate(places):
        if place in places[:i]:
            raise ValueError(f"{place} is given twice; give each source once")
        if not (path := Path(place).expanduser()).exists():
            continue
        path = path.resolve()
        for other in known:
            inner, outer = sorted((path, other), key=lambda p: len(p.parts), reverse=True)
            if inner == outer:
                raise ValueError(f"{place} is given twice; give each source once")
            if inner.is_dir() and inner.is_relative_to(outer):
                raise ValueError(f"{inner} is a part of {outer}; give only one of them")
        known.append(path)


def _missing(path: Path) -> str:
    """Return the message for a path that does not exist, with similar names."""
    there, wanted = path.absolute(), path.name
    while not there.exists():
        wanted, there = there.name, there.parent
    names = sorted(os.listdir(there)) if there.is_dir() else []
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    hint = f"; {there} has {' and '.join(near)}" if near else ""
    return f"no file or folder {path}{hint}; a source can be {ALLOWED}"

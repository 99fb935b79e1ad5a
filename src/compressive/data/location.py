"""Check the location of a source of images without importing torch."""

import difflib
import os
from pathlib import Path

from compressive.rundir.files import local_path
from compressive.storage.address import is_remote

ALLOWED = (
    "a folder of images or of class folders, with or without train/ and val/; a folder of *.parquet"
    " or *.tar shards, or one of them, also on s3://, gs:// or hf://; torchvision:NAME; or builtin"
)
PYTHON = "python:"  # prefix of the name of a source object, which cannot be opened by name
_NOT_PATHS = ("torchvision:", PYTHON)


def check_exists(place: str) -> None:
    """Raise an error with similar names if this is a path and nothing is there."""
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


def _missing(path: Path) -> str:
    """Return the message for a path that does not exist, with similar names."""
    there, wanted = path.absolute(), path.name
    while not there.exists():
        wanted, there = there.name, there.parent
    names = sorted(os.listdir(there)) if there.is_dir() else []
    near = difflib.get_close_matches(wanted, names, n=3, cutoff=0.6)
    hint = f"; {there} has {' and '.join(near)}" if near else ""
    return f"no file or folder {path}{hint}; a source can be {ALLOWED}"

"""Shards as local or remote files, and what both formats share."""

import re
from pathlib import Path
from typing import Any

from compressive.data.source import SPLITS
from compressive.storage.remote_file import RemoteFile

ShardFile = Path | RemoteFile
CLASSES_FILE = "classes.txt"  # class names next to tar shards, one per line
LABEL_NAMES = ("label", "labels", "fine_label", "cls", "class", "target")


def name_and_root(path: Path | str) -> dict[str, str]:
    """Return name and root of a source; a remote one has no folder that could be unavailable."""
    if isinstance(path, str):
        return {"name": path.rstrip("/").rpartition("/")[2]}
    return {"name": path.resolve().name, "root": str(path)}


def parquet_input(file: ShardFile) -> Any:
    """Return what pyarrow reads from."""
    return file.open() if isinstance(file, RemoteFile) else file


def file_size(file: ShardFile) -> int:
    """Return the bytes of a shard."""
    return file.size if isinstance(file, RemoteFile) else file.stat().st_size


def split_in_name(name: str) -> str | None:
    """Return the split in a shard's name, as in train-00000-of-00002 or imagenet1k-val-07."""
    words = [word for word in re.split(r"[-_.]", name.lower()) if word in SPLITS]
    whole = re.match(r"(.+?)-\d{5}-of-\d{5}", name)
    return words[0] if words else whole[1] if whole else None


def read_beside(file: ShardFile, name: str) -> bytes | None:
    """Return a small file in the folder of a shard, or None if there is none."""
    if isinstance(file, RemoteFile):
        return file.read_beside(name)
    path = file.with_name(name)
    return path.read_bytes() if path.is_file() else None

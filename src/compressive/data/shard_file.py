"""Shards as local or remote files, and what both formats share."""

from pathlib import Path
from typing import Any

from compressive.storage.remote_file import RemoteFile

ShardFile = Path | RemoteFile
LABELS = ("label", "labels", "fine_label", "cls", "class", "target")


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

"""Write one shard of packed images, in this process or in one of a cluster."""

import functools
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from compressive.data.all_splits import open_all_splits
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.location import ImageData
from compressive.data.repack import prepare_all
from compressive.data.shard_writers import WRITERS, PackedImage
from compressive.data.source import Source
from compressive.progress import printable
from compressive.rundir.files import DISK_FULL, PARTIAL
from compressive.storage.address import is_remote, split_address
from compressive.storage.backend import StorageMissing, attempt, backend_for

# What a shard holds: "images" and "duplicates" are counts, "unreadable" has lines, and "digests"
# those of the pixels of each image in it.
ShardRecord = dict[str, Any]


class ShardUnit(NamedTuple):
    """Everything that is needed to write a shard; the images are opened where it is written."""

    data: ImageData
    fingerprint: str  # of the split: another machine may have other files at the same place
    split: str
    first: int
    last: int  # exclusive
    place: str  # a path, or an address on storage
    settings: dict[str, Any]
    classes: tuple[str, ...] | None
    workers: int
    drop: frozenset[str] = frozenset()  # digests of images to leave out


def write_shard(unit: ShardUnit) -> ShardRecord:
    """Open the images of a shard and write it; return what it holds."""
    return fill_shard(unit, _opened_split(unit.data, unit.split, unit.fingerprint))


@functools.lru_cache(maxsize=4)
def _opened_split(data: str, split: str, fingerprint: str) -> Source:
    source = open_all_splits(data).get(split)
    require_same_images(source, fingerprint, data)
    assert source is not None
    return source


def require_same_images(source: Source | None, fingerprint: str, place: str) -> None:
    """Raise ValueError if the images here are not those of the process that sends units."""
    if source is None or DatasetFingerprint(source).of() != fingerprint:
        raise ValueError(
            f"{place} has other images on {os.uname().nodename} than where the command was "
            "started; use object storage, or a file system that all machines share"
        )


def fill_shard(
    unit: ShardUnit,
    source: Source,
    *,
    is_earlier: Callable[[str], bool] = lambda _: False,
    tick: Callable[[], None] = lambda: None,
) -> ShardRecord:
    """Write the images of a shard; `is_earlier` is whether an earlier shard has a digest."""
    unreadable: list[str] = []
    digests: list[str] = []
    known: set[str] = set()
    kind, size, quality = (unit.settings[name] for name in ("format", "size", "quality"))
    images = range(unit.first, unit.last)
    with _atomic(unit.place) as partial, WRITERS[kind](partial, unit.classes) as writer:
        for image in prepare_all(source, images, size, quality, unit.workers):
            tick()
            origin = source.origin(image.index)
            if image.error:
                unreadable.append(printable(f"{origin}: {image.error}"))
                continue
            digest = image.digest
            is_repeated = digest in known or digest in unit.drop or is_earlier(digest)
            if is_repeated and unit.settings["drop_duplicates"]:
                continue
            known.add(digest)
            digests.append(digest)
            name = Path(origin.rpartition(":")[2] or origin).name
            label = _packed_label(source, image.index, unit.classes)
            writer.add(PackedImage(image.index, name, image.kind, image.content, label))
    return {
        "images": len(digests),
        "duplicates": len(images) - len(digests) - len(unreadable),
        "unreadable": unreadable,
        "digests": digests,
    }


def _packed_label(source: Source, i: int, classes: tuple[str, ...] | None) -> int:
    """Return the class number of image i among the classes of all splits."""
    if source.labels is None or source.classes is None or classes is None:
        return -1
    label = int(source.labels[i])
    if label < 0 or source.classes == classes:
        return label
    return classes.index(source.classes[label])


def names_in(folder: str) -> set[str]:
    """Return the names of the files and folders in a folder or at an address."""
    if not is_remote(folder):
        return set(os.listdir(folder))
    backend, (_, path) = backend_for(folder), split_address(folder.rstrip("/"))
    try:
        files, inside = attempt(lambda: backend.entries(path), folder, "quick", doing="list")
    except StorageMissing:
        return set()
    return {os.path.basename(name.rstrip("/")) for name in (*(f.path for f in files), *inside)}


@contextmanager
def _atomic(place: str) -> Iterator[Path]:
    """Yield a temporary file that becomes `place` when it is complete."""
    if is_remote(place):
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / os.path.basename(place)
            yield local
            backend, (_, path) = backend_for(place), split_address(place)
            attempt(lambda: backend.upload(local, path), place, doing="write")
        return
    path = Path(place)
    # Two processes may write the same shard if the network fails between them.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        hint = "free some space and run the same command to resume"
        why = os.strerror(error.errno or 0)
        raise OSError(error.errno, f"could not write {path}: {why}; {hint}") from None
    finally:
        partial.unlink(missing_ok=True)

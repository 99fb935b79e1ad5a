"""Archives of images or of class folders: zip, tar, and compressed tar."""

import bz2
import functools
import gzip
import io
import lzma
import os
import shutil
import tarfile
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from compressive.data.member_limits import (
    check_member_names,
    check_member_sizes,
    check_ratio,
)
from compressive.data.name_tree import choose_branch
from compressive.data.source import ImageSource, Source, choose_split, labeled
from compressive.data.tar_shards import TarMember, tar_members, tar_samples
from compressive.data.zip_members import ZipMembers
from compressive.platforms.files import read_at

_DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    **dict.fromkeys((".tar.gz", ".tgz"), lambda file: gzip.GzipFile(fileobj=file)),
    **dict.fromkeys((".tar.xz", ".txz"), lzma.LZMAFile),
    **dict.fromkeys((".tar.bz2", ".tbz2"), bz2.BZ2File),
}
ARCHIVE_ENDINGS = (".zip", ".tar", *_DECOMPRESSORS)
_MOST_UNPACKED = 2**35  # bytes of an unpacked tar in the folder of temporary files
_FREE_SHARE = 0.9  # of the free space there that may be used
_BLOCK = 2**20
_SIDECARS = (".cls", ".json")


def archive_ending(path: Path) -> str:
    """Return the ending of an archive that can be opened, or "" for other files."""
    name = path.name.lower()
    return max((ending for ending in ARCHIVE_ENDINGS if name.endswith(ending)), key=len, default="")


def open_archive(path: Path, split: str, named: str | None = None) -> Source:
    """Open the images of a split in an archive; nothing is extracted to its names.

    Without split folders, the archive is the train split and the one that its file name contains.
    """
    ending, whole = archive_ending(path), ("train", *filter(None, [named]))
    if ending == ".zip":
        members = ZipMembers(path)
        return _of_tree(path, members.names, members.read, split, whole)
    state = path.stat()
    if ending == ".tar":
        tar = _closed_by_owner(os.open(path, os.O_RDONLY))
    else:
        tar = _temporary_tar(path, state.st_size, state.st_mtime_ns)
    try:
        found = tar_members(tar)
    except (ValueError, RecursionError, tarfile.TarError) as error:
        raise ValueError(f"{path} cannot be read as a tar archive: {error}") from None
    names = [member.name for member in found]
    check_member_names(path, names)
    check_member_sizes(path, names, [(member.size, member.size) for member in found])
    if any(name.lower().endswith(_SIDECARS) for name in names):
        choose_split(split, whole, path)
        return _of_samples(path, tar)
    return _of_tree(path, names, _member_reader(tar, found), split, whole)


def has_sidecars(path: Path) -> bool:
    """Return whether a tar is a shard of WebDataset: files with labels next to the images."""
    try:
        with open(path, "rb", buffering=0) as tar:
            names = [member.name for member in tar_members(tar)]
    except (ValueError, RecursionError, tarfile.TarError):
        return True  # `open_tar` reports what is wrong
    return any(name.lower().endswith(_SIDECARS) for name in names)


def _closed_by_owner(descriptor: int) -> io.FileIO:
    """Return a file that is closed with the source that reads from it."""
    file = io.FileIO(descriptor, closefd=False)
    weakref.finalize(file, os.close, descriptor)
    return file


def _member_reader(tar: io.FileIO, members: Sequence[TarMember]) -> Callable[[int], bytes]:
    return lambda i: read_at(tar.fileno(), members[i].size, members[i].offset)


def _of_tree(
    path: Path,
    names: Sequence[str],
    read: Callable[[int], bytes],
    split: str,
    whole: Sequence[str],
) -> Source:
    """Return the images of a split, with class folders as labels."""
    index, labels = choose_branch(names, split, path, whole)
    return ImageSource(
        name=path.resolve().name,
        count=len(index),
        read=lambda i: read(index[i]),
        place=lambda i: f"{path}:{names[index[i]]}",
        root=str(path),
        **labels,
    )


def _of_samples(path: Path, tar: io.FileIO) -> Source:
    """Return the images of a WebDataset shard."""
    try:
        samples = tar_samples(tar)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as a WebDataset tar: {error}") from None
    found = [member for member, _ in samples]
    return ImageSource(
        name=path.resolve().name,
        count=len(found),
        read=_member_reader(tar, found),
        place=lambda i: f"{path}:{found[i].name}",
        root=str(path),
        **labeled([label for _, label in samples]),
    )


@functools.lru_cache(maxsize=2)  # the splits of one archive, and the check of a new run
def _temporary_tar(path: Path, size: int, time: int) -> io.FileIO:
    """Unpack a compressed tar to a temporary file without a name, which the system deletes."""
    # A compressed tar has no random access, and images are read in another order in each epoch.
    folder = tempfile.gettempdir()
    most = min(int(shutil.disk_usage(folder).free * _FREE_SHARE), _MOST_UNPACKED)
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            _copy_unpacked(path, cast(io.FileIO, file), most)
            return _closed_by_owner(os.dup(file.fileno()))
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, such as a full one
            raise
        raise ValueError(f"{path} is damaged, or not what its ending says: {error}") from None


def _copy_unpacked(path: Path, file: io.FileIO, most: int) -> None:
    """Unpack a file into another; stop at `most` bytes, or if it grows as no images do."""
    written = 0
    with open(path, "rb") as packed, _DECOMPRESSORS[archive_ending(path)](packed) as content:
        while block := content.read(_BLOCK):
            written += file.write(block)
            check_ratio(str(path), written, packed.tell())
            if written > most:
                limit = f"{most / 2**30:,.1f} GiB, the limit for temporary files"
                raise ValueError(
                    f"{path} unpacks to more than {limit} in {tempfile.gettempdir()}; unpack it "
                    "and give the folder, or set TMPDIR to a larger disk"
                )

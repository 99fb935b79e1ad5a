"""Fingerprints of the images of a source, for records and for the feature cache."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from torch import Tensor

from compressive.data.decode import Unreadable
from compressive.data.source import Source, fetch_ahead
from compressive.storage.address import is_remote
from compressive.storage.remote_file import opened_file

_NAMES_AT_ONCE = 10_000


def _last_parts(paths: Iterable[str]) -> list[str]:
    """Return the names that `Path(path).name` returns, in a twentieth of the time."""
    paths = list(paths)
    if os.altsep is None:
        names = [path.rpartition(os.sep)[2] for path in paths]  # os.path.basename, but faster
    else:  # Windows has two separators
        names = [os.path.basename(path) for path in paths]
    if "" in names or "." in names:
        return [
            name if name not in ("", ".") else Path(path).name
            for name, path in zip(names, paths, strict=True)
        ]
    return names


class DatasetFingerprint:
    """Hash of names, labels and the pixels of `samples` images spread over a source."""

    # The path does not count: the same files in another folder have the same fingerprint. Pixels
    # count because the same names often have other pixels, as in a set stored as JPEG and as PNG.

    def __init__(self, source: Source, *, samples: int = 64) -> None:
        self.source: Source = source
        self.samples: int = samples

    def of(self, places: Iterable[int] | None = None) -> str:
        """Return the fingerprint of the images at these indices, or of all images."""
        if places is None:
            return self._whole
        places, labels = list(places), self.source.labels
        return self._digest(places, None if labels is None else labels[places])

    @cached_property
    def _whole(self) -> str:
        """Fingerprint of all images."""
        return self._digest(range(len(self.source)), self.source.labels)

    def _digest(self, places: Sequence[int], labels: Tensor | None) -> str:
        digest = hashlib.blake2b(self._pixels, digest_size=16)
        # In parts: the names of all images together would need gigabytes.
        for first in range(0, len(places), _NAMES_AT_ONCE):
            some = map(self.source.origin, places[first : first + _NAMES_AT_ONCE])
            names = "\n" * (first > 0) + "\n".join(_last_parts(some))
            digest.update(names.encode(errors="backslashreplace"))
        if labels is not None:
            digest.update(labels.contiguous().numpy().data)
        return digest.hexdigest()

    def with_file_times(self) -> str:
        """Return a fingerprint that also changes with the size, time or folder of any file."""
        # It detects edits of images that are not sampled, so that a cache is never out of date.
        digest = hashlib.blake2b(self.of().encode(), digest_size=16)
        states = file_states(self.source)
        if not states:  # Python objects and images in memory: only pixels show changes
            every = DatasetFingerprint(self.source, samples=len(self.source))
            digest.update(every._pixels)
        for path, (size, time) in states.items():
            # The version of a remote file, such as its ETag, changes with its content.
            remote = opened_file(path)
            line = f"{path} {size} {remote.stored.version if remote else time}\n"
            digest.update(line.encode(errors="backslashreplace"))
        return digest.hexdigest()

    @cached_property
    def _pixels(self) -> bytes:
        """Digest of the sampled images."""
        digest = hashlib.blake2b(digest_size=16)
        sampled = range(0, len(self.source), -(-len(self.source) // self.samples) or 1)
        fetch_ahead(self.source, sampled)
        for i in sampled:
            try:
                digest.update(self.source.image(i).contiguous().numpy().tobytes())
            except Unreadable:
                digest.update(b"unreadable")
        return digest.digest()


def file_states(source: Source) -> dict[str, tuple[int, int]]:
    """Return size and modification time of all files that hold images of a source, by path."""
    # In threads, because a stat on a network disk takes a fraction of a millisecond.
    images = range(len(source))
    with ThreadPoolExecutor(32) as pool:
        parts = pool.map(lambda k: _states(source, images[k : k + 1000]), images[::1000])
        return {path: state for part in parts for path, state in part.items()}


def _states(source: Source, images: range) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    known = "\0"  # prefix of origins in the same file as the previous one, or in no file
    for origin in map(source.origin, images):  # a file, or FILE:PLACE
        path = origin
        while path and not origin.startswith(known):
            with suppress(OSError, ValueError):
                found[path] = _size_and_time(path)
                break
            path = path.rpartition(":")[0]
        if path != origin:
            known = f"{path or origin.rpartition(':')[0]}:"
    return found


def _size_and_time(path: str) -> tuple[int, int]:
    if is_remote(path):
        if (file := opened_file(path)) is None:
            raise FileNotFoundError
        return file.size, file.stored.time
    state = os.stat(path)
    return state.st_size, state.st_mtime_ns


def start_of_file(path: str, size: int) -> bytes:
    """Return the first bytes of a file that holds images, or b"" if it cannot be read."""
    if (remote := opened_file(path)) is not None:
        return remote.pread(size, 0)
    with suppress(OSError), open(path, "rb", buffering=0) as file:
        return file.read(size)
    return b""

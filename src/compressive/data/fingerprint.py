"""Identify the images of a source, for records and for the cache of features."""

import hashlib
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from compressive.data.decode import Unreadable
from compressive.data.source import Source


class DatasetFingerprint:
    """Hash of names, labels and the pixels of `samples` images spread over a source."""

    # The path does not count: the same files in another folder have the same fingerprint. Pixels
    # count because equal names with other pixels are common: one set stored as JPEG and as PNG.

    def __init__(self, source: Source, *, samples: int = 64) -> None:
        self.source, self.samples = source, samples

    def of(self, places: Iterable[int] | None = None) -> str:
        """Return the fingerprint of the images at these places, or of all images."""
        places = range(len(self.source)) if places is None else list(places)
        names = "\n".join(Path(self.source.origin(i)).name for i in places)
        digest = hashlib.blake2b(self._pixels, digest_size=16)
        digest.update(names.encode(errors="backslashreplace"))
        if self.source.labels is not None:
            digest.update(self.source.labels[list(places)].numpy().tobytes())
        return digest.hexdigest()

    def with_file_times(self) -> str:
        """Return a fingerprint that also changes with the size, time or folder of any file."""
        # It detects edits of images that are not sampled, so that a cache is never out of date.
        digest = hashlib.blake2b(self.of().encode(), digest_size=16)
        known: dict[str, str] = {}
        for i in range(len(self.source)):
            origin = self.source.origin(i)  # a file, or FILE:PLACE
            path = origin if os.path.exists(origin) else origin.rpartition(":")[0]
            if path not in known:
                state = os.stat(path) if path and os.path.exists(path) else None
                known[path] = f"{state.st_size} {state.st_mtime_ns}" if state else ""
                line = f"{path} {known[path]}\n"
                digest.update(line.encode(errors="backslashreplace"))
        return digest.hexdigest()

    @cached_property
    def _pixels(self) -> bytes:
        """Digest of the sampled images."""
        digest = hashlib.blake2b(digest_size=16)
        for i in range(0, len(self.source), -(-len(self.source) // self.samples) or 1):
            try:
                digest.update(self.source.image(i).contiguous().numpy().tobytes())
            except Unreadable:
                digest.update(b"unreadable")
        return digest.digest()

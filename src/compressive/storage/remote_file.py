"""Shards on object storage as files: list them, and read ranges through the cache."""

import atexit
import functools
import hashlib
import io
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from compressive.storage.address import split_address
from compressive.storage.backend import Retry, attempt, backend_for, read_range
from compressive.storage.cache import BlockCache, block_cache
from compressive.storage.file_systems import Stored

SUFFIXES = (".parquet", ".tar")
# Large blocks need few requests. Small ones are used if not all objects fit into the cache: then
# most of a block would be deleted before it is used.
LARGE, SMALL = 2**21, 2**18
_FETCHERS = 16  # requests at the same time
_MOST_FOLDERS = 50


def list_shards(place: str, folders: Collection[str] | None = None) -> list[Stored]:
    """Return the parquet and tar objects of an address, sorted; raise an error if there are none.

    An address is one object, or a folder with shards in it, in subfolders or in their subfolders.
    `folders` restricts the names of subfolders.
    """
    _, path = split_address(place)
    backend = backend_for(place)
    if path.lower().endswith(SUFFIXES) and (
        found := attempt(lambda: backend.stat(path), place, "quick", doing="list")
    ):
        return [found]
    shards: list[Stored] = []
    seen: list[str] = []
    level = [path]
    for _ in range(3):
        deeper: list[str] = []
        for folder in level[:_MOST_FOLDERS]:
            files, inside = attempt(
                functools.partial(backend.entries, folder), place, "quick", doing="list"
            )
            shards += [each for each in files if each.path.lower().endswith(SUFFIXES)]
            seen += [each.path.rpartition("/")[2] for each in files[:3]]
            deeper += [each.rstrip("/") for each in inside]
        level = [
            each for each in deeper if folders is None or each.rpartition("/")[2].lower() in folders
        ]
    if not shards:
        has = f"it has {', '.join(seen[:3])}" if seen else "nothing is there"
        raise ValueError(
            f"no shards under {place}: {has}; on object storage, images must be in *.parquet or "
            "*.tar shards, which `compressive pack` writes"
        )
    return sorted(shards)


def open_files(place: str, shards: Sequence[Stored]) -> list["RemoteFile"]:
    """Return files to read from; all are checked to exist."""
    scheme, _ = split_address(place)
    backend, cache = backend_for(place), block_cache()
    block = LARGE if sum(each.size for each in shards) <= cache.limit * 3 // 4 else SMALL

    def opened(shard: Stored) -> RemoteFile:
        address = f"{scheme}://{shard.path}"
        found = attempt(lambda: backend.stat(shard.path), address, "quick", doing="open")
        if found is None:
            raise ValueError(f"{address} was deleted while it was opened; run the command again")
        return RemoteFile(address, found, backend, cache, block)

    with ThreadPoolExecutor(_FETCHERS) as pool:
        files = list(pool.map(opened, shards))
    _known_files.update({str(file): file for file in files})
    return files


_known_files: dict[str, "RemoteFile"] = {}


def opened_file(address: str) -> "RemoteFile | None":
    """Return a file that this process has opened, by its address."""
    return _known_files.get(address)


class RemoteFile:
    """A read-only object; many threads may read at once."""

    def __init__(
        self, address: str, stored: Stored, backend: Any, cache: BlockCache, block: int
    ) -> None:
        self.address: str = address
        self.stored: Stored = stored
        self.size: int = stored.size
        self.name: str = address.rpartition("/")[2]
        self._backend, self._cache, self._block = backend, cache, block
        text = f"{address}\n{stored.version}\n{stored.size}\n{block}"
        self._key = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def __str__(self) -> str:
        return self.address

    def pread(self, size: int, offset: int) -> bytes:
        """Return `size` bytes from `offset` on, fewer at the end."""
        stop = min(offset + size, self.size)
        if offset >= stop:
            return b""
        first, last = offset // self._block, (stop - 1) // self._block
        if last > first:
            self.prefetch(offset + self._block, stop - offset - self._block)
        parts = []
        for block in range(first, last + 1):
            begin = block * self._block
            part = slice(max(offset - begin, 0), min(stop - begin, self._block))
            fetch = functools.partial(self._fetch, block)
            parts.append(self._cache.read(self._key, str(block), part, fetch))
        return b"".join(parts)

    def prefetch(self, offset: int, size: int) -> None:
        """Start to fetch a range in the background; a quarter of the cache at most."""
        stop = min(offset + size, self.size, offset + self._cache.limit // 4)
        for block in range(offset // self._block, -(-stop // self._block)):
            if not self._cache.has(self._key, str(block)):
                _fetchers().add(self, block)

    def fetch_block(self, block: int) -> None:
        """Put a block into the cache if it is absent."""
        fetch = functools.partial(self._fetch, block, "never")  # the reader of the block retries
        if not self._cache.has(self._key, str(block)):
            self._cache.read(self._key, str(block), slice(0, 0), fetch)

    def _fetch(self, block: int, retry: Retry = "patient") -> bytes:
        begin = block * self._block
        size = min(self._block, self.size - begin)
        return read_range(self._backend, self.stored.path, begin, size, self.address, retry)

    def load(self, name: str) -> bytes | None:
        """Return what was stored about this version of the object, or None."""
        return self._cache.load(self._key, name)

    def store(self, name: str, content: bytes) -> None:
        """Store something about this version of the object in the cache."""
        self._cache.store(self._key, name, content)

    def read_beside(self, name: str) -> bytes | None:
        """Return a small object in the same folder, or None if there is none."""
        path = f"{self.stored.path.rpartition('/')[0]}/{name}"
        found = attempt(lambda: self._backend.stat(path), self.address, "quick")
        if found is None:
            return None
        return attempt(lambda: self._backend.read(path, 0, found.size), self.address, "quick")

    def open(self) -> io.BufferedIOBase:
        """Return a new file object for libraries."""
        return io.BufferedReader(_Handle(self), 2**16)


class _Handle(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        found = self._file.pread(len(buffer), self._at)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


class _Fetchers:
    """Daemon threads that fetch blocks; they end before the interpreter does."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[RemoteFile, int] | None] = SimpleQueue()
        self._waiting: set[tuple[str, int]] = set()
        self._closed = False
        names = [f"fetch-{i}" for i in range(_FETCHERS)]
        self._threads = [threading.Thread(target=self._work, name=n, daemon=True) for n in names]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # after pyarrow's import, so it runs before pyarrow's own

    def add(self, file: RemoteFile, block: int) -> None:
        if (task := (file.address, block)) not in self._waiting:
            self._waiting.add(task)
            self._tasks.put((file, block))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None and not self._closed:
            file, block = task
            with suppress(Exception):  # the reader of this block will report the error
                file.fetch_block(block)
            self._waiting.discard((file.address, block))

    def close(self) -> None:
        self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout=5)


@functools.cache
def _fetchers() -> _Fetchers:
    return _Fetchers()

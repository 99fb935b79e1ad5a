"""A bounded cache of blocks of remote objects in a local folder, shared by processes."""

import functools
import os
import re
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compressive.platforms.files import read_at

try:
    import fcntl
except ImportError:  # Windows: two processes may fetch the same block twice
    fcntl = None

FOLDER, SIZE = "COMPRESSIVE_CACHE", "COMPRESSIVE_CACHE_SIZE"
RUNS = "runs"  # subfolder of runs that are mirrored to storage; nothing there is deleted
_DEFAULT_SIZE, _LEAST = 32 * 10**9, 16 * 10**6
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BLOCK_END = struct.Struct("<QL")  # length and crc32 of a block, at the end of its file
_STRIPES = 256  # lock files
_ABANDONED = 3600  # seconds after which an unfinished file is that of a killed process
_PARTIAL = ".partial"


def block_cache() -> "BlockCache":
    """Return the cache that the environment names."""
    folder = os.environ.get(FOLDER) or "~/.cache/compressive/storage"
    return _cache(os.path.abspath(os.path.expanduser(folder)), os.environ.get(SIZE, ""))


@functools.cache
def _cache(folder: str, size: str) -> "BlockCache":
    return BlockCache(Path(folder), _parse_bytes(size) if size else _DEFAULT_SIZE)


def _parse_bytes(text: str) -> int:
    """Return a number of bytes from a text such as 500MB or 1.5 TB."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?b?)\s*", text, re.I)
    unit = found[2].upper() if found else ""
    unit = f"{unit}B" if unit in ("K", "M", "G", "T") else unit
    value = int(float(found[1]) * _SIZE_UNITS[unit]) if found else 0
    if value < _LEAST:
        raise ValueError(f"{SIZE} must be 16MB or more, such as 50GB, got {text!r}")
    return value


class BlockCache:
    """Blocks by key and name, one file each; the least recently used are deleted first."""

    # A block is written to another name and renamed, and its first read in a process compares its
    # checksum, so a crash leaves no wrong block. Lock files, which the operating system releases
    # when a process ends, make other threads and processes wait while one fetches a block.

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder: Path = folder
        self.limit: int = limit
        self._verified: set[str] = set()
        self._mutex = threading.Lock()
        self._total = -1  # bytes at the last count, with what this process wrote since
        self._since_count = 0
        self._is_broken = False

    def read(self, key: str, name: str, part: slice, fetch: Callable[[], bytes]) -> bytes:
        """Return a part of a block; fetch and store the block if it is absent."""
        found = self.load(key, name, part)
        if found is not None:
            return found
        with self._locked(f"{key}/{name}"):
            found = self.load(key, name, part)  # another thread or process may have stored it
            if found is None:
                content = fetch()
                self.store(key, name, content)
                found = content[part]
        return found

    def load(self, key: str, name: str, part: slice = slice(None)) -> bytes | None:
        """Return a part of a stored block, or None if it is absent or damaged."""
        path = f"{self.folder}/{key}/{name}"
        try:
            with open(path, "rb", buffering=0) as file:
                if part.stop is not None and path in self._verified:
                    found = read_at(file.fileno(), part.stop - part.start, part.start)
                    if len(found) < part.stop - part.start:
                        raise ValueError
                else:
                    found = _checked(file.read())[part]
                    self._verified.add(path)
                with suppress(OSError):
                    os.utime(path)  # mark as used
                return found
        except ValueError:
            self._verified.discard(path)
            with suppress(OSError):
                os.unlink(path)
        except OSError:
            pass
        return None

    def has(self, key: str, name: str) -> bool:
        """Return whether a block is stored."""
        return os.path.exists(f"{self.folder}/{key}/{name}")

    def store(self, key: str, name: str, content: bytes) -> None:
        """Store a block; without space or permission, warn once and go on without."""
        size = len(content) + _BLOCK_END.size
        folder = self.folder / key
        partial = folder / f".{name}.{os.getpid()}.{threading.get_ident()}{_PARTIAL}"
        try:
            self._make_room(size)
            for tried in range(3):
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    with partial.open("wb", buffering=0) as file:
                        file.write(content)
                        file.write(_BLOCK_END.pack(len(content), zlib.crc32(content)))
                    partial.replace(folder / name)
                    break
                except FileNotFoundError:  # another process has just deleted the empty folder
                    if tried == 2:
                        raise
        except OSError as error:
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            if not self._is_broken:
                self._is_broken = True
                hint = f"blocks are fetched again each time; set {FOLDER} to another folder"
                why = error.strerror or str(error)
                warnings.warn(f"cannot cache in {self.folder} ({why}); {hint}", stacklevel=2)

    def _make_room(self, size: int) -> None:
        """Count this block, and delete old ones if the limit would be exceeded."""
        with self._mutex:
            is_due = self._total < 0 or self._since_count > self.limit // 64
            if is_due or self._total + size > self.limit * 7 // 8:
                self._total, self._since_count = self._evict(size), 0
            self._total += size
            self._since_count += size

    def _evict(self, needed: int) -> int:
        """Delete the least recently used blocks down to 3/4 of the limit; return what is left."""
        # Nothing is deleted below 7/8 of the limit: the rest is for what up to 8 processes write
        # before they count again, 1/64 each.
        found: list[tuple[float, int, str]] = []
        for place, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name not in ("locks", RUNS)]
            for name in names:
                path = os.path.join(place, name)
                with suppress(OSError):
                    state = os.stat(path)
                    is_old = time.time() - state.st_mtime > _ABANDONED
                    if name.endswith(_PARTIAL) and is_old:
                        os.unlink(path)
                    else:
                        found.append((state.st_mtime, state.st_size, path))
        total = sum(size for _, size, _ in found)
        if total + needed <= self.limit * 7 // 8:
            return total
        for _, size, path in sorted(found):
            if total + needed <= self.limit * 3 // 4:
                break
            with suppress(OSError):
                if not path.endswith(_PARTIAL):
                    os.unlink(path)
                    total -= size
                    self._verified.discard(path)
                    os.rmdir(os.path.dirname(path))  # fails while it holds other blocks
        return total

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of a block; without locks, blocks may be fetched twice, which is safe."""
        descriptor = -1
        with suppress(OSError):
            folder = self.folder / "locks"
            folder.mkdir(parents=True, exist_ok=True)
            stripe = zlib.crc32(name.encode()) % _STRIPES
            descriptor = os.open(folder / f"{stripe:02x}", os.O_RDWR | os.O_CREAT, 0o600)
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _checked(data: bytes) -> bytes:
    """Return the block in a file; raise ValueError if it is damaged."""
    if len(data) < _BLOCK_END.size:
        raise ValueError
    content = data[: -_BLOCK_END.size]
    if _BLOCK_END.unpack(data[-_BLOCK_END.size :]) != (len(content), zlib.crc32(content)):
        raise ValueError
    return content

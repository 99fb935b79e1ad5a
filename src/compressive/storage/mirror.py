"""Mirror a local folder to object storage, and download it on another machine."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from compressive.storage.address import split_address
from compressive.storage.backend import StorageMissing, attempt, backend_for, read_range
from compressive.storage.file_systems import Stored

_PARTIAL_FILE = ".partial"
_PROBE = ".compressive-write-test"
_RANGE = 2**24  # bytes per request of a download
_PUSH_EVERY = 5.0  # seconds between searches for changed files


def check_writable(address: str) -> None:
    """Raise an error in one line if nothing can be written to an address."""
    # Write a real object: credentials may allow to read only.
    _, path = split_address(address)
    backend, probe = backend_for(address), Path(os.devnull)
    attempt(lambda: backend.upload(probe, f"{path}/{_PROBE}"), address, "quick", doing="write")
    attempt(lambda: backend.delete(f"{path}/{_PROBE}"), address, "quick", doing="delete")


class Mirror:
    """A folder on object storage that follows a local one.

    Each object is replaced at once. Files are uploaded in the order of `first`, then by name, and
    deleted after all uploads, so that an interrupted upload leaves an older complete state. Objects
    whose name ends with one of `ignored` are left alone: other processes write them.
    """

    def __init__(
        self, address: str, local: Path, first: Sequence[str] = (), ignored: Sequence[str] = ()
    ) -> None:
        self.address: str = address.rstrip("/")
        self.local: Path = local
        self._path = split_address(address)[1]
        self._backend = backend_for(address)
        self._first, self._ignored = tuple(first), tuple(ignored)
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of what was uploaded
        self._remote: set[str] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def objects(self) -> dict[str, Stored]:
        """Return the objects of the address by their name below it."""
        found: dict[str, Stored] = {}
        folders = [self._path]
        while folders:
            folder = folders.pop()
            try:
                files, inside = attempt(
                    lambda f=folder: self._backend.entries(f), self.address, "quick", doing="list"
                )
            except StorageMissing:
                continue
            folders += [each.rstrip("/") for each in inside]
            names = {each.path.removeprefix(f"{self._path}/"): each for each in files}
            found |= {k: each for k, each in names.items() if not k.endswith(self._ignored)}
        found.pop(_PROBE, None)
        self._remote = set(found)
        return found

    def pull(self, objects: dict[str, Stored]) -> None:
        """Make the local folder equal to these objects of the address."""
        for path in _complete_files(self.local):
            path.unlink()
        for name, stored in objects.items():
            if ".." in name.split("/"):
                raise ValueError(f"{self.address}/{name} has .. in its name; delete it")
            target = self.local / name
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f".{target.name}{_PARTIAL_FILE}")
            with partial.open("wb") as file:
                for offset in range(0, stored.size, _RANGE):
                    file.write(self._read(stored, offset, min(_RANGE, stored.size - offset)))
            partial.replace(target)
            self._sent[name] = _state(target)

    def read(self, stored: Stored) -> bytes:
        """Return the content of a small object."""
        return self._read(stored, 0, stored.size)

    def _read(self, stored: Stored, offset: int, size: int) -> bytes:
        return read_range(self._backend, stored.path, offset, size, self.address)

    def push(self) -> None:
        """Upload changed files, then delete objects whose files were deleted."""
        with self._lock:
            there, has_all = self._local_files(), True
            for name in sorted(there, key=self._order):
                try:
                    state = _state(there[name])
                    if self._sent.get(name) != state:
                        self._upload(there[name], name)
                except (FileNotFoundError, StorageMissing):
                    if there[name].exists():
                        raise
                    has_all = False  # deleted since the folder was listed
                    continue
                self._sent[name] = state
                self._remote.add(name)
            # Keep what was deleted meanwhile: what replaces it is not uploaded yet.
            gone = self._remote - there.keys() - self._local_files().keys()
            for name in sorted(gone) if has_all else ():
                path = f"{self._path}/{name}"
                attempt(lambda path=path: self._backend.delete(path), self.address, doing="delete")
                self._remote.discard(name)
                self._sent.pop(name, None)

    def _local_files(self) -> dict[str, Path]:
        return {
            path.relative_to(self.local).as_posix(): path for path in _complete_files(self.local)
        }

    def _order(self, name: str) -> tuple[int, str]:
        places = [i for i, prefix in enumerate(self._first) if name.startswith(prefix)]
        return min(places, default=len(self._first)), name

    def _upload(self, local: Path, name: str) -> None:
        path = f"{self._path}/{name}"

        def once() -> None:
            size = local.stat().st_size
            self._backend.upload(local, path)
            found = self._backend.stat(path)
            if found is None or found.size < size:
                raise OSError(f"Connection closed while {name} was uploaded")

        attempt(once, f"{self.address}/{name}", doing="write")

    def start(self, warn: Callable[[str], None]) -> None:
        """Push changes in the background; an outage is a warning, and is retried."""
        self._thread = threading.Thread(target=self._follow, args=(warn,), daemon=True)
        self._thread.start()

    def _follow(self, warn: Callable[[str], None]) -> None:
        is_behind = False
        while not self._stop.wait(_PUSH_EVERY):
            try:
                self.push()
                is_behind = False
            except Exception as error:
                if not is_behind:
                    # No hint: the user has nothing to do while the command runs.
                    why = getattr(error, "problem", None) or str(error)
                    warn(f"not mirrored yet, the command continues and tries again: {why}")
                is_behind = True

    def stop(self) -> None:
        """End the background thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


def _complete_files(folder: Path) -> list[Path]:
    """Return the complete files in a folder."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.endswith(_PARTIAL_FILE)
    ]


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns

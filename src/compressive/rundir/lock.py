"""A folder that is one process's while it writes there."""

import fcntl
import os
import tempfile
from pathlib import Path


def ensure_writable(folder: Path, called: str = "--out") -> None:
    """Refuse now what could not be written there later; nothing is made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{place} is a file, not a folder; choose another {called}")
    try:  # rights alone do not tell: a disk may be mounted for reading
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"{place} cannot be written to ({reason}); choose another {called}"
        ) from None


def acquire_lock(folder: Path) -> int:
    """Make the folder this process's own until the descriptor is closed; another is refused.

    Two processes would mix their checkpoints. The lock goes with the process, however it ends.
    Where the file system has none for folders, as some networks', nothing is held.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(
            f"another process is writing to {folder}; wait until it ends, or choose another --out"
        ) from None
    except OSError:
        pass
    return descriptor

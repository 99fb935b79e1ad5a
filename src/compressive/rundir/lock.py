"""Exclusive lock on a run folder."""

import tempfile
from pathlib import Path

from compressive.platforms.files import lock_folder
from compressive.rundir.files import LOCK


def ensure_writable(folder: Path, called: str = "--out") -> None:
    """Raise ValueError if a folder could not be created or written to; create nothing."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{place} is a file, not a folder; choose another {called}")
    try:  # also detects a disk that is mounted read-only
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        why = error.strerror or str(error)
        raise ValueError(f"{place} cannot be written to ({why}); choose another {called}") from None


def acquire_lock(folder: Path) -> int:
    """Lock a folder for this process until the returned descriptor is closed."""
    # Two processes would mix their checkpoints. The operating system releases the lock when the
    # process ends.
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return lock_folder(folder, LOCK)
    except BlockingIOError:
        hint = "wait until it ends, or choose another --out"
        raise ValueError(f"another process is writing to {folder}; {hint}") from None

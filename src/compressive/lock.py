"""A folder that is one process's while it writes there."""

import fcntl
import os
from pathlib import Path


def hold(folder: Path) -> int:
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

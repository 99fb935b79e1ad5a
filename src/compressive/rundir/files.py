"""The files of a run: what they are called, and that each is written whole or not at all."""

import errno
import glob
import os
import re
from contextlib import suppress
from pathlib import Path

CONFIG, METRICS, ENCODER = "config.json", "metrics.jsonl", "encoder.safetensors"
CHECKPOINTS, UNREADABLE = "checkpoints", "unreadable.txt"
STEP = re.compile(r"step_(\d+)\.safetensors")  # a checkpoint
EVALUATION, HELD_OUT = "evaluation", "held-out"  # folders of an evaluation, by what it judges on
RESULTS, SWEEP = "results.json", "sweep.json"

PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's share, the file's limit


def write_text(path: Path, text: str) -> None:
    """Write a small file, such as JSON, whole or not at all."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, *content: bytes | memoryview) -> None:
    """Write a file in these parts: beside the path, to the disk, and only then under its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
        left.unlink(missing_ok=True)
    # With the process in its name: if two write after all, one fails, and no mixture is renamed.
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            for part in content:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # else a power cut may keep the new name without its content
        partial.replace(path)
        _flush_names(path.parent)
    except OSError as error:
        size = sum(map(len, content)) / 1e6
        hint = "make room and run the same command again" if error.errno in _FULL else "look there"
        raise OSError(
            error.errno,
            f"could not write {path} ({size:.1f} MB): {error.strerror}; {hint}, "
            "what was there before is whole",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _flush_names(folder: Path) -> None:
    """Have the new name survive a power cut as well; not every file system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

"""Names of the files of a run folder, paths that a user gives, and atomic writes."""

import errno
import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from compressive.platforms.files import replace_file, sync_folder

CONFIG, METRICS, ENCODER = "config.json", "metrics.jsonl", "encoder.safetensors"
CLASSIFIER = "classifier.safetensors"  # encoder and linear layer of a fine-tuning run
CHECKPOINTS, UNREADABLE = "checkpoints", "unreadable.txt"
FINETUNE, SEARCH = "finetune.json", "search"  # plan and learning-rate search of a fine-tuning run
STEP = re.compile(r"step_(\d+)\.safetensors")  # a checkpoint
EVALUATION, HELD_OUT = "evaluation", "held-out"  # folders of results on test and held-out images
RESULTS, SWEEP = "results.json", "sweep.json"
PARTIAL = ".partial"
LOCK = f".lock{PARTIAL}"  # on Windows only
_URL = re.compile(r"[A-Za-z][\w+.-]+:/")  # one slash, because Path("s3://x") keeps only one
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota, file size limit


def local_path(path: str | Path) -> Path:
    """Return a path with `~` expanded.

    Raise ValueError for a URL and for an unknown user, OSError for a link to itself.
    """
    text = os.fspath(path)
    if _URL.match(text):
        hint = "mount or download it, and give the path"
        raise ValueError(f"{text} is a URL, but only local files can be used; {hint}")
    try:
        found = Path(text).expanduser()
    except RuntimeError:
        user = text.partition("/")[0]
        raise ValueError(f"{text}: {user} is not a user here; give the whole path") from None
    try:
        found.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:  # Path.resolve would raise RuntimeError
            raise
    return found


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, *content: bytes | memoryview) -> None:
    """Write a file atomically: to a temporary name, with fsync, then rename it."""
    write_files({path: content})


def write_files(contents: Mapping[Path, Sequence[bytes | memoryview]]) -> None:
    """Write files as `write_bytes` does, and rename none of them before all are written."""
    # The process id in the name keeps the output of two processes separate.
    partials = {p: p.with_name(f".{p.name}.{os.getpid()}{PARTIAL}") for p in contents}
    path = Path()
    try:
        for path, partial in partials.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            for left in path.parent.glob(f".{glob.escape(path.name)}.*{PARTIAL}"):
                left.unlink(missing_ok=True)
            with partial.open("wb") as file:
                for part in contents[path]:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())  # else a power failure may leave an empty file
        for path, partial in partials.items():
            replace_file(partial, path)
            sync_folder(path.parent)
    except OSError as error:
        size = sum(map(len, contents[path])) / 1e6
        is_full = error.errno in DISK_FULL
        hint = "free some space and run the same command again" if is_full else "check the path"
        raise OSError(
            error.errno,
            f"could not write {path} ({size:.1f} MB): {error.strerror}; {hint}; "
            "an earlier file of that name is unchanged",
        ) from error
    finally:
        for partial in partials.values():
            partial.unlink(missing_ok=True)

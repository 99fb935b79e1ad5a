"""Format versions of the files of a run folder, in one place."""

import json
from contextlib import suppress
from pathlib import Path

from compressive.rundir.files import CHECKPOINTS, CONFIG, ENCODER, FINETUNE, METRICS, RESULTS

FORMAT_KEY = "format_version"
# Increment a number when a reader of the old format would reject or misread the new one.
FORMAT_VERSIONS = {CONFIG: 2, METRICS: 2, RESULTS: 2, CHECKPOINTS: 2, ENCODER: 5, FINETUNE: 2}
# Encoders before 3 have no checksum, those before 4 always ImageNet's normalization, those before 5
# no weights with 8 bits.
_STILL_READ = {ENCODER: ("2", "3", "4")}


class UnsupportedFormat(ValueError):
    """Raised for a file that an older or newer version of compressive wrote."""


def check_format(path: Path, kind: str, found: object) -> None:
    """Raise UnsupportedFormat if the version `found` in a file is not supported.

    Files of compressive 0.1 have no version (None).
    """
    expected = FORMAT_VERSIONS[kind]
    number = "1" if found is None else str(found)
    if number in (str(expected), *_STILL_READ.get(kind, ())):
        return
    package = _package_version(path)
    writer = f"compressive {package} (format {number})" if package else f"format {number}"
    again = "evaluate" if kind == RESULTS else "train"
    raise UnsupportedFormat(
        f"{path} was written by {writer}; this version reads format {expected}; "
        f"use the version that wrote it, or {again} again"
    )


def _package_version(path: Path) -> str:
    """Return the version of compressive in the config.json next to or above a file, or ""."""
    for folder in list(path.absolute().parents)[:2]:
        with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            about = json.loads((folder / CONFIG).read_bytes())["about"]
            return str(about["versions"]["compressive"])
    return ""

"""The place of an export: what may be replaced there, and how it is written atomically."""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from compressive.platforms.files import replace_file
from compressive.rundir.files import CHECKPOINTS, CONFIG, ENCODER, METRICS, PARTIAL
from compressive.rundir.lock import ensure_writable

RECORD = "export.json"
_KEY = "compressive_export"  # in the record: the version of its format
_VERSION = 1


def record_path(out: Path, *, is_folder: bool) -> Path:
    """Return the path of the record: in the folder, or next to the file."""
    return out / RECORD if is_folder else out.with_name(f"{out.name}.{RECORD}")


def check_destination(out: Path, *, is_folder: bool) -> None:
    """Raise ValueError if a place is not writable or holds anything but an earlier export."""
    if not out.parent.exists():
        raise ValueError(f"--out {out}: there is no folder {out.parent}; create it first")
    ensure_writable(out.parent)
    if _is_run(out):
        raise ValueError(
            f"--out {out} is the folder of a run, whose files would be mixed up; "
            f"choose another, such as {out / 'exported'}"
        )
    record = record_path(out, is_folder=is_folder)
    if not out.exists() and not out.is_symlink():
        if not is_folder and record.exists():
            raise ValueError(f"--out {out}: {record} exists; remove it or choose another --out")
        return
    if changed := _foreign(out, record, is_folder=is_folder):
        raise ValueError(f"--out {out} exists and {changed}; choose another --out or remove it")


def _is_run(path: Path) -> bool:
    if any((path / name).exists() for name in (METRICS, CHECKPOINTS, ENCODER)):
        return True
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads((path / CONFIG).read_bytes())
        return isinstance(config, dict) and "about" in config and "method" in config
    return False


def _foreign(out: Path, record: Path, *, is_folder: bool) -> str:
    """Return why a place is not an unchanged earlier export, or ""."""
    try:
        content: Any = json.loads(record.read_bytes())
        stored = dict(content["files"]) if _KEY in content else {}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        stored = {}
    if not stored or out.is_dir() != is_folder or out.is_symlink():
        return "is not an earlier export"
    root = out if is_folder else out.parent
    there = {p.relative_to(root).as_posix() for p in out.rglob("*")} if is_folder else set(stored)
    if extra := sorted(there - stored.keys() - {RECORD}):
        return f"contains {extra[0]}, which is not of an export"
    for name, digest in stored.items():
        if not (root / name).is_file() or _digest(root / name) != digest:
            return f"{name} was changed after the export"
    return ""


@contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder next to `out`; delete the folder at the end."""
    folder = out.parent / f".{out.name}.{os.getpid()}{PARTIAL}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder / out.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_record(path: Path, content: dict[str, Any], *, is_folder: bool) -> None:
    """Write the record of an export in its temporary place, with a digest of each file."""
    files = sorted(p for p in path.iterdir() if p.is_file()) if is_folder else [path]
    digests = {file.name: _digest(file) for file in files}
    text = json.dumps({_KEY: _VERSION, **content, "files": digests}, indent=1) + "\n"
    record_path(path, is_folder=is_folder).write_text(text, "utf-8")


def move_into_place(path: Path, out: Path, *, is_folder: bool) -> None:
    """Rename a complete export to its final name, replacing an earlier one."""
    if not is_folder:
        replace_file(path, out)
        replace_file(record_path(path, is_folder=False), record_path(out, is_folder=False))
        return
    old = path.with_name("replaced")  # deleted with the temporary folder
    if out.exists():
        out.rename(old)
    try:
        path.rename(out)
    except OSError:
        if old.exists():
            old.rename(out)
        raise


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

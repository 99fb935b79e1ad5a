"""A run folder without a shared file system: the first machine has all of it, others copies.

The first process writes and uploads the run. Before a checkpoint is loaded, its machine sends the
files that are needed to the others. The parts of a sharded checkpoint go the other way.
"""

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from compressive.distributed import Leaders, gather_objects, machine_leaders, rank, wait_for_all
from compressive.platforms.files import replace_file
from compressive.rundir.files import PARTIAL
from compressive.watchdog.activity import Operation

_FileStates = dict[str, tuple[int, str]]  # size and digest by name


class _Copied(NamedTuple):
    """How a folder is copied to other machines."""

    leaders: Leaders
    needed: tuple[str, ...]  # starts of the names of files that all machines need
    is_own: bool  # whether this machine has a folder of its own, which the first does not see


_copied: dict[Path, _Copied] = {}  # by folder


@contextmanager
def copied_folder(folder: Path, marker: Path, needed: Sequence[str]) -> Iterator[None]:
    """Copy the needed files of a folder to all machines, now and when `copy_to_machines` says so.

    `marker` is a file next to the folder, which the first process writes. A machine that sees it
    shares the file system and needs no copy. Every process must call this.
    """
    leaders = machine_leaders()
    if leaders is not None:
        is_own = not _sees_first(marker, leaders)
        if any(gather_objects(is_own)):
            _copied[folder] = _Copied(leaders, tuple(needed), is_own)
    try:
        copy_to_machines(folder)
        yield
    finally:
        _copied.pop(folder, None)


def _sees_first(marker: Path, leaders: Leaders) -> bool:
    """Return whether this machine sees the marker of the first process; delete its own."""
    token = secrets.token_hex(8)
    if rank() == 0:
        marker.write_text(token)
    token = gather_objects(token)[0]
    if rank() == 0 or not leaders.is_member:
        return True
    marker.parent.mkdir(parents=True, exist_ok=True)
    os.listdir(marker.parent)  # else a network file system may remember that it was missing
    if marker.exists() and marker.read_text() == token:
        return True
    marker.unlink(missing_ok=True)  # the folder becomes a copy, which is never uploaded
    return False


def copy_to_machines(folder: Path) -> None:
    """Copy the needed files of the first machine to all others; every process must call this."""
    if folder not in _copied:
        return
    copied = _copied[folder]
    if copied.leaders.is_member:
        with Operation("copying files to all machines"):
            _distribute(copied, folder)
    wait_for_all()


def _distribute(copied: _Copied, folder: Path) -> None:
    own = _file_states(folder, copied.needed)
    wanted, *others = copied.leaders.gather(own)
    for name in own.keys() - wanted.keys() if copied.is_own else ():
        (folder / name).unlink(missing_ok=True)
    for name, state in wanted.items():
        if any(other.get(name) != state for other in others):
            is_missing = copied.is_own and own.get(name) != state
            with _complete_file(folder / name if is_missing else None) as target:
                copied.leaders.send_to_all(folder / name, target, state[0])


def collect_from_machines(place: Path) -> None:
    """Move the files in a folder of a run to the first machine; every process must call this."""
    found = next((each for folder, each in _copied.items() if folder in place.parents), None)
    if found is None:
        return
    if found.leaders.is_member:
        with Operation("copying files to the first machine"):
            _collect(found.leaders, place, is_own=found.is_own)
    wait_for_all()


def _collect(leaders: Leaders, place: Path, *, is_own: bool) -> None:
    sizes: dict[str, int] = {}
    if is_own and place.is_dir():
        sizes = {path.name: path.stat().st_size for path in sorted(place.iterdir())}
    for owner, files in zip(leaders.ranks, leaders.gather(sizes), strict=True):
        for name, size in files.items():
            if rank() == owner:
                leaders.send_to_first(place / name, size)
            elif rank() == 0:
                with _complete_file(place / name) as target:
                    assert target is not None
                    leaders.receive(target, size, owner)
    leaders.gather(None)  # machines other than the first may share a folder
    if is_own:
        shutil.rmtree(place, ignore_errors=True)


def _file_states(folder: Path, needed: tuple[str, ...]) -> _FileStates:
    """Return size and digest of the needed files in a folder."""
    found: _FileStates = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith(needed) and path.is_file() and not name.endswith(PARTIAL):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()
            found[name] = path.stat().st_size, digest
    return found


@contextmanager
def _complete_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """Yield a file that gets its name when it is complete; None without a path."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace_file(partial, path)
    finally:
        partial.unlink(missing_ok=True)

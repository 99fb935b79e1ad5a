"""Run folders on object storage: train in a local folder that is mirrored to the address."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compressive.distributed import launched, rank, wait_for_all, world_size
from compressive.rundir import checkpoint, folder
from compressive.rundir.files import CHECKPOINTS, CONFIG, STEP
from compressive.rundir.lock import acquire_lock
from compressive.storage.address import is_remote
from compressive.storage.backend import StorageError
from compressive.storage.cache import RUNS, block_cache
from compressive.storage.file_systems import Stored
from compressive.storage.mirror import Mirror


@contextmanager
def mirrored_run(out: str | Path | None, say: Callable[[str], None]) -> Iterator[str | Path | None]:
    """Yield the local folder of a run; if `out` is on storage, download it first and mirror it.

    After an error, upload what there is. If the last upload fails, the local folder is kept and the
    same command on this machine resumes from it.
    """
    if out is None or not is_remote(out):
        yield out
        return
    address = str(out)
    if world_size() > launched("LOCAL_WORLD_SIZE", 1):
        hint = "give a folder on a shared file system"
        raise ValueError(f"--out {address} works on one machine only; {hint}")
    local = local_copy(address)
    pending = local.with_name(f"{local.name}.pending")  # exists while something is not uploaded
    mirror = Mirror(address, local, first=(CONFIG, CHECKPOINTS))
    lock = -1
    if rank() == 0:
        lock = acquire_lock(local.with_name(f"{local.name}.lock"))
        local.mkdir(parents=True, exist_ok=True)
        objects = mirror.objects()
        if not (pending.exists() and _is_ahead(local, mirror, objects)):
            mirror.pull(objects)
        pending.touch()
        say(f"mirroring {local} to {address}")
        mirror.start(say)
    wait_for_all()
    has_failed = True
    try:
        yield local
        has_failed = False
    finally:
        if rank() == 0:
            try:
                _upload_rest(mirror, pending)
            except StorageError as error:
                if not has_failed:
                    raise
                say(f"not mirrored: {error.strerror}")  # the first error is the important one
            finally:
                os.close(lock)


def _upload_rest(mirror: Mirror, pending: Path) -> None:
    mirror.stop()
    try:
        mirror.push()
    except StorageError as error:
        hint = f"all files are in {mirror.local}; run the same command to upload them"
        raise StorageError(error.errno, f"{error.strerror}; {hint}") from None
    pending.unlink(missing_ok=True)


def local_copy(address: str) -> Path:
    """Return the local folder that is mirrored to an address."""
    digest = hashlib.blake2b(address.rstrip("/").encode(), digest_size=6).hexdigest()
    return block_cache().folder / RUNS / f"{os.path.basename(address.rstrip('/'))}-{digest}"


def _is_ahead(local: Path, mirror: Mirror, objects: dict[str, Stored]) -> bool:
    """Return whether a local run that was not uploaded is the run on storage, or a later state."""
    if not (local / CONFIG).exists():
        return False
    if CONFIG not in objects:
        return True
    try:
        about = json.loads(mirror.read(objects[CONFIG]))["about"]["run_id"]
    except (ValueError, KeyError, TypeError):
        return False
    own = [checkpoint.step_of(path) for path in checkpoint.steps(local / CHECKPOINTS)]
    names = (STEP.fullmatch(name.rpartition("/")[2]) for name in objects)
    theirs = [int(match[1]) for match in names if match]
    return about == folder.read_run_id(local) and max(own, default=-1) >= max(theirs, default=-1)

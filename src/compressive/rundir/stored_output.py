"""Output on object storage: write to a local folder or file, and upload it."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from compressive.distributed import rank, wait_for_all
from compressive.rundir.lock import acquire_lock
from compressive.rundir.machine_copies import copied_folder
from compressive.storage.address import is_remote, split_address
from compressive.storage.backend import StorageError, attempt, backend_for
from compressive.storage.cache import RUNS, block_cache
from compressive.storage.file_systems import Stored
from compressive.storage.mirror import Mirror, check_writable

# Returns whether a local folder that was not uploaded has more than the objects on storage.
IsAhead = Callable[[Path, Mirror, dict[str, Stored]], bool]


@contextmanager
def mirrored_folder(
    address: str,
    say: Callable[[str], None],
    *,
    first: Sequence[str],
    is_ahead: IsAhead,
    ignored: Sequence[str] = (),
    needed: Sequence[str] = (),
) -> Iterator[Path]:
    """Yield a local folder; download it from storage first, and mirror its changes.

    Several processes share the folder; the first one downloads and uploads. On several machines,
    all get copies of the files whose names start with one of `needed`. Objects whose name ends with
    one of `ignored` are neither downloaded nor deleted.
    After an error, upload what there is. If the last upload fails, the local folder is kept and the
    same command on this machine resumes from it.
    """
    local = local_copy(address)
    pending = local.with_name(f"{local.name}.pending")  # exists while something is not uploaded
    mirror = Mirror(address, local, first=first, ignored=ignored)
    lock = -1
    if rank() == 0:
        lock = acquire_lock(local.with_name(f"{local.name}.lock"))
        local.mkdir(parents=True, exist_ok=True)
        objects = mirror.objects()
        if not (pending.exists() and is_ahead(local, mirror, objects)):
            mirror.pull(objects)
        pending.touch()
        say(f"mirroring {local} to {address}")
        mirror.start(say)
    has_failed = True
    try:
        with copied_folder(local, pending, needed):
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
    wait_for_all()  # torchrun ends or restarts all processes when one has ended


@contextmanager
def uploaded_files(*outs: str) -> Iterator[list[Path]]:
    """Yield local paths to write; afterwards upload those whose `out` is an address on storage."""
    paths = [_local_file(out) if is_remote(out) else Path(out) for out in outs]
    remote = {out: path for out, path in zip(outs, paths, strict=True) if is_remote(out)}
    for folder in {out.rpartition("/")[0] for out in remote}:
        check_writable(folder)
    for path in remote.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    yield paths
    for out, path in remote.items():
        _upload_file(path, out)


def _local_file(address: str) -> Path:
    """Return where the file of an address is written first; raise ValueError without a name."""
    split_address(address)
    folder, _, name = address.rpartition("/")
    if not name or folder.endswith("/"):  # s3://BUCKET or a folder
        raise ValueError(
            f"{address} names no file; add its name, such as {address.rstrip('/')}/NAME"
        )
    return local_copy(folder) / name


def _upload_file(local: Path, address: str) -> None:
    backend, (_, path) = backend_for(address), split_address(address)
    try:
        attempt(lambda: backend.upload(local, path), address, doing="write")
    except StorageError as error:
        hint = f"the file is {local}; run the same command again"
        raise StorageError(error.errno, error.problem, hint) from None
    local.unlink()


def _upload_rest(mirror: Mirror, pending: Path) -> None:
    mirror.stop()
    try:
        mirror.push()
    except StorageError as error:
        hint = f"all files are in {mirror.local}; run the same command to upload them"
        raise StorageError(error.errno, error.problem, hint) from None
    pending.unlink(missing_ok=True)


def local_copy(address: str) -> Path:
    """Return the local folder that is mirrored to an address."""
    digest = hashlib.blake2b(address.rstrip("/").encode(), digest_size=6).hexdigest()
    return block_cache().folder / RUNS / f"{os.path.basename(address.rstrip('/'))}-{digest}"

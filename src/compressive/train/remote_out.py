"""Run folders on object storage: train in a local folder that is mirrored to the address."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from compressive.rundir import checkpoint, folder
from compressive.rundir.files import CHECKPOINTS, CONFIG, METRICS, STEP
from compressive.rundir.stored_output import local_copy, mirrored_folder
from compressive.storage.address import is_remote
from compressive.storage.file_systems import Stored
from compressive.storage.mirror import Mirror

__all__ = ["local_copy", "mirrored_run"]


@contextmanager
def mirrored_run(out: str | Path | None, say: Callable[[str], None]) -> Iterator[str | Path | None]:
    """Yield the local folder of a run; if `out` is on storage, download it first and mirror it."""
    if out is None or not is_remote(out):
        yield out
        return
    # Upload metrics before checkpoints: a resumed run drops later lines, and cannot repeat earlier.
    order = {"first": (CONFIG, METRICS, CHECKPOINTS), "needed": (CONFIG, CHECKPOINTS)}
    with mirrored_folder(str(out), say, **order, is_ahead=_is_ahead) as local:
        yield local


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

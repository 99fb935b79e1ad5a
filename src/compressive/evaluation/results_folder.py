"""The folder of an evaluation: choose it, check that it is free, and lock it."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from compressive.distributed import rank
from compressive.evaluation.results import VALUES
from compressive.evaluation.tasks.gallery import FILE as GALLERY
from compressive.rundir.files import RESULTS
from compressive.rundir.lock import acquire_lock
from compressive.rundir.predictions_file import PREDICTED_TASKS, predictions_file
from compressive.rundir.records import read_results


def default_results_folder(place: str, kind: str, max_images: int) -> Path:
    """Return the folder of an encoder's results.

    An evaluation on fewer images than the one that is already there gets a folder of its own. One
    on all images takes the place of one on fewer, which is moved to a folder of its own.
    """
    path, name = Path(place), Path(place).name
    if path.is_file():  # other folders may have a file of this name
        name += "-" + hashlib.blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    folder = path / kind if path.is_dir() else Path("runs") / kind / name
    before = max_images
    with suppress(ValueError, OSError):  # a damaged file is reported later
        before = read_results(folder / RESULTS)[0].about.get("max_images", 0)
    if before != max_images and max_images:
        return folder.with_name(f"{folder.name}-{max_images}")
    aside = folder.with_name(f"{folder.name}-{before}")
    if before != max_images and rank() == 0 and not aside.exists():
        folder.rename(aside)
    return folder


def refuse_other_files(out: Path) -> None:
    """Raise ValueError if `out` has other files, which later commands would take for results."""
    names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    hidden = {name for name in names if name.startswith(".")}  # also of an interrupted write
    known = {"features", VALUES, GALLERY, *map(predictions_file, PREDICTED_TASKS)}
    if RESULTS not in names and names - known - hidden:
        raise ValueError(f"{out} is not empty and holds no {RESULTS}; choose another --out")


@contextmanager
def locked_folder(out: Path) -> Iterator[None]:
    """Lock the folder: each of two evaluations would overwrite the records of the other."""
    created = [folder for folder in (out, *out.parents) if not folder.exists()]
    held = acquire_lock(out) if rank() == 0 else None
    try:
        yield
    finally:
        if held is not None:
            os.close(held)
            with suppress(OSError):  # if nothing was written
                for folder in created:
                    folder.rmdir()

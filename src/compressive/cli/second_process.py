"""A process of its own for the second method of the quick start; imports no torch."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from compressive import recipes
from compressive.config import Config
from compressive.platforms.processes import interrupt, own_process_group, usable_cores
from compressive.rundir.folder import open_folder

QUICKSTART_METHODS = ("simclr", "c-simclr")


def quickstart_config(method: str, seed: int) -> Config:
    """Return the settings of a method in the quick start."""
    return replace(recipes.get(f"{method}/quickstart").config, seed=seed)


@contextmanager
def second_process(out: Path, seed: int) -> Iterator["subprocess.Popen[bytes] | None"]:
    """Check both folders, then train and evaluate the second method in another process.

    Start it before torch is imported, which takes seconds. It ends at once with exit code 1 if
    there is a GPU. It is stopped if this process stops earlier. None if there is one CPU core.
    """
    for method in QUICKSTART_METHODS:
        open_folder(out / method, quickstart_config(method, seed), resume=True)
    if usable_cores() < 2:
        yield None
        return
    words = [sys.executable, "-m", "compressive.cli.quickstart"]
    words += [QUICKSTART_METHODS[1], str(out), str(seed)]
    group, silent = own_process_group(), subprocess.DEVNULL
    process = subprocess.Popen(
        words, stdin=silent, stdout=silent, stderr=silent,
        process_group=group.process_group, creationflags=group.creationflags,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            interrupt(process)  # it saves a checkpoint
            process.wait()

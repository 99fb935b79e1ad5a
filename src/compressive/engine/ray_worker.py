"""What runs in a process of Ray."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any, NamedTuple

from compressive.storage.backend import be_patient


class Sender(NamedTuple):
    """The process that sends units."""

    folder: str  # for relative paths
    version: str
    words: tuple[str, ...]  # its command line, which records name


class Failure(NamedTuple):
    """An error of a unit that is reported in one line."""

    is_value: bool  # ValueError, else OSError
    message: str


def this_process() -> Sender:
    """Describe this process."""
    return Sender(os.getcwd(), version("compressive"), tuple(sys.argv))


def run_unit(work: Callable[[Any], Any], unit: Any, sender: Sender) -> Any:
    """Return the result of a unit, or the error that the sender shall report."""
    # Errors are returned as text: Ray would raise them with the traceback of this process, and
    # cannot send all kinds.
    try:
        if (here := version("compressive")) != sender.version:
            raise ValueError(
                f"compressive {here} is installed on {os.uname().nodename}, and "
                f"{sender.version} where the command was started; install the same version"
            )
        be_patient()  # the sender has opened the same addresses
        sys.argv = list(sender.words)
        with suppress(OSError):  # missing on another machine: absolute paths may still exist
            os.chdir(sender.folder)
        return work(unit)
    except ValueError as error:
        return Failure(True, str(error))
    except OSError as error:
        return Failure(False, (error.filename is None and error.strerror) or str(error))

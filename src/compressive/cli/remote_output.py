"""Options for output on object storage."""

import os

from compressive.cli.terminal import print_line
from compressive.storage.address import is_remote


def check_remote_folder(out: str | None) -> None:
    """Raise an error if a folder on object storage cannot be written, in one process."""
    if out is not None and is_remote(out) and os.environ.get("RANK", "0") == "0":
        from compressive.storage.mirror import check_writable

        check_writable(out)


def print_stored(out: str | None) -> None:
    """Print the address of output on object storage."""
    if out is not None and is_remote(out):
        print_line(f"on storage: {out}")

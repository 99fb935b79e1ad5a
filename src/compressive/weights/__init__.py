"""Trained encoders that come with the package: which there are, and where."""

from pathlib import Path

WEIGHTS = Path(__file__).parent
_SUFFIX = ".safetensors"
# Checksums of files that do not state their own, which were written in format 2.
_CHECKSUMS = {"cifar10-c-simclr-r18": "2083679262"}


def names() -> tuple[str, ...]:
    """What `compressive.load`, `evaluate` and `embed` take by name alone."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob(f"*{_SUFFIX}")))


def find(name: str) -> Path | None:
    """The file of the encoder with this name, if it comes with the package."""
    return WEIGHTS / f"{name}{_SUFFIX}" if name in names() else None


def known_checksum(path: Path) -> str | None:
    """Return the checksum of a file of the package that does not state its own."""
    return _CHECKSUMS.get(path.stem) if path.resolve().parent == WEIGHTS.resolve() else None


def hint() -> str:
    """The end of a line that says what was not found: what there is; empty if there is nothing."""
    known = ", ".join(names())
    return f"; with the package come these by name: {known}" if known else ""

"""Names and files of the trained encoders in the package; paths of weights."""

from pathlib import Path

WEIGHTS = Path(__file__).parent
HUB = ("hf-hub:", "hf_hub:")  # prefixes of ids on the Hugging Face hub
_FILE_SUFFIXES = (".pth", ".pt", ".safetensors", ".bin", ".tar", ".ckpt")
_SUFFIX = ".safetensors"


def names() -> tuple[str, ...]:
    """Return the names that `compressive.load`, `evaluate` and `embed` accept instead of a path."""
    return tuple(sorted(path.stem for path in WEIGHTS.glob(f"*{_SUFFIX}")))


def find(name: str) -> Path | None:
    """Return the file of a packaged encoder, or None if there is no such name."""
    return WEIGHTS / f"{name}{_SUFFIX}" if name in names() else None


def is_packaged(path: Path) -> bool:
    """Return whether a file is one of the package."""
    return path.resolve().parent == WEIGHTS.resolve()


def hint() -> str:
    """Return the end of an error message that lists the packaged encoders; "" if there are none."""
    known = ", ".join(names())
    return f"; the package contains these encoders: {known}" if known else ""


def require_path(place: str) -> None:
    """Raise an error if this is a URL, or a path (not a name or an id) and nothing is there."""
    if "://" in place:
        hint = "download it, and give the path"
        raise ValueError(f"{place} is a URL, but only local files can be used; {hint}")
    path = Path(place).expanduser()
    is_path = "/" in place or path.suffix in _FILE_SUFFIXES
    if is_path and not place.startswith(HUB) and not path.exists():
        raise FileNotFoundError(f"{place} does not exist: neither a run folder nor a file")

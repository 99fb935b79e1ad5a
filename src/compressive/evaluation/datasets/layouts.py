"""File layouts and origins of robustness sets, and how to find one on disk."""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.data.decode import first_line

SEVERITIES = (1, 2, 3, 4, 5)
# Archives of ImageNet-C, which some people unpack into folders of these names.
ARCHIVES = ("", "blur/", "digital/", "noise/", "weather/", "extra/")

# "resize": the crop of the encoder's test images; "center": a square of the whole shorter side.
CropKind = Literal["resize", "center"]


class Layout(NamedTuple):
    """Folder names and contents of a set, and its publisher, from published.toml."""

    folders: Sequence[str]  # possible names of its folder, below the root or as the root
    layout: str
    origin: str
    # Any of these identifies the folder.
    inside: Sequence[str] = tuple(f"{a}{name}" for name in NAMES + EXTRAS for a in ARCHIVES)
    images: Sequence[int] = ()  # number of images of a complete set, per cell
    crop: CropKind = "resize"


PUBLISHED: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(
    files("compressive.evaluation.datasets").joinpath("published.toml").read_text(encoding="utf-8")
)
SHIFTS = {name: Layout(**facts) for name, facts in PUBLISHED["shift"].items()}


@contextmanager
def whole(what: str) -> Iterator[None]:
    """Convert any error of a third-party reader to a ValueError of one line."""
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__} {first_line(error)}"
        raise ValueError(f"{what} is damaged or has another format: {reason}") from error


@contextmanager
def named_files(name: str) -> Iterator[None]:
    """Add the layout and the origin of a set to the error of a missing file."""
    try:
        yield
    except FileNotFoundError as error:
        if error.filename is None:  # the message is complete
            raise
        raise FileNotFoundError(
            f"{name} is incomplete: no {error.filename}; {expected(name)}"
        ) from error


def find_folder(name: str, root: str | Path) -> Path:
    """Return the folder of a set: below the root, ignoring case, or the root itself."""
    root, known = Path(root).expanduser(), SHIFTS[name]
    own = {folder.lower() for folder in known.folders}
    others = {f.lower() for layout in SHIFTS.values() for f in layout.folders} - own
    below = sorted(root.iterdir()) if root.is_dir() else []
    named = [path for path in below if path.name.lower() in own]
    itself = [] if root.resolve().name.lower() in others else [root]
    for base in (*(root / folder for folder in known.folders), *named, *itself):
        if any(any(base.glob(pattern)) for pattern in known.inside):
            return base
    raise FileNotFoundError(f"no {name} in {root}: {expected(name)}")


def expected(name: str) -> str:
    """Describe the layout of a missing set and the origin of its files."""
    return f"expected {SHIFTS[name].layout}; the files are {SHIFTS[name].origin}"

"""Files that are not read as images, and what to do with them."""

from collections.abc import Container
from pathlib import Path

from compressive.data.archives import archive_ending
from compressive.data.decode import EXTENSIONS, HEIC_EXTENSIONS
from compressive.data.location import ALLOWED

# Unsupported images and videos, counted in a note. HEIC is supported if its extra is installed.
_VIDEOS = {".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".3gp"}
FOREIGN = {*HEIC_EXTENSIONS, ".jxl", ".jp2", ".psd", ".svg", *_VIDEOS}
FOREIGN |= {".dng", ".cr2", ".cr3", ".nef", ".arw"}
FOREIGN -= EXTENSIONS
_ARCHIVES = {".gz", ".bz2", ".xz", ".zst", ".rar", ".7z", ".tzst"}
_TABLES = {".json", ".jsonl", ".xlsx", ".npz", ".npy"}


def file_advice(path: Path) -> str:
    """Say what a file is and how to use what it holds."""
    kind = path.suffix.lower()
    if kind in EXTENSIONS:
        return f"a single image; give the folder with all images, such as {path.parent}"
    if kind in _VIDEOS:
        frames = path.with_suffix("")
        return f"a video; extract frames and give their folder: ffmpeg -i {path} {frames}/%06d.jpg"
    if archive_ending(path):
        return f"an archive; give {path} itself"
    if kind in _ARCHIVES:
        return f"an archive; unpack it and give the folder, such as {path.parent / path.stem}"
    if kind in _TABLES:
        hint = "or a .csv file with the columns path and label"
        return f"a {kind} file; give the folder of the images with a subfolder per class, {hint}"
    return f"neither a folder nor a known kind of file; allowed: {ALLOWED}"


def conversion_hint(kinds: Container[str]) -> str:
    """Return what to do with unsupported files of these kinds."""
    heic = [kind for kind in HEIC_EXTENSIONS if kind in kinds and kind in FOREIGN]
    extra = "for HEIC install the extra: pip install 'compressive[heic]'; " if heic else ""
    return f"{extra}convert images to JPEG, extract video frames"


def archive_hint(path: Path) -> str:
    """Return what to do with archives in a folder without images, or ""."""
    every = sorted(path.glob("*"))
    found = [p for p in every if archive_ending(p) or p.suffix.lower() in _ARCHIVES]
    found = [p for p in found if p.suffix.lower() != ".tar"]
    return f"{found[0]} is {file_advice(found[0])}; " if found else ""

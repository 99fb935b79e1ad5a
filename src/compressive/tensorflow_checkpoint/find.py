"""Find the checkpoint that a user means by a path."""

import re
from pathlib import Path

from compressive.rundir.files import local_path

_SHARD = re.compile(r"\.data-\d{5}-of-\d{5}$")
_INDEX_PATTERNS = (
    "*.index",
    "*/*.index",
    "*/*/*.index",
)  # a SavedModel has variables/variables.index
_STATE = re.compile(r'^model_checkpoint_path: "(.*)"', re.MULTILINE)
_MAX_STATE = 2**20  # bytes of the file `checkpoint`
_OTHER_FORMATS = {  # first bytes -> what it is, and what to do
    b"PK\x03\x04": ("a PyTorch or zip file", "`compressive evaluate` reads PyTorch weights itself"),
    b"\x80\x02": ("a PyTorch file", "`compressive evaluate` reads it itself"),
    b"\x1f\x8b": ("a compressed archive", "extract it with `tar xf`, and give the folder"),
    b"\x89HDF": ("an HDF5 file", "only checkpoints with .index and .data files can be converted"),
}


def find_prefix(place: str | Path) -> Path:
    """Return the prefix of a checkpoint's file names.

    `place` is that, one of the files, or a folder: of one checkpoint, or with a file `checkpoint`
    that names the latest.
    """
    path = local_path(place)
    if path.is_dir():
        return _in_folder(path)
    prefix = path.with_name(_SHARD.sub("", path.name.removesuffix(".index")))
    if prefix.with_name(f"{prefix.name}.index").is_file():
        return prefix
    if not path.is_file():
        hint = "give a folder, or the path of the .index file"
        raise FileNotFoundError(f"no TensorFlow checkpoint at {path}; {hint}")
    if path != prefix:
        raise FileNotFoundError(f"{prefix}.index is missing: it belongs to {path.name}")
    with path.open("rb") as file:
        first_bytes = file.read(16)
    for start, (what, hint) in _OTHER_FORMATS.items():
        if first_bytes.startswith(start):
            raise ValueError(f"{path} is {what}, not a TensorFlow checkpoint; {hint}")
    hint = "give its folder or its .index file"
    raise ValueError(f"{path} is not a TensorFlow checkpoint; {hint}")


def _in_folder(folder: Path) -> Path:
    for pattern in _INDEX_PATTERNS:
        found = sorted(path.with_suffix("") for path in folder.glob(pattern) if path.is_file())
        if len(found) == 1:
            return found[0]
        if not found:
            continue
        latest = _latest(found[0].parent)
        if latest in found and len({path.parent for path in found}) == 1:
            return latest
        some = ", ".join(str(path.relative_to(folder)) for path in found[:4])
        raise ValueError(f"{folder} has {len(found)} checkpoints: {some}; give one of them")
    raise FileNotFoundError(f"{folder} has no TensorFlow checkpoint: no .index file")


def _latest(folder: Path) -> Path | None:
    """Return the checkpoint that TensorFlow's file `checkpoint` names, which may be a moved one."""
    state = folder / "checkpoint"
    if not state.is_file() or state.stat().st_size > _MAX_STATE:
        return None
    named = _STATE.search(state.read_text(errors="replace"))
    return folder / Path(named[1]).name if named and Path(named[1]).name else None
